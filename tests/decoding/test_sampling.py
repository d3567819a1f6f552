"""Sampling follows the law that it names, and its draws depend on nothing but seed and text."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from dragoman.decoding.constraints import Constraints
from dragoman.decoding.greedy import PathSearch
from dragoman.decoding.sampling import Draw, Filter, path_seed, pick, uniform
from dragoman.decoding.search import run

PAD, BOS, EOS = 0, 2, 3


def kept_by_hand(probabilities: list[float], filters: Filter) -> list[float]:
    """The filtered distribution, one filter after the other, as the papers say them."""
    logs = [math.log(p) / filters.temperature for p in probabilities]
    weights = {i: math.exp(log) for i, log in enumerate(logs)}

    def normalised(weights):
        total = sum(weights.values())
        return {i: weight / total for i, weight in weights.items()}

    weights = normalised(weights)
    ranked = sorted(weights, key=lambda i: -weights[i])
    if filters.top_k:
        weights = normalised({i: weights[i] for i in ranked[: filters.top_k]})
        ranked = ranked[: filters.top_k]
    if filters.top_p < 1:
        nucleus, mass = [], 0.0
        for i in ranked:
            nucleus.append(i)
            mass += weights[i]
            if mass >= filters.top_p:
                break
        weights = normalised({i: weights[i] for i in nucleus})
    if filters.min_p:
        top = max(weights.values())
        weights = normalised({i: weight for i, weight in weights.items() if weight >= filters.min_p * top})
    return [weights.get(i, 0.0) for i in range(len(probabilities))]


@pytest.mark.parametrize(
    "filters",
    [
        Filter(),
        Filter(temperature=0.5),
        Filter(temperature=1.7, top_k=3),
        Filter(top_p=0.8),
        Filter(top_p=1e-6),
        Filter(min_p=0.3),
        Filter(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1),
        Filter(top_k=99),
    ],
)
def test_the_distribution_is_the_one_asked_for(filters) -> None:
    draw = torch.Generator().manual_seed(2)
    for _ in range(20):
        probabilities = torch.rand(7, generator=draw, dtype=torch.float64) + 0.01
        probabilities /= probabilities.sum()
        found = filters.distribution(probabilities.log()[None])[0]
        assert found.tolist() == pytest.approx(kept_by_hand(probabilities.tolist(), filters), abs=1e-9)


@pytest.mark.parametrize("temperature", [1e-308, 5e-324])
def test_the_smallest_temperature_takes_the_likeliest_and_a_row_without_one_stays_stuck(temperature) -> None:
    logits = torch.tensor([[-3.0, 40.0, -math.inf, 39.9], [-math.inf] * 4])
    for filters in (Filter(temperature), Filter(temperature, top_k=2), Filter(temperature, top_p=0.9, min_p=0.1)):
        assert filters.distribution(logits)[0].tolist() == [0.0, 1.0, 0.0, 0.0]
        tokens = Draw(torch.tensor([5, 6]), filters).choose(logits, torch.tensor([0, 0]))
        assert tokens[0] == 1
        assert 0 <= tokens[1] < 4


def chi_square(counts: list[float], expected: list[float]) -> float:
    return sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True) if e > 0)


@pytest.mark.parametrize("filters", [Filter(), Filter(0.7, 4, 0.95, 0.05)])
def test_draws_come_as_often_as_they_should(filters) -> None:
    n, logits = 40_000, torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.5, -0.5]])
    seeds = torch.tensor([path_seed(0, [4, 5], sample) for sample in range(n)])
    lengths = torch.arange(n) % 7
    tokens = Draw(seeds, filters).choose(logits.expand(n, -1), lengths)
    expected = (n * filters.distribution(logits)[0]).tolist()
    counts = torch.bincount(tokens, minlength=6).tolist()
    assert all(count == 0 for count, e in zip(counts, expected, strict=True) if e == 0)
    assert chi_square(counts, expected) < 20.5  # 5 degrees of freedom: 0.1 %


def test_uniform_numbers_are_uniform_and_independent() -> None:
    seeds = torch.tensor([path_seed(1, [7], sample) for sample in range(2000)])
    numbers = torch.stack([uniform(seeds, torch.full_like(seeds, step)) for step in range(20)])  # [20, 2000]
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert numbers.unique().numel() == numbers.numel()
    counts = torch.histc(numbers, 50, 0, 1).tolist()
    assert chi_square(counts, [numbers.numel() / 50] * 50) < 85.4  # 49 degrees of freedom: 0.1 %
    correlation = torch.corrcoef(numbers)
    assert (correlation - torch.eye(20)).abs().max() < 0.1
    consecutive = uniform(torch.arange(4000), torch.zeros(4000, dtype=torch.long))
    assert abs(float(torch.corrcoef(torch.stack([consecutive[:-1], consecutive[1:]]))[0, 1])) < 0.06


def test_a_token_without_weight_is_never_drawn() -> None:
    seeds = torch.tensor([path_seed(2, [9], sample) for sample in range(5000)])
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64).expand(5000, -1)
    assert set(pick(weights, seeds, torch.zeros_like(seeds)).tolist()) == {1, 3}


def test_rounding_of_logits_changes_no_draw() -> None:
    """A vocabulary of 4,000, every logit moved by as much as another order of summation would move it."""
    seeds = torch.tensor([path_seed(3, [8], sample) for sample in range(500)])
    logits = torch.randn(500, 4000, generator=torch.Generator().manual_seed(4))
    moved = logits + 1e-6 * torch.randn(500, 4000, generator=torch.Generator().manual_seed(5))
    steps = torch.arange(500)
    for filters in (Filter(), Filter(temperature=1.3, top_k=3000)):
        draw = Draw(seeds, filters)
        assert torch.equal(draw.choose(logits, steps), draw.choose(moved, steps))


def test_whole_outputs_follow_the_model(make_model, reference) -> None:
    """20,000 paths of one source at once, against the probability of every output of at most two tokens."""
    model, source, n = make_model(7, 4, sharpness=1.5), [5, 4, EOS], 20_000
    caps = torch.full((n,), 2)
    seeds = torch.tensor([path_seed(5, source, sample) for sample in range(n)])
    rules = Constraints.of(EOS, n)
    search = PathSearch(range(n), caps, rules, Draw(seeds, Filter()), bos_id=BOS)
    found = run(model, torch.tensor([source]), None, search, torch.zeros(n, dtype=torch.long))
    counts = Counter(tuple(hypotheses[0].ids) for hypotheses in found.values())
    tokens = [token for token in range(7) if token != EOS]
    outputs = list(reference.every_output(reference.NextLogProbs(model, source, BOS), tokens, EOS, 2))
    # A pad that was generated is not seen again by the whole pass, so what follows one is left out here.
    outputs = [(ids, log_prob) for ids, log_prob, _ in outputs if ids[0] != PAD]
    expected = [n * math.exp(log_prob) for _, log_prob in outputs]
    assert chi_square([counts[ids] for ids, _ in outputs], expected) < 2.2 * len(outputs)
    for hypotheses in list(found.values())[:50]:
        (hypothesis,) = hypotheses
        if hypothesis.ids[0] != PAD:
            exact = dict(outputs)[tuple(hypothesis.ids)]
            assert hypothesis.log_prob == pytest.approx(exact, abs=1e-4)
