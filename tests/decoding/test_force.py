"""Teacher forcing gives the numbers of stepping, whatever the batch."""

from __future__ import annotations

import random

import pytest

from dragoman.decoding.force import cut, token_log_probs

PAD, BOS, EOS = 0, 2, 3


def test_log_probs_are_those_of_the_whole_pass(make_model, reference) -> None:
    model, draw = make_model(13, 3), random.Random(1)
    sources = [[*(draw.randint(4, 12) for _ in range(draw.randint(0, 6))), EOS] for _ in range(9)]
    targets = [[draw.randint(4, 12) for _ in range(draw.randint(0, 7))] + [EOS] * draw.randint(0, 1) for _ in sources]
    targets[2] = []  # nothing to score
    found = token_log_probs(model, sources, targets, BOS, PAD, batch_tokens=17)
    for source, target, log_probs in zip(sources, targets, found, strict=True):
        next_log_probs = reference.NextLogProbs(model, source, BOS)
        expected = [next_log_probs(tuple(target[:t]))[token] for t, token in enumerate(target)]
        assert log_probs == pytest.approx(expected, abs=1e-4)


def test_a_decoder_that_starts_with_pad(make_model, pad_batch) -> None:
    from dragoman.decoding.greedy import greedy_search

    model = make_model(13, 3)
    sources = [[5, 6, EOS], [7, EOS]]
    found = greedy_search(model, *pad_batch(sources), 9, PAD, EOS)
    forced = token_log_probs(model, sources, [h.ids for h in found], PAD, PAD)
    for hypothesis, log_probs in zip(found, forced, strict=True):
        assert log_probs == pytest.approx(hypothesis.token_log_probs, abs=1e-4)


def test_no_batch_has_more_rows_than_a_step_takes(make_model, monkeypatch) -> None:
    monkeypatch.setattr("dragoman.decoding.force.MOST_ROWS", 4)
    model = make_model(13, 3)
    rows: list[int] = []

    class Stepping:
        """What has no whole pass, as a packed model has none."""

        step = staticmethod(model.step)

        @staticmethod
        def start(src, src_mask):
            rows.append(len(src))
            return model.start(src, src_mask)

    found = token_log_probs(Stepping(), [[5, EOS]] * 10, [[7, EOS]] * 10, BOS, PAD)
    assert rows == [4, 4, 2]
    assert found == [pytest.approx(found[0], abs=1e-5)] * 10


def test_batches_hold_every_row_once_within_the_budget() -> None:
    draw = random.Random(2)
    lengths = [draw.randint(1, 40) for _ in range(200)] + [500]
    batches = list(cut(lengths, 128))
    assert sorted(i for batch in batches for i in batch) == list(range(201))
    assert batches[0] == [200]
    assert all(len(batch) * max(lengths[i] for i in batch) <= 128 or len(batch) == 1 for batch in batches)
    assert list(cut([], 10)) == []
