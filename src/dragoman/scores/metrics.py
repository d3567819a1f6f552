"""BLEU, chrF and TER of detokenised text, as sacreBLEU computes and signs them (Post 2018, arXiv:1804.08771).

The target language, not the caller, chooses the tokenizer; a signature goes with every score, so that it can be had
again with sacreBLEU's own command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from dragoman.scores.languages import needs_asian_support, tokenizer_for
from dragoman.scores.references import References, check


@dataclass(frozen=True)
class Score:
    """One number and how it came about."""

    score: float
    """Percent: higher is better for BLEU and chrF, lower for TER."""
    signature: str
    """sacreBLEU's: references, case, tokenizer, smoothing, version."""
    detail: str = ""
    """What sacreBLEU prints behind it: for BLEU the n-gram precisions, the brevity penalty and the lengths."""


@dataclass(frozen=True)
class LineScore:
    """The scores of one line, for finding the bad ones. Their mean is not the corpus score."""

    bleu: float
    """Percent; orders of n-gram that the line is too short for are left out (sacreBLEU's effective order)."""
    chrf: float
    """Percent."""


def bleu(hypotheses: Sequence[str], references: References, tgt_lang: str | None = None) -> Score:
    """BLEU (Papineni et al. 2002) of a corpus, 0 to 100.

    references: one string for each hypothesis, or sacreBLEU's streams (see `references.py`).
    Raises DataError where the numbers of lines differ.
    """
    return _score(bleu_metric(tgt_lang), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: References, tgt_lang: str | None = None) -> Score:
    """chrF2 (Popović 2015) of a corpus, 0 to 100; it counts characters, so that no language needs a tokenizer."""
    return _score(CHRF(), hypotheses, references)


def ter(hypotheses: Sequence[str], references: References, tgt_lang: str | None = None) -> Score:
    """Translation edit rate (Snover et al. 2006) in percent, lower is better, above 100 possible."""
    return _score(ter_metric(tgt_lang), hypotheses, references)


def line_scores(hypotheses: Sequence[str], references: References, tgt_lang: str | None = None) -> list[LineScore]:
    """BLEU and chrF of each line by itself; the same references as for the corpus."""
    streams = check(hypotheses, references)
    bleu_one, chrf_one = bleu_metric(tgt_lang, effective_order=True), CHRF()
    scores = []
    for hypothesis, refs in zip(hypotheses, zip(*streams, strict=True), strict=True):
        present = [ref for ref in refs if ref is not None]
        scores.append(
            LineScore(
                bleu=float(bleu_one.sentence_score(hypothesis, present).score),
                chrf=float(chrf_one.sentence_score(hypothesis, present).score),
            )
        )
    return scores


def bleu_metric(tgt_lang: str | None, effective_order: bool = False) -> BLEU:
    """sacreBLEU's BLEU with the tokenizer of the language."""
    # force: the warning about text that looks tokenised is given once by `evaluate`, not at every validation.
    return BLEU(tokenize=tokenizer_for(tgt_lang)[0], effective_order=effective_order, force=True)


def ter_metric(tgt_lang: str | None) -> TER:
    """sacreBLEU's TER. For Chinese and Japanese its Asian support, which sacreBLEU heeds only in normalised text."""
    asian = needs_asian_support(tgt_lang)
    return TER(normalized=asian, asian_support=asian)


def _score(metric: Metric, hypotheses: Sequence[str], references: References) -> Score:
    streams: Any = check(hypotheses, references)  # sacreBLEU takes None in a stream, its annotations do not say so
    result = metric.corpus_score(list(hypotheses), streams)
    return Score(float(result.score), str(metric.get_signature()), str(result._verbose))
