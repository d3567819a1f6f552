"""Token budgets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.batches.conftest import likely

from dragoman.batches.buckets import cut, over_budget, padded, padding

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=200)


@given(pairs=PAIRS, budget=st.integers(41, 600), data=st.data())
def test_each_pair_once_within_the_budget(pairs: list[tuple[int, int]], budget: int, data: st.DataObject) -> None:
    src, tgt = (np.array(side) for side in zip(*pairs, strict=True))
    indices = np.array(data.draw(st.permutations(range(len(pairs)))))[: data.draw(st.integers(1, len(pairs)))]
    batches = cut(src, tgt, indices, budget)
    assert sorted(np.concatenate(batches)) == sorted(indices)
    for rows in batches:
        assert len(rows) * (max(src[rows]) + 1) <= budget  # EOS
        assert len(rows) * (max(tgt[rows]) + 1) <= budget  # BOS, or EOS


def test_long_pairs_are_told_before(  # B34
) -> None:
    src, tgt = np.array([10, 700, 511, 512]), np.array([10, 8, 3, 3])
    assert over_budget(src, tgt, 512).tolist() == [False, True, False, True]
    assert over_budget(tgt, src, 512).tolist() == [False, True, False, True]
    assert [rows.tolist() for rows in cut(src, tgt, np.array([2]), 512)] == [[2]]
    with pytest.raises(ValueError, match="a pair of 701 tokens is larger than the budget of 512"):
        cut(src, tgt, np.arange(2), 512)


def test_nothing_gives_nothing() -> None:
    assert cut(np.array([1]), np.array([1]), np.array([], dtype=np.int64), 9) == []
    assert padding(np.array([1]), np.array([1]), []) == 0.0
    assert padded(np.array([1]), np.array([1]), np.array([], dtype=np.int64)) == (0, 0)


def test_padded_and_padding() -> None:
    src, tgt = np.array([2, 4, 9]), np.array([3, 0, 9])
    rows = np.array([0, 1])
    assert padded(src, tgt, rows) == (2 * 5, 2 * 4)
    assert padding(src, tgt, [rows]) == 1 - (3 + 5 + 4 + 1) / 18


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), budget=st.sampled_from([512, 1024, 4096]))
def test_batches_are_full_and_alike(seed: int, budget: int) -> None:
    src, tgt = likely(20_000, seed)
    batches = cut(src, tgt, np.arange(20_000), budget)
    full = [max(padded(src, tgt, rows)) / budget for rows in batches]
    assert np.mean(full) > 0.9
    assert padding(src, tgt, batches) < 0.13
    assert len(batches) < 1.15 * np.maximum(src + 1, tgt + 1).sum() / budget


def test_equal_lengths_keep_their_order() -> None:
    src = tgt = np.full(50, 4)
    order = np.random.default_rng(1).permutation(50)
    assert np.array_equal(np.concatenate(cut(src, tgt, order, 25)), order)


@given(length=st.integers(1, 30), rows=st.integers(1, 60), budget=st.integers(31, 300))
def test_all_of_one_length_is_no_special_case(length: int, rows: int, budget: int) -> None:
    lengths = np.full(rows, length)
    batches = cut(lengths, lengths, np.arange(rows), budget)
    assert all(len(batch) == budget // (length + 1) for batch in batches[:-1])


@pytest.mark.parametrize("budget", [1024, 2048])
@pytest.mark.parametrize("name", ["multi30k", "tatoeba"])
def test_padding_of_real_corpora(corpora, name: str, budget: int) -> None:
    src, tgt = corpora[name]
    assert padding(src, tgt, cut(src, tgt, np.arange(len(src)), budget)) < 0.05
