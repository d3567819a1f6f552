"""What a run tells of itself, and to whom."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Protocol

from dragoman.training.loop import Loop, Report


@dataclass(frozen=True)
class Dev:
    """One validation."""

    step: int
    loss: float
    nll: float
    perplexity: float
    bleu: float | None = None
    chrf: float | None = None

    def score(self, metric: str) -> float:
        """The metric with its sign turned so that more is better."""
        value = getattr(self, metric)
        return -value if metric == "loss" else float(value)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    why: str
    best: Dev | None
    kept: str
    """Which model the folder holds."""
    stop: signal.Signals | None = None


class Observer(Protocol):
    """Who is told how a run goes. Only the first rank tells."""

    def say(self, message: str) -> None:
        """A sentence for the user."""

    def warn(self, message: str) -> None:
        """A sentence that the user should see even where talk is not wanted."""

    def reported(self, report: Report, loop: Loop) -> None:
        """An update was made."""

    def validated(self, dev: Dev, is_best: bool) -> None:
        """The dev set was scored."""
