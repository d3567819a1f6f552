"""Orders that need no memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dragoman.batches.shuffle import key_of, keys, permuted, shuffled


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_each_stands_once(size: int, key: int) -> None:
    assert sorted(permuted(np.arange(size), size, key)) == list(range(size))
    assert sorted(shuffled(size, key)) == list(range(size))


@given(size=st.integers(1, 10**12), key=st.integers(0, 2**64 - 1), data=st.data())
def test_an_entry_can_be_asked_alone(size: int, key: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    together = permuted(places, size, key)
    assert [int(permuted(place[None], size, key)[0]) for place in places] == together.tolist()
    assert together.min() >= 0
    assert together.max() < size


def test_the_order_is_this_one_for_good() -> None:
    # A change of these numbers would change the data order of every run that is under way.
    assert permuted(np.arange(10), 10, key_of(1, 2, 3)).tolist() == [1, 0, 7, 3, 4, 2, 6, 8, 9, 5]
    assert key_of(1, 2, 3) == 15020427595393229491
    assert shuffled(10, key_of(1, 2, 3)).tolist() == [0, 7, 5, 8, 3, 6, 9, 2, 1, 4]


def test_it_is_shuffled() -> None:
    order = permuted(np.arange(100_000), 100_000, key_of(7))
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02
    # Of a random permutation about one entry stays in its place; neighbours are as far apart as strangers.
    assert (order == np.arange(100_000)).sum() < 8
    assert abs(np.abs(np.diff(order)).mean() / (100_000 / 3) - 1) < 0.02
    # Where an entry goes says nothing of where it goes under the next key.
    other = permuted(np.arange(100_000), 100_000, key_of(8))
    assert abs(np.corrcoef(order, other)[0, 1]) < 0.02


def test_every_place_is_as_likely_as_any_other() -> None:
    firsts = np.bincount([int(permuted(np.array([0]), 10, key_of(seed, 0))[0]) for seed in range(5000)], minlength=10)
    assert firsts.min() > 400
    assert firsts.max() < 600


def test_keys_depend_on_each_part_and_on_order() -> None:
    assert len({key_of(1, 2), key_of(2, 1), key_of(1, 2, 0), key_of(1), key_of(2), key_of(1, 3), key_of(-1, 2)}) == 7
    assert len(set(keys(np.arange(1000), 5))) == 1000
    assert keys(np.array([7]), 5) == keys(np.arange(10), 5)[7:8]
