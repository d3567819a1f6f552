"""Is one system better than another, or was it luck? Paired bootstrap resampling (Koehn 2004), by sacreBLEU's code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, Result

from dragoman.errors import DataError
from dragoman.scores.metrics import bleu_metric, ter_metric
from dragoman.scores.references import References, check

METRICS = ("bleu", "chrf", "ter")


@dataclass(frozen=True)
class Comparison:
    """One metric of two systems on the same lines."""

    score: float
    """Of the system in question, percent."""
    baseline: float
    """Of the one that it is held against, percent."""
    p_value: float
    """Chance of so large a difference if the systems were equally good; 1.0 where the scores are the same."""
    interval: float
    """Half the width of the system's 95 % interval over the resamples, percent."""
    baseline_interval: float
    """The same of the baseline."""
    signature: str
    """sacreBLEU's, with the number of resamples (bs) and the seed."""


def paired_bootstrap(
    hypotheses: Sequence[str],
    baseline: Sequence[str],
    references: References,
    tgt_lang: str | None = None,
    samples: int = 1000,
    seed: int = 12345,
) -> dict[str, Comparison]:
    """Two systems' hypotheses -> BLEU, chrF and TER of both with p-values, under "bleu", "chrf" and "ter".

    samples: resamples of the lines; seed: at least 1. The same input and seed give the same p-values.
    Raises DataError where the numbers of lines differ.
    """
    if len(hypotheses) != len(baseline):
        raise DataError(f"{len(hypotheses)} hypotheses cannot be paired with {len(baseline)} of the other system")
    if seed < 1 or samples < 2:
        raise DataError(f"the bootstrap needs a seed of at least 1 and 2 samples, not {seed} and {samples}")
    streams: Any = check(hypotheses, references)
    check(baseline, references)
    metrics: dict[str, Metric] = {
        "bleu": bleu_metric(tgt_lang),
        "chrf": CHRF(),
        "ter": ter_metric(tgt_lang),
    }
    systems: list[tuple[str, Sequence[str]]] = [("baseline", list(baseline)), ("system", list(hypotheses))]
    with _sacrebleu_seed(seed):
        test = PairedTest(systems, metrics, streams, test_type="bs", n_samples=samples)
        signatures, results = test()
    comparisons = {}
    for key, name in zip(METRICS, signatures, strict=True):  # sacreBLEU renames them (chrF2), in the order given
        other, ours = results[name]
        if not isinstance(ours, Result) or not isinstance(other, Result):  # pragma: no cover - sacreBLEU's contract
            raise TypeError("sacreBLEU returned no result")
        comparisons[key] = Comparison(
            score=float(ours.score),
            baseline=float(other.score),
            # sacreBLEU reports 1 / (samples + 1), the smallest p-value there is, for two equal outputs.
            p_value=1.0 if ours.score == other.score else float(ours.p_value or 0.0),
            interval=float(ours.ci or 0.0),
            baseline_interval=float(other.ci or 0.0),
            signature=str(signatures[name]),
        )
    return comparisons


@contextmanager
def _sacrebleu_seed(seed: int) -> Iterator[None]:
    """sacreBLEU takes its seed from the environment only; set for the test, then as it was."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
