"""Paired bootstrap: sacreBLEU's numbers, a fixed seed, and the trap of equal outputs."""

from __future__ import annotations

import os
import random

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from dragoman.errors import DataError
from dragoman.scores import bleu, paired_bootstrap

WORDS = ["the", "a", "cat", "dog", "house", "tree", "runs", "sees", "sleeps", "big", "small", "red"]


def corpus(seed: int, lines: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(5, 9))) for _ in range(lines)]


def spoil(lines: list[str], share: float, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) if rng.random() < share else word for word in line.split()) for line in lines]


REFS = corpus(0)
GOOD, BAD = spoil(REFS, 0.1, 1), spoil(REFS, 0.5, 2)


def test_a_clear_difference_is_significant_and_a_small_one_is_not() -> None:
    clear = paired_bootstrap(GOOD, BAD, REFS, "en", samples=200)
    assert set(clear) == {"bleu", "chrf", "ter"}
    for name, metric in clear.items():
        assert metric.p_value < 0.01
        assert (metric.score < metric.baseline) == (name == "ter")
    close = paired_bootstrap(GOOD, spoil(REFS, 0.1, 3), REFS, "en", samples=200)
    assert close["bleu"].p_value > 0.05


def test_scores_are_those_of_the_corpus_and_the_signature_says_the_seed() -> None:
    got = paired_bootstrap(GOOD, BAD, REFS, samples=50, seed=7)["bleu"]
    assert got.score == bleu(GOOD, REFS).score
    assert got.baseline == bleu(BAD, REFS).score
    assert "bs:50|seed:7" in got.signature
    assert 0 < got.interval < 20
    assert 0 < got.baseline_interval < 20


def test_same_as_sacrebleus_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    other = spoil(REFS, 0.15, 3)
    monkeypatch.setenv("SACREBLEU_SEED", "12345")
    _, expected = PairedTest([("b", other), ("s", GOOD)], {"BLEU": BLEU(tokenize="13a")}, [REFS], "bs", 100)()
    got = paired_bootstrap(GOOD, other, REFS, samples=100)["bleu"]
    assert got.p_value == expected["BLEU"][1].p_value  # type: ignore[union-attr]


def test_the_seed_is_fixed_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    other = spoil(REFS, 0.15, 3)
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    first = paired_bootstrap(GOOD, other, REFS, samples=50)
    assert "SACREBLEU_SEED" not in os.environ
    monkeypatch.setenv("SACREBLEU_SEED", "99")
    assert paired_bootstrap(GOOD, other, REFS, samples=50) == first
    assert os.environ["SACREBLEU_SEED"] == "99"


def test_equal_outputs_are_no_difference() -> None:
    for metric in paired_bootstrap(GOOD, list(GOOD), REFS, samples=50).values():
        assert metric.score == metric.baseline
        assert metric.p_value == 1.0


def test_systems_must_be_parallel() -> None:
    with pytest.raises(DataError, match="60 hypotheses cannot be paired with 59"):
        paired_bootstrap(GOOD, BAD[:-1], REFS)
    with pytest.raises(DataError, match="seed of at least 1"):
        paired_bootstrap(GOOD, BAD, REFS, seed=0)
