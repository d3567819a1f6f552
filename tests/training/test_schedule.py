"""Learning rates: the paper's against golden numbers, the others at their corners."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from dragoman.training.schedule import Constant, Cosine, InverseSqrt, Linear, Noam, Progress, noam


def test_noam_gives_the_golden_numbers(shared: Path) -> None:
    golden = json.loads((shared / "golden.json").read_text())["noam_lr"]
    for d_model, table in ((512, golden["d512"]), (1024, golden["d1024"])):
        for step, rate in table.items():
            assert noam(int(step), d_model, 4000) == pytest.approx(rate, rel=1e-12)
            assert Noam().rate(int(step), d_model, Progress()) == noam(int(step), d_model, 4000)
    assert noam(100_000, 512, 4000) / noam(4000, 512, 4000) == pytest.approx(golden["ratio_100k_over_peak"])


def test_noam_peaks_at_the_end_of_the_warm_up_and_steps_count_from_1() -> None:
    rates = {step: noam(step, 512, 4000) for step in range(1, 9000)}
    assert max(rates, key=rates.__getitem__) == 4000
    assert rates[4000] == pytest.approx(6.987712430e-4, rel=1e-9)
    with pytest.raises(ValueError, match="count from 1"):
        noam(0, 512, 4000)
    assert noam(7, 512, 4000, factor=2.0) == 2.0 * noam(7, 512, 4000)


RISING = [
    InverseSqrt(warmup_steps=10, peak=0.5),
    Cosine(warmup_steps=10, peak=0.5),
    Linear(warmup_steps=10, peak=0.5),
    Constant(warmup_steps=10, peak=0.5),
]


@pytest.mark.parametrize("schedule", RISING, ids=lambda schedule: schedule.kind)
def test_the_others_rise_to_their_peak_and_never_above(schedule: InverseSqrt | Cosine | Linear | Constant) -> None:
    rates = [schedule.rate(step, 64, Progress(total_steps=100)) for step in range(1, 101)]
    assert rates[4] == pytest.approx(0.25)
    assert rates[9] == pytest.approx(0.5)
    assert max(rates) <= 0.5
    assert all(a >= b > 0 for a, b in pairwise(rates[9:]))


def test_decays_end_with_training() -> None:
    end = Progress(total_steps=100)
    assert Linear(warmup_steps=10, peak=1.0).rate(100, 64, end) == pytest.approx(1 / 91)
    assert Linear(warmup_steps=10, peak=1.0, floor=0.1).rate(101, 64, end) == pytest.approx(0.1)
    assert Cosine(warmup_steps=0, peak=1.0).rate(50, 64, Progress(total_steps=99)) == pytest.approx(0.5)
    assert InverseSqrt(warmup_steps=4, peak=1.0).rate(16, 64, end) == pytest.approx(0.5)


def test_a_decay_can_follow_the_clock() -> None:
    half = Progress(total_steps=1000, minutes=5.0, total_minutes=10.0)
    assert Linear(warmup_steps=10, peak=1.0, follows="minutes").rate(20, 64, half) == pytest.approx(0.5)
    assert Linear(warmup_steps=10, peak=1.0).rate(20, 64, half) > 0.98


@pytest.mark.parametrize("kind", [Linear, Cosine])
def test_a_warm_up_that_takes_long_ends_where_the_decay_meets_it(kind: type[Linear] | type[Cosine]) -> None:
    schedule = kind(warmup_steps=600, peak=1.0, follows="minutes")
    rates = [schedule.rate(step, 64, Progress(None, step / 100, 10.0)) for step in range(1, 1001)]
    assert max(abs(a - b) for a, b in pairwise(rates)) < 0.0025  # no leap
    top = rates.index(max(rates))
    assert 300 < top < 500
    assert rates == [*sorted(rates[:top]), *sorted(rates[top:], reverse=True)]
    assert rates[-1] == pytest.approx(0.0, abs=1e-9)


def test_how_far_training_has_come_is_the_larger_of_updates_and_minutes() -> None:
    both = Progress(total_steps=99, minutes=5.0, total_minutes=20.0)
    assert [both.done(step, 1, "steps") for step in (1, 50, 100, 200)] == pytest.approx([0.0, 49 / 99, 1.0, 1.0])
    assert [both.done(step, 1, "minutes") for step in (1, 50)] == pytest.approx([0.25, 49 / 99])
    assert both.done(10, 20, "steps") == 0.0
    assert Progress(minutes=5.0).done(7, 1, "minutes") == 0.0


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match="warmup_steps must be at least 1"):
        Noam(warmup_steps=0)
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="peak must be at least 0 and finite"):
            Linear(peak=value)
        with pytest.raises(ValueError, match="factor must be at least 0 and finite"):
            Noam(factor=value)
