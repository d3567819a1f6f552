"""A batch as tensors: the source with its EOS, the target shifted right under teacher forcing, and what it should say.

src      s1 s2 s3 EOS          tgt_in   BOS t1 t2          (§3.1: the output embeddings are offset by one position)
src      s1 EOS pad pad        tgt_out  t1  t2 EOS
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.batches.buckets import Ids


class PairSource(Protocol):
    """Pairs of ids laid end to end: `tokens.binarize.PairedIds`, or anything of its shape."""

    @property
    def src_ids(self) -> NDArray[np.integer]: ...
    @property
    def tgt_ids(self) -> NDArray[np.integer]: ...
    @property
    def src_offsets(self) -> NDArray[np.integer]: ...
    @property
    def tgt_offsets(self) -> NDArray[np.integer]: ...


@dataclass(frozen=True)
class Batch:
    """Tensors of int64, padded at the right; `n_tokens` counts the targets that are not padding, EOS included."""

    src: Tensor  # [B, S]
    tgt_in: Tensor  # [B, T]
    tgt_out: Tensor  # [B, T]
    n_tokens: int
    indices: Ids  # [B]

    def __len__(self) -> int:
        return int(self.src.shape[0])

    def without_rows(self) -> Batch:
        """One as wide, with nothing to compute."""
        return Batch(self.src[:0], self.tgt_in[:0], self.tgt_out[:0], 0, self.indices[:0])

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device; copies may overlap with work there where memory is pinned."""
        return Batch(
            self.src.to(device, non_blocking=True),
            self.tgt_in.to(device, non_blocking=True),
            self.tgt_out.to(device, non_blocking=True),
            self.n_tokens,
            self.indices,
        )

    def pin(self) -> Batch:
        """The same in page-locked memory, from which a GPU copies while it computes."""
        return Batch(
            self.src.pin_memory(), self.tgt_in.pin_memory(), self.tgt_out.pin_memory(), self.n_tokens, self.indices
        )


def collate(data: PairSource, indices: Ids, pad_id: int, bos_id: int, eos_id: int) -> Batch:
    """The pairs `indices` ([B]) of memory-mapped ids as one batch. B may be 0: then S and T are 1 and n_tokens 0."""
    indices = np.asarray(indices, dtype=np.int64)
    src, _ = _rectangle(data.src_ids, data.src_offsets, indices, pad_id, eos_id)
    tgt_out, lengths = _rectangle(data.tgt_ids, data.tgt_offsets, indices, pad_id, eos_id)
    return _batch(src, tgt_out, lengths, indices, pad_id, bos_id)


def collate_lists(
    src: list[list[int]], tgt: list[list[int]], pad_id: int, bos_id: int, eos_id: int, indices: Ids | None = None
) -> Batch:
    """The same from lists of ids, for text that was never binarised or was cut anew."""
    rows = np.arange(len(src), dtype=np.int64)
    left, _ = _rectangle(*_end_to_end(src), rows, pad_id, eos_id)
    right, lengths = _rectangle(*_end_to_end(tgt), rows, pad_id, eos_id)
    return _batch(left, right, lengths, rows if indices is None else indices, pad_id, bos_id)


def _batch(src: Ids, tgt_out: Ids, lengths: Ids, indices: Ids, pad_id: int, bos_id: int) -> Batch:
    tgt_in = np.full_like(tgt_out, pad_id)
    tgt_in[:, 0] = bos_id
    tgt_in[:, 1:] = tgt_out[:, :-1]
    # What stands at `length` is EOS in tgt_out; shifted, it would be fed to the decoder in the shorter rows.
    short = np.flatnonzero(lengths + 1 < tgt_out.shape[1])
    tgt_in[short, lengths[short] + 1] = pad_id
    return Batch(
        torch.from_numpy(src),
        torch.from_numpy(tgt_in),
        torch.from_numpy(tgt_out),
        int(lengths.sum()) + len(lengths),
        indices,
    )


