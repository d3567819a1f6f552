"""Pairs of ids laid end to end: a corpus as four arrays, in memory or memory-mapped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dragoman.text.corpus import Counts


@dataclass(frozen=True)
class PairedIds:
    """`n` pairs. Pair i of the source is `src_ids[src_offsets[i] : src_offsets[i + 1]]`, without EOS or BOS.

    The arrays are memory maps where they come from `binarize`: they take no anonymous memory, and the system drops and
    re-reads their pages as it sees fit.
    """

    src_ids: NDArray[np.integer]
    src_offsets: NDArray[np.integer]  # [n + 1]
    src_lengths: NDArray[np.integer]  # [n]
    tgt_ids: NDArray[np.integer]
    tgt_offsets: NDArray[np.integer]  # [n + 1]
    tgt_lengths: NDArray[np.integer]  # [n]
    bounds: tuple[int, ...]
    """Where each corpus starts and ends: from 0 to n."""
    weights: tuple[float, ...]
    """How often an epoch has each corpus."""
    counts: Counts = field(default_factory=Counts)
    """Pairs read, kept, and left out by cause."""
    fingerprint: str = ""
    """Equal for equal corpora, tokenizer and settings."""

    @property
    def n(self) -> int:
        return len(self.src_lengths)

    def __len__(self) -> int:
        return self.n

    def src(self, index: int) -> NDArray[np.integer]:
        """The source ids of a pair, without EOS."""
        return self.src_ids[int(self.src_offsets[index]) : int(self.src_offsets[index + 1])]

    def tgt(self, index: int) -> NDArray[np.integer]:
        """The target ids of a pair, without BOS or EOS."""
        return self.tgt_ids[int(self.tgt_offsets[index]) : int(self.tgt_offsets[index + 1])]

    @classmethod
    def from_lists(cls, src: Iterable[Sequence[int]], tgt: Iterable[Sequence[int]]) -> PairedIds:
        """A small corpus in memory. The two sides must have as many rows as each other."""
        left, right = _end_to_end(src), _end_to_end(tgt)
        if len(left[2]) != len(right[2]):
            raise ValueError(f"{len(left[2])} sources and {len(right[2])} targets")
        n = len(left[2])
        return cls(*left, *right, bounds=(0, n), weights=(1.0,), counts=Counts(read=n, kept=n))


def _end_to_end(rows: Iterable[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.int32]]:
    held = [np.asarray(row, dtype=np.int32) for row in rows]
    lengths = np.array([len(row) for row in held], dtype=np.int32)
    offsets = np.zeros(len(held) + 1, dtype=np.uint64)
    np.cumsum(lengths, out=offsets[1:])
    return (np.concatenate(held) if held else np.empty(0, dtype=np.int32)), offsets, lengths
