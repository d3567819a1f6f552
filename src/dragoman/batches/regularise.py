"""Subword regularisation: the same pair cut differently each time it is seen.

How a pair is cut depends on the seed, the epoch and the pair alone, so the same pairs give the same gradient however
they are split over devices, and a resumed run goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dragoman.batches.batch import Batch, PairSource, collate_lists
from dragoman.batches.buckets import Ids
from dragoman.batches.shuffle import key_of, keys

STRETCH = 2.0
"""How many times its plain length a sampled sentence may have. Plan batches with `batch_tokens / STRETCH` tokens: then
their padded size stays within `batch_tokens` whatever is drawn. With BPE-dropout of 0.1 sentences grow by a fifth
(Tatoeba en-zh) to two fifths (Multi30k), and one in a hundred comes out more than twice as long."""


class Sampler(Protocol):
    """What is asked of a tokenizer here: `tokens.tokenizer.SentencePieceTokenizer` answers it."""

    pad_id: int
    unk_id: int
    bos_id: int
    eos_id: int

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode_sampled_batch(
        self, texts: Sequence[str], alpha: float, nbest: int = -1, *, seeds: Sequence[int]
    ) -> list[list[int]]: ...


def collate_sampled(
    data: PairSource,
    indices: Ids,
    tokenizer: Sampler,
    *,
    alpha: float,
    nbest: int = -1,
    seed: int,
    epoch: int,
    stretch: float = STRETCH,
) -> Batch:
    """The pairs `indices` ([B]) as one batch, each side cut anew: see `encode_sampled_batch` for alpha and nbest.

    A sentence that comes out longer than `stretch` times its plain length, EOS counted, keeps its plain cut, and so
    does one that holds an unknown token, whose text is lost.
    """
    indices = np.asarray(indices, dtype=np.int64)
    src = _sampled(data.src_ids, data.src_offsets, indices, tokenizer, alpha, nbest, key_of(seed, epoch, 11), stretch)
    tgt = _sampled(data.tgt_ids, data.tgt_offsets, indices, tokenizer, alpha, nbest, key_of(seed, epoch, 12), stretch)
    return collate_lists(src, tgt, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, indices)


def _sampled(
    ids: NDArray[np.integer],
    offsets: NDArray[np.integer],
    indices: Ids,
    tokenizer: Sampler,
    alpha: float,
    nbest: int,
    key: int,
    stretch: float,
) -> list[list[int]]:
    plain = [ids[int(offsets[index]) : int(offsets[index + 1])].tolist() for index in indices]
    texts = [tokenizer.decode(row) for row in plain]
    drawn = tokenizer.encode_sampled_batch(texts, alpha, nbest, seeds=keys(indices, key))
    return [
        cut if len(cut) > 0 and len(cut) + 1 <= stretch * (len(row) + 1) and tokenizer.unk_id not in row else row
        for row, cut in zip(plain, drawn, strict=True)
    ]
