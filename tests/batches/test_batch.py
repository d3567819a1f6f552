"""Batches as tensors."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dragoman.batches.batch import Batch, collate, collate_lists, gathered, merged
from dragoman.tokens.paired import PairedIds

PAD, BOS, EOS = 0, 2, 3
ROWS = st.lists(st.tuples(*[st.lists(st.integers(4, 900), max_size=9)] * 2), min_size=1, max_size=12)


def naive(rows: list[list[int]], before: list[int], after: list[int]) -> torch.Tensor:
    full = [before + row + after for row in rows]
    width = max(map(len, full))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in full])


@given(rows=ROWS, data=st.data())
def test_it_is_what_a_loop_gives(rows: list[tuple[list[int], list[int]]], data: st.DataObject) -> None:
    src, tgt = ([row[side] for row in rows] for side in (0, 1))
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=7))
    batch = collate(PairedIds.from_lists(src, tgt), np.array(chosen), PAD, BOS, EOS)
    assert torch.equal(batch.src, naive([src[row] for row in chosen], [], [EOS]))
    assert torch.equal(batch.tgt_in, naive([tgt[row] for row in chosen], [BOS], []))
    assert torch.equal(batch.tgt_out, naive([tgt[row] for row in chosen], [], [EOS]))
    assert batch.n_tokens == int((batch.tgt_out != PAD).sum())
    assert batch.indices.tolist() == chosen
    assert {tensor.dtype for tensor in (batch.src, batch.tgt_in, batch.tgt_out)} == {torch.int64}
    lists = collate_lists([src[row] for row in chosen], [tgt[row] for row in chosen], PAD, BOS, EOS)
    assert torch.equal(lists.src, batch.src)
    assert torch.equal(lists.tgt_in, batch.tgt_in)
    assert torch.equal(lists.tgt_out, batch.tgt_out)


def test_shifted_right() -> None:
    batch = collate(PairedIds.from_lists([[5], [6, 7, 8]], [[9, 10], []]), np.array([0, 1]), PAD, BOS, EOS)
    assert batch.src.tolist() == [[5, EOS, PAD, PAD], [6, 7, 8, EOS]]
    assert batch.tgt_in.tolist() == [[BOS, 9, 10], [BOS, PAD, PAD]]
    assert batch.tgt_out.tolist() == [[9, 10, EOS], [EOS, PAD, PAD]]
    assert (len(batch), batch.n_tokens) == (2, 4)


def test_other_special_ids() -> None:  # an imported model may start with its pad, and pad with its last id
    data = PairedIds.from_lists([[5, 6], [7]], [[8], [9, 9]])
    batch = collate(data, np.array([1, 0]), 11, 11, 0)
    assert batch.src.tolist() == [[7, 0, 11], [5, 6, 0]]
    assert batch.tgt_in.tolist() == [[11, 9, 9], [11, 8, 11]]
    assert batch.tgt_out.tolist() == [[9, 9, 0], [8, 0, 11]]


def test_no_rows() -> None:
    for data in (PairedIds.from_lists([[5]], [[6]]), PairedIds.from_lists([], [])):
        batch = collate(data, np.array([], dtype=np.int64), PAD, BOS, EOS)
        assert batch.src.shape == batch.tgt_in.shape == batch.tgt_out.shape == (0, 1)
        assert (len(batch), batch.n_tokens) == (0, 0)
    assert collate_lists([], [], PAD, BOS, EOS).src.shape == (0, 1)


def test_ids_of_a_memory_map_are_copied() -> None:
    data = PairedIds.from_lists([[5, 6]], [[7]])
    batch = collate(data, np.array([0]), PAD, BOS, EOS)
    batch.src.zero_()
    assert data.src(0).tolist() == [5, 6]
    moved = batch.to("cpu")
    assert isinstance(moved, Batch)
    assert torch.equal(moved.tgt_out, batch.tgt_out)


@given(rows=ROWS, cuts=st.lists(st.integers(0, 12), max_size=4), most=st.integers(1, 200))
def test_merged_batches_hold_the_same_rows(rows: list[tuple[list[int], list[int]]], cuts: list[int], most: int) -> None:
    data = PairedIds.from_lists([row[0] for row in rows], [row[1] for row in rows])
    edges = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    parts = [collate(data, np.arange(start, end), PAD, BOS, EOS) for start, end in itertools.pairwise(edges)]
    whole = merged(parts, PAD, most)
    assert np.concatenate([batch.indices for batch in whole]).tolist() == list(range(len(rows)))
    assert sum(batch.n_tokens for batch in whole) == sum(batch.n_tokens for batch in parts)
    for batch in whole:
        expected = collate(data, batch.indices, PAD, BOS, EOS)
        assert torch.equal(batch.src, expected.src)
        assert torch.equal(batch.tgt_in, expected.tgt_in)
        assert torch.equal(batch.tgt_out, expected.tgt_out)
        own = [part for part in parts if part.indices[0] in batch.indices]
        tokens = max(int((batch.src != PAD).sum()), batch.n_tokens)
        assert len(own) == 1 or tokens <= 2 * most  # sides are counted together part by part


@given(rows=ROWS, cuts=st.lists(st.integers(1, 3), min_size=12, max_size=12), most=st.integers(1, 5))
def test_gathered_batches_hold_the_same_rows(
    rows: list[tuple[list[int], list[int]]], cuts: list[int], most: int
) -> None:
    data = PairedIds.from_lists(*([row[side] for row in rows] for side in (0, 1)))
    ends = np.minimum(np.cumsum([0, *cuts]), len(rows))
    parts = [collate(data, np.arange(a, b), PAD, BOS, EOS) for a, b in itertools.pairwise(ends.tolist()) if a < b]
    whole = gathered(parts, PAD, most)
    assert min(most, len(parts)) <= len(whole) <= len(parts)
    areas = [max(part.src.numel(), part.tgt_out.numel()) for part in parts]
    assert all(max(b.src.numel(), b.tgt_out.numel()) <= max(2 * sum(areas) // most, *areas, 0) for b in whole)
    assert sorted(i for batch in whole for i in batch.indices.tolist()) == list(range(len(rows)))
    for batch in whole:
        expected = collate(data, batch.indices, PAD, BOS, EOS)
        for tensor in ("src", "tgt_in", "tgt_out"):
            assert torch.equal(getattr(batch, tensor), getattr(expected, tensor))
    if len(parts) > most:
        widths = [batch.tgt_out.size(1) for batch in whole]
        assert widths == sorted(widths)


def test_one_long_source_does_not_stretch_its_neighbours() -> None:
    data = PairedIds.from_lists([[5] * 5] * 400 + [[5] * 500], [[6] * 4] * 401)
    parts = [collate(data, np.arange(a, min(a + 13, 401)), PAD, BOS, EOS) for a in range(0, 400, 13)]
    parts.append(collate(data, np.array([400]), PAD, BOS, EOS))
    whole = gathered(parts, PAD, 8)
    assert sum(batch.src.numel() for batch in whole) < 1.3 * sum(part.src.numel() for part in parts)
    assert len(whole) <= 10
