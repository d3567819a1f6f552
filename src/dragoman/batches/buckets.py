"""Token budgets: pairs of like lengths put together, so that little of a batch is padding.

A batch is a rectangle on each side: rows x the longest row, EOS (or BOS) counted. Neither side may be larger than the
budget (§5.1: about 25,000 source tokens and 25,000 target tokens a batch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Lengths = NDArray[np.integer]


def over_budget(src_lengths: Lengths, tgt_lengths: Lengths, batch_tokens: int) -> NDArray[np.bool_]:
    """[n] True where a pair, with its EOS, is alone larger than the budget on a side: it fits into no batch."""
    return np.asarray((src_lengths >= batch_tokens) | (tgt_lengths >= batch_tokens))


def cut(src_lengths: Lengths, tgt_lengths: Lengths, indices: Ids, batch_tokens: int) -> list[Ids]:
    """The pairs `indices` in batches of like lengths, each at most `batch_tokens` padded tokens on either side.

    Lengths ([n]) are those of all pairs, without EOS or BOS, which are counted here. Each index comes back exactly
    once. Equal lengths keep the order in which they came, so that a shuffled input gives shuffled batches. Raises
    ValueError for a pair that fits into no batch: leave those out by `over_budget` first.
    """
    if not len(indices):
        return []
    indices = np.asarray(indices, dtype=np.int64)
    src = src_lengths[indices].astype(np.int64) + 1
    tgt = tgt_lengths[indices].astype(np.int64) + 1
    order = _order(src, tgt, batch_tokens)
    longest = np.maximum(src, tgt)[order]
    if int(longest.max()) > batch_tokens:
        raise ValueError(f"a pair of {int(longest.max())} tokens is larger than the budget of {batch_tokens}")
    indices = indices[order]
    batches = []
    start = 0
    while start < len(indices):
        # The first row bounds how many can follow; of these, as many as keep rows x longest within the budget.
        end = min(len(indices), start + batch_tokens // int(longest[start]))
        heights = np.maximum.accumulate(longest[start:end]) * np.arange(1, end - start + 1)
        start_next = start + max(1, int(np.searchsorted(heights, batch_tokens, side="right")))
        batches.append(indices[start:start_next])
        start = start_next
    return batches


def _order(src: Lengths, tgt: Lengths, batch_tokens: int) -> Ids:
    """An order in which neighbours are alike on both sides.

    Sorting by one side alone leaves the other loose. So the pairs are put into slabs of about equal targets, and sorted
    within a slab by source, up in one slab and down in the next, so that no batch spans a jump. For batches that are
    square in this plane there are about the root of their number of slabs, more where targets spread wider than sources
    do at a given target. All pairs of one target length go to one slab: where slabs are that thin, this is exact.
    """
    longest = np.maximum(src, tgt)
    n_batches = float(longest.sum()) / batch_tokens
    mass = np.bincount(tgt, weights=longest)
    slabs = max(1, round(math.sqrt(2 * n_batches * _aspect(src, tgt))))
    middle = np.cumsum(mass) - mass / 2
    slab_of_length = np.minimum(middle / mass.sum() * slabs, slabs - 1).astype(np.int64)
    _, slab_of_length = np.unique(slab_of_length, return_inverse=True)
    slab = slab_of_length[tgt]
    across = np.where(slab % 2 == 0, src, -src)
    along = np.where((slab + src) % 2 == 0, tgt, -tgt)
    return np.lexsort((along, across, slab)).astype(np.int64)


def _aspect(src: Lengths, tgt: Lengths) -> float:
    """How much wider targets spread than sources of like targets do."""
    spread_src, spread_tgt = float(np.std(src)), float(np.std(tgt))
    if not spread_src or not spread_tgt:
        return 1.0
    shared = float(np.mean((src - src.mean()) * (tgt - tgt.mean()))) / (spread_src * spread_tgt)
    rest = spread_src * math.sqrt(max(1e-4, 1.0 - shared * shared))
    return min(100.0, max(0.01, spread_tgt / rest))


def padded(src_lengths: Lengths, tgt_lengths: Lengths, indices: Ids) -> tuple[int, int]:
    """Rows x longest row of either side, EOS counted: what the rectangle of these pairs costs."""
    if not len(indices):
        return 0, 0
    rows = len(indices)
    return rows * (int(src_lengths[indices].max()) + 1), rows * (int(tgt_lengths[indices].max()) + 1)


def padding(src_lengths: Lengths, tgt_lengths: Lengths, batches: Sequence[Ids]) -> float:
    """The share of all positions of these batches, both sides together, that hold padding."""
    real = total = 0
    for indices in batches:
        total += sum(padded(src_lengths, tgt_lengths, indices))
        real += int(src_lengths[indices].sum()) + int(tgt_lengths[indices].sum()) + 2 * len(indices)
    return 1.0 - real / total if total else 0.0
