"""Subword regularisation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dragoman.batches.batch import collate
from dragoman.batches.regularise import STRETCH, collate_sampled
from dragoman.batches.stream import Stream
from dragoman.tokens.paired import PairedIds
from dragoman.tokens.tokenizer import SentencePieceTokenizer, TokenizerConfig, train_tokenizer

TEXTS = [
    f"{who} {what} the {where} {when}."
    for who in ("The translator", "A child", "Nobody", "My sister's neighbour")
    for what in ("remembers", "is painting", "had forgotten")
    for where in ("harbour", "mountain railway", "letter")
    for when in ("again", "on Wednesdays", "before it was announced")
]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request, tmp_path_factory) -> SentencePieceTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(TEXTS, TokenizerConfig(kind=request.param, vocab_size=380), folder)


@pytest.fixture
def data(tokenizer: SentencePieceTokenizer) -> PairedIds:
    ids = tokenizer.encode_batch(TEXTS)
    return PairedIds.from_lists(ids, ids[::-1])


def rows(batch, tokenizer: SentencePieceTokenizer) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [
        tuple(tuple(index for index in row.tolist() if index != tokenizer.pad_id) for row in (src, tgt))  # type: ignore[misc]
        for src, tgt in zip(batch.src, batch.tgt_out, strict=True)
    ]


def test_texts_stay_and_cuts_change(tokenizer: SentencePieceTokenizer, data: PairedIds) -> None:
    every = np.arange(data.n)
    plain = rows(collate(data, every, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id), tokenizer)
    first = rows(collate_sampled(data, every, tokenizer, alpha=0.1, seed=1, epoch=0), tokenizer)
    second = rows(collate_sampled(data, every, tokenizer, alpha=0.1, seed=1, epoch=1), tokenizer)
    for old, new in zip(plain, first, strict=True):
        assert [tokenizer.decode(side) for side in new] == [tokenizer.decode(side) for side in old]
        assert all(len(a) <= STRETCH * len(b) for a, b in zip(new, old, strict=True))
    assert sum(old != new for old, new in zip(plain, first, strict=True)) > data.n / 2
    assert sum(old != new for old, new in zip(first, second, strict=True)) > data.n / 2


def test_a_cut_depends_on_the_pair_and_not_on_the_part(tokenizer: SentencePieceTokenizer, data: PairedIds) -> None:
    options = {"alpha": 0.2, "seed": 9, "epoch": 4}
    whole = rows(collate_sampled(data, np.arange(data.n), tokenizer, **options), tokenizer)
    for part in np.array_split(np.arange(data.n)[::-1], 7):
        assert rows(collate_sampled(data, part, tokenizer, **options), tokenizer) == [whole[row] for row in part]


def test_the_budget_holds(tokenizer: SentencePieceTokenizer, data: PairedIds) -> None:
    budget = 400
    stream = Stream(data.src_lengths, data.tgt_lengths, int(budget / STRETCH), 1)
    for position, batch in zip(range(30), stream.iterate(), strict=False):
        padded = [0, 0]
        for tile in batch.tiles:
            made = collate_sampled(data, tile, tokenizer, alpha=0.5, seed=position, epoch=0)
            padded[0] += made.src.numel()
            padded[1] += made.tgt_out.numel()
        assert max(padded) <= budget


def test_what_is_unknown_keeps_its_ids(tokenizer: SentencePieceTokenizer) -> None:
    data = PairedIds.from_lists([[tokenizer.unk_id, 300, 301]], [[300]])
    batch = collate_sampled(data, np.array([0]), tokenizer, alpha=0.9, seed=1, epoch=0)
    assert batch.src.tolist() == [[tokenizer.unk_id, 300, 301, tokenizer.eos_id]]
