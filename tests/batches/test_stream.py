"""The order of training."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.batches.conftest import likely

from dragoman.batches.buckets import padded
from dragoman.batches.stream import GlobalBatch, Position, Stream
from dragoman.errors import DataError

# Planning an epoch takes longer on a busy machine than the milliseconds that hypothesis allows by default.
QUICK = settings(deadline=None, max_examples=40)
SIZES = st.integers(1, 400)
BUDGETS = st.sampled_from([130, 500, 1024, 4000])


def stream_of(n: int, budget: int = 500, seed: int = 1, **options) -> Stream:
    return Stream(*likely(n, seed=n), budget, seed, **options)


def epoch_of(stream: Stream, epoch: int = 0) -> list[GlobalBatch]:
    batches = stream.iterate(Position(epoch))
    return list(itertools.takewhile(lambda batch: batch.position.epoch == epoch, batches))


def seen(batches: list[GlobalBatch]) -> Counter[int]:
    return Counter(int(index) for batch in batches for index in batch.indices)


@QUICK
@given(
    n=SIZES, budget=BUDGETS, seed=st.integers(0, 99), window=st.integers(20, 500), tiles=st.sampled_from([None, 1, 3])
)
def test_each_pair_once_an_epoch_within_the_budget(n, budget, seed, window, tiles) -> None:
    stream = stream_of(n, budget, seed, window=window, tiles=tiles)
    for epoch in (0, 3):
        batches = epoch_of(stream, epoch)
        assert seen(batches) == dict.fromkeys(range(n), 1)
        assert len(batches) == stream.batches_per_epoch(epoch)
        for batch in batches:
            sizes = [padded(stream.src_lengths, stream.tgt_lengths, tile) for tile in batch.tiles]
            assert batch.src_padded == sum(src for src, _ in sizes) <= budget
            assert batch.tgt_padded == sum(tgt for _, tgt in sizes) <= budget
            assert batch.n_tokens == int((stream.tgt_lengths[batch.indices] + 1).sum())
            assert batch.src_tokens == int((stream.src_lengths[batch.indices] + 1).sum())
            assert len(batch) == len(batch.indices) > 0


def test_the_expected_updates_are_the_true_ones_or_nearly() -> None:
    small = stream_of(300)
    assert small.expected_batches(3) == sum(small.batches_per_epoch(epoch) for epoch in range(3))
    large = stream_of(40_000, window=4_000)
    actual = sum(large.batches_per_epoch(epoch) for epoch in range(2))
    assert large.expected_batches(2) == pytest.approx(actual, rel=0.01)
    assert large.expected_batches(2) == 20 * len(large._plan_window(0, 0))  # no other window is planned


@QUICK
@given(n=SIZES, seed=st.integers(0, 99), window=st.integers(20, 200), data=st.data())
def test_any_position_gives_what_a_walk_to_it_gives(n, seed, window, data) -> None:
    walk = list(itertools.islice(stream_of(n, seed=seed, window=window).iterate(), 40))
    place = data.draw(st.integers(0, len(walk) - 1))
    fresh = stream_of(n, seed=seed, window=window)
    at = fresh.batch_at(walk[place].position)
    assert np.array_equal(at.indices, walk[place].indices)
    # Going on from the place that a checkpoint kept, as JSON keeps it: a list.
    again = stream_of(n, seed=seed, window=window).iterate(Position(*list(walk[place].next)))
    for batch, expected in zip(again, walk[place + 1 :], strict=False):
        assert batch.position == expected.position
        assert np.array_equal(batch.indices, expected.indices)


def test_the_order_depends_on_seed_and_epoch() -> None:
    one, same, other = (stream_of(300, seed=seed) for seed in (5, 5, 6))
    orders = [[batch.indices.tolist() for batch in epoch_of(stream, 0)] for stream in (one, same, other)]
    orders.append([batch.indices.tolist() for batch in epoch_of(one, 1)])
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]


def test_lengths_are_mixed_over_the_epoch() -> None:
    means = np.array([batch.src_tokens / len(batch) for batch in epoch_of(stream_of(5000))])
    rank = np.argsort(np.argsort(means))
    assert abs(np.corrcoef(rank, np.arange(len(rank)))[0, 1]) < 0.2


class TestSplit:
    @QUICK
    @given(n=SIZES, budget=BUDGETS, tiles=st.sampled_from([1, 2, 5]), parts=st.integers(1, 40))
    def test_the_same_pairs_in_any_number_of_parts(self, n, budget, tiles, parts) -> None:
        stream = stream_of(n, budget, tiles=tiles)
        for batch in epoch_of(stream)[:5]:
            shares = batch.split(parts)
            assert len(shares) == parts
            pieces = [piece for share in shares for piece in share]
            assert np.array_equal(np.concatenate(pieces), batch.indices)
            assert all(len(piece) for piece in pieces)
            sizes = [padded(stream.src_lengths, stream.tgt_lengths, piece) for piece in pieces]
            assert sum(src for src, _ in sizes) <= batch.src_padded
            assert sum(tgt for _, tgt in sizes) <= batch.tgt_padded

    def test_shares_are_balanced_by_tokens(self) -> None:
        stream = Stream(*likely(20_000, seed=2), 8000, 1)
        for parts in (2, 3, 4, 8):
            for batch in epoch_of(stream)[:20]:
                costs = [
                    sum(sum(padded(stream.src_lengths, stream.tgt_lengths, piece)) for piece in share)
                    for share in batch.split(parts)
                ]
                assert max(costs) < 1.25 * sum(costs) / parts

    def test_more_parts_than_rows(self) -> None:
        (batch,) = epoch_of(stream_of(3, 4000))
        shares = batch.split(8)
        assert sum(len(piece) for share in shares for piece in share) == 3
        assert shares.count([]) == 5

    def test_no_parts_is_our_mistake(self) -> None:
        with pytest.raises(ValueError, match="at least 1 part"):
            epoch_of(stream_of(3))[0].split(0)


class TestWeights:
    @QUICK
    @given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4), data=st.data())
    def test_a_corpus_is_seen_as_often_as_its_weight_says(self, sizes: list[int], data: st.DataObject) -> None:
        weights = [data.draw(st.sampled_from([0.5, 1.0, 1.3, 2.0, 3.25])) for _ in sizes]
        n = sum(sizes)
        bounds = [0, *itertools.accumulate(sizes)]
        expected = [
            int(weight) * size + round((weight - int(weight)) * size)
            for size, weight in zip(sizes, weights, strict=True)
        ]
        if not sum(expected):
            with pytest.raises(DataError):
                Stream(*likely(n), 500, 1, bounds=bounds, weights=weights)
            return
        stream = Stream(*likely(n), 500, 1, bounds=bounds, weights=weights, window=50)
        assert stream.n == sum(expected)
        for epoch in (0, 1):
            counts = seen(epoch_of(stream, epoch))
            for corpus, weight in enumerate(weights):
                times = [counts[row] for row in range(bounds[corpus], bounds[corpus + 1])]
                assert sum(times) == expected[corpus]
                assert all(int(weight) <= time <= int(weight) + 1 for time in times)

    def test_half_a_corpus_now_is_the_other_half_next(self) -> None:
        stream = Stream(*likely(101), 500, 1, bounds=[0, 1, 101], weights=[1.0, 0.5])
        first, second = seen(epoch_of(stream, 0)), seen(epoch_of(stream, 1))
        assert len(first) == len(second) == 51
        assert set(first) & set(second) == {0}
        assert set(first) | set(second) == set(range(101))

    def test_weights_too_small_for_a_pair(self) -> None:
        with pytest.raises(DataError, match="less than one pair"):
            Stream(*likely(3), 500, 1, weights=[0.1])


class TestLength:
    def test_a_pair_over_the_budget_is_left_out_and_counted(self) -> None:  # B34
        src, tgt = likely(300)
        src[17], tgt[40], src[41] = 700, 512, 511
        stream = Stream(src, tgt, 512, 1)
        assert stream.dropped == 2
        for epoch in (0, 1):
            batches = epoch_of(stream, epoch)
            assert seen(batches) == dict.fromkeys(set(range(300)) - {17, 40}, 1)
            assert max(max(batch.src_padded, batch.tgt_padded) for batch in batches) <= 512

    def test_nothing_that_fits_is_said(self) -> None:
        with pytest.raises(DataError, match=r"all 2 are longer than training\.batch_tokens = 8"):
            Stream(np.array([9, 9]), np.array([1, 1]), 8, 1)
        with pytest.raises(DataError, match="the corpus is empty"):
            Stream(np.array([], dtype=int), np.array([], dtype=int), 8, 1)

    def test_a_pair_longer_than_a_tile_is_a_tile_of_its_own(self) -> None:
        src, tgt = likely(300, longest=30)
        src[7] = 900
        stream = Stream(src, tgt, 1000, 1, tiles=8)
        (batch,) = [batch for batch in epoch_of(stream) if 7 in batch.indices]
        assert any(tile.tolist() == [7] for tile in batch.tiles)
        assert batch.src_padded <= 1000

    @QUICK
    @given(n=st.integers(1, 3000), budget=BUDGETS, tiles=st.sampled_from([None, 1, 4]))
    def test_the_largest_batch_is_the_longest_and_full(self, n, budget, tiles) -> None:
        stream = stream_of(n, budget, tiles=tiles)
        largest = stream.largest_batch()
        assert len(set(largest.indices.tolist())) == len(largest) > 0
        assert max(largest.src_padded, largest.tgt_padded) <= budget
        batches = epoch_of(stream)
        top = max(max(batch.src_padded, batch.tgt_padded) for batch in batches)
        assert max(largest.src_padded, largest.tgt_padded) >= 0.6 * top

    def test_memory_asked_by_the_largest_batch_is_the_most(self) -> None:
        stream = Stream(*likely(20_000, seed=5), 4096, 1, tiles=1)

        def scores(batch: GlobalBatch) -> int:  # numbers in the attention matrices of a layer, but for the heads
            return sum(len(tile) * int(stream.tgt_lengths[tile].max() + 1) ** 2 for tile in batch.tiles)

        assert scores(stream.largest_batch()) >= 0.95 * max(map(scores, epoch_of(stream)))


class TestPadding:
    @pytest.mark.parametrize("budget", [1024, 4096, 25_000])
    @pytest.mark.parametrize("name", ["multi30k", "tatoeba"])
    def test_real_corpora_stay_under_five_percent(self, corpora, name: str, budget: int) -> None:
        src, tgt = corpora[name]
        stream = Stream(src, tgt, budget, 1)
        for epoch in (0, 1):
            batches = epoch_of(stream, epoch)
            real = sum(batch.src_tokens + batch.n_tokens for batch in batches)
            held = sum(batch.src_padded + batch.tgt_padded for batch in batches)
            assert 1 - real / held < 0.05
            assert sum(max(batch.src_padded, batch.tgt_padded) for batch in batches) > 0.9 * budget * len(batches)

    @pytest.mark.parametrize("budget", [1024, 4096])
    def test_an_update_holds_pairs_of_many_lengths(self, corpora, budget: int) -> None:
        _, tgt = corpora["tatoeba"]
        spread = [tgt[batch.indices].std() for batch in epoch_of(Stream(*corpora["tatoeba"], budget, 1))]
        assert np.mean(spread) > 0.7 * tgt.std()


def test_progress_is_told_in_epochs() -> None:
    stream = stream_of(400, window=100)
    assert stream.windows == 4
    told = [stream.epochs_at(batch.position) for batch in itertools.islice(stream.iterate(), 200)]
    assert told == sorted(told)
    assert told[0] == 0.0
    assert stream.epochs_at(Position(2)) == 2.0


def test_a_window_bounds_the_work() -> None:
    src, tgt = likely(1000)
    stream = Stream(src, tgt, 500, 1, window=100, tiles=1)
    asked: list[int] = []
    plan = stream._plan_window
    stream._plan_window = lambda epoch, window: asked.append(window) or plan(epoch, window)  # type: ignore[method-assign, func-returns-value]
    stream.batch_at(Position(5, 7, 2))
    assert asked == [7]
