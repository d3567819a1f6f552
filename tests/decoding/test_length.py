"""Length penalties: the published numbers, and a bound that is one."""

from __future__ import annotations

import json
import math

import pytest
import torch

from dragoman.decoding.length import bound, length_penalty, score


def test_the_published_numbers(shared) -> None:
    golden = json.loads((shared / "golden.json").read_text(encoding="utf-8"))["length_penalty"]
    for name, values in golden.items():
        if not name.startswith("alpha"):
            continue
        alpha = float(name.removeprefix("alpha"))
        for n, expected in values.items():
            assert length_penalty(int(n), alpha) == pytest.approx(expected, rel=1e-12)
        lengths = torch.tensor([int(n) for n in values])
        assert length_penalty(lengths, alpha).tolist() == pytest.approx(list(values.values()), rel=1e-12)


def test_each_penalty_by_its_formula() -> None:
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(10, 0.6) == pytest.approx(1.7328621079)
    assert length_penalty(50, 0.6) == pytest.approx(3.7785647041)
    assert length_penalty(9, 0.5, "power") == 3.0
    assert length_penalty(9, 0.5, "average") == 9.0
    assert length_penalty(9, 0.5, "none") == 1.0
    assert score(-6.0, 9, 0.5, "power") == -2.0
    with pytest.raises(ValueError, match="unknown penalty 'wu': one of paper, none, power, average"):
        length_penalty(9, 0.5, "wu")  # type: ignore[arg-type]


@pytest.mark.parametrize("penalty", ["paper", "none", "power", "average"])
@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.6, 2.0])
def test_no_continuation_is_better_than_the_bound(penalty, alpha) -> None:
    draw = torch.Generator().manual_seed(1)
    for cap in (3, 7, 20):
        for length in range(1, cap):
            log_prob = -5 * torch.rand(1, generator=draw, dtype=torch.float64)
            limit = float(bound(log_prob, torch.tensor([length]), torch.tensor([cap]), alpha, penalty))
            # The most that any end can get: every further token is certain.
            best = max(score(float(log_prob), n, alpha, penalty) for n in range(length + 1, cap + 1))
            assert limit == pytest.approx(best, rel=1e-12)
            assert not math.isnan(limit)