def _rectangle(
    ids: NDArray[np.integer], offsets: NDArray[np.integer], indices: Ids, pad_id: int, eos_id: int
) -> tuple[Ids, Ids]:
    """Rows of `ids` with EOS behind each, padded to the longest ([B, S]), and their lengths without EOS ([B])."""
    starts = offsets[indices].astype(np.int64)
    lengths = offsets[indices + 1].astype(np.int64) - starts
    width = int(lengths.max()) + 1 if len(lengths) else 1
    columns = np.arange(width, dtype=np.int64)
    inside = columns < lengths[:, None]
    rows = np.full((len(indices), width), pad_id, dtype=np.int64)
    rows[inside] = ids[(starts[:, None] + columns)[inside]]
    rows[np.arange(len(indices)), lengths] = eos_id
    return rows, lengths


def _end_to_end(lists: list[list[int]]) -> tuple[Ids, Ids]:
    lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    ids = np.fromiter((index for row in lists for index in row), dtype=np.int64, count=int(offsets[-1]))
    return ids, offsets


def merged(batches: Sequence[Batch], pad_id: int, most_tokens: int) -> list[Batch]:
    """Neighbours put together, padded to the widest, for as long as a side has at most `most_tokens` real tokens.

    For whoever computes nothing at padding: few large batches cost less than many small ones.
    """
    groups: list[list[Batch]] = []
    held = 0
    for batch in batches:
        tokens = max(int((batch.src != pad_id).sum()), batch.n_tokens)
        if not groups or held + tokens > most_tokens:
            groups.append([])
            held = 0
        groups[-1].append(batch)
        held += tokens
    return [group[0] if len(group) == 1 else _merge(group, pad_id) for group in groups]


def gathered(batches: Sequence[Batch], pad_id: int, most: int, slack: float = 2.0) -> list[Batch]:
    """The same rows in about `most` rectangles, each of neighbours in width, so that few positions become padding.

    For whoever pays for each call: an update comes as many small tiles, so that its lengths are mixed. No rectangle has
    more than `slack` times its share of the positions of all tiles on either side, or those of the largest tile: where
    one source is far longer than its neighbours, there are more rectangles than `most`.
    """
    if len(batches) <= most:
        return list(batches)
    order = sorted(batches, key=lambda batch: (batch.tgt_out.size(1), batch.src.size(1)))
    ends = [round(len(order) * number / most) for number in range(most + 1)]
    areas = [max(batch.src.numel(), batch.tgt_out.numel()) for batch in order]
    limit = max(int(slack * sum(areas) / most), *areas)
    return [_merge(group, pad_id) for start, end in pairwise(ends) for group in _within(order[start:end], limit)]


def _within(batches: Sequence[Batch], limit: int) -> list[list[Batch]]:
    """The batches in groups whose rectangle has at most `limit` positions on each side."""
    groups: list[list[Batch]] = []
    rows = widest = 0
    for batch in batches:
        width = max(batch.src.size(1), batch.tgt_out.size(1))
        if not groups or (rows + len(batch)) * max(widest, width) > limit:
            groups.append([])
            rows = widest = 0
        groups[-1].append(batch)
        rows, widest = rows + len(batch), max(widest, width)
    return groups


def _merge(batches: Sequence[Batch], pad_id: int) -> Batch:
    def stack(parts: list[Tensor]) -> Tensor:
        widest = max(part.size(1) for part in parts)
        return torch.cat([torch.nn.functional.pad(part, (0, widest - part.size(1)), value=pad_id) for part in parts])

    return Batch(
        stack([batch.src for batch in batches]),
        stack([batch.tgt_in for batch in batches]),
        stack([batch.tgt_out for batch in batches]),
        sum(batch.n_tokens for batch in batches),
        np.concatenate([batch.indices for batch in batches]),
    )
