"""The learning rate as a function of the update's number (§5.3), and the schedules that people use instead.

A schedule is a frozen spec; `rate(step, ...)` answers for any step, so that resuming needs no state of its own.
Steps count from 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Discriminator


def noam(step: int, d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """Equation (3): factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5). Steps count from 1."""
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    rate: float = factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)
    return rate


@dataclass(frozen=True)
class Progress:
    """How far a run has come: what a schedule that decays to an end must know beside the step."""

    total_steps: int | None = None
    """Updates after which training ends, where that is known."""
    minutes: float = 0.0
    """Minutes of training so far."""
    total_minutes: float | None = None
    """Minutes after which training ends, where they are limited."""

    def done(self, step: int, since: int, follows: Literal["steps", "minutes"]) -> float:
        """The share of training that is over before update `step`: 0 at update `since`, 1 just after the last.

        With `minutes` it is theirs where that is more: then they end training. 0 where no end is known.
        """
        share = 0.0
        if self.total_steps is not None:
            share = (step - since) / max(1, self.total_steps - since + 1)
        if follows == "minutes" and self.total_minutes is not None:
            share = max(share, self.minutes / self.total_minutes)
        return min(1.0, max(0.0, share))


def _check(**values: float) -> None:
    wrong = [
        f"{name} must be at least 0 and finite, not {value}"
        for name, value in values.items()
        if not 0.0 <= value < math.inf
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


@dataclass(frozen=True)
class Noam:
    """The paper's: linear warm-up, then the inverse square root of the step, scaled by d_model^-0.5 (§5.3)."""

    kind: Literal["noam"] = "noam"
    warmup_steps: int = 4000
    """Updates during which the rate rises linearly."""
    factor: float = 1.0
    """Multiplies the whole; 1 in the paper."""

    def __post_init__(self) -> None:
        _check(factor=self.factor)
        if self.warmup_steps < 1:
            raise ValueError(f"warmup_steps must be at least 1, not {self.warmup_steps}")

    def rate(self, step: int, d_model: int, progress: Progress) -> float:
        """The learning rate of update `step`."""
        return noam(step, d_model, self.warmup_steps, self.factor)


@dataclass(frozen=True)
class InverseSqrt:
    """As the paper's, but named by its peak: rises to `peak` during the warm-up, then falls as step^-0.5."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup_steps: int = 4000
    """Updates during which the rate rises linearly."""
    peak: float = 5e-4
    """The highest rate, at the end of the warm-up."""

    def __post_init__(self) -> None:
        _check(warmup_steps=self.warmup_steps, peak=self.peak)

    def rate(self, step: int, d_model: int, progress: Progress) -> float:
        """The learning rate of update `step`."""
        warmup = max(1, self.warmup_steps)
        return self.peak * min(step / warmup, math.sqrt(warmup / step))


@dataclass(frozen=True)
class Cosine:
    """Rises to `peak`, then falls along half a cosine to `floor` times it at the end of training."""

    kind: Literal["cosine"] = "cosine"
    warmup_steps: int = 4000
    """Updates during which the rate rises linearly."""
    peak: float = 5e-4
    """The highest rate, at the end of the warm-up."""
    floor: float = 0.0
    """The last rate, as a share of the peak."""
    follows: Literal["steps", "minutes"] = "steps"
    """What the decay follows: `minutes` also ends it in time where `max_minutes` cuts training short, at the price
    that a run is then not repeated to the bit. It then begins with the first minute, and the rate never rises above it:
    on a slow machine the warm-up ends where the two meet."""

    def __post_init__(self) -> None:
        _check(warmup_steps=self.warmup_steps, peak=self.peak, floor=self.floor)

    def rate(self, step: int, d_model: int, progress: Progress) -> float:
        """The learning rate of update `step`."""
        left = 1.0 - progress.done(step, self.warmup_steps, self.follows)
        share = self.floor + (1.0 - self.floor) * 0.5 * (1.0 - math.cos(math.pi * left))
        return min(self.peak * step / max(1, self.warmup_steps), self.peak * share)


@dataclass(frozen=True)
class Linear:
    """Rises to `peak`, then falls in a straight line to `floor` times it at the end of training."""

    kind: Literal["linear"] = "linear"
    warmup_steps: int = 4000
    """Updates during which the rate rises linearly."""
    peak: float = 5e-4
    """The highest rate, at the end of the warm-up."""
    floor: float = 0.0
    """The last rate, as a share of the peak."""
    follows: Literal["steps", "minutes"] = "steps"
    """What the decay follows: `minutes` also ends it in time where `max_minutes` cuts training short, at the price
    that a run is then not repeated to the bit. It then begins with the first minute, and the rate never rises above it:
    on a slow machine the warm-up ends where the two meet."""

    def __post_init__(self) -> None:
        _check(warmup_steps=self.warmup_steps, peak=self.peak, floor=self.floor)

    def rate(self, step: int, d_model: int, progress: Progress) -> float:
        """The learning rate of update `step`."""
        left = 1.0 - progress.done(step, self.warmup_steps, self.follows)
        share = self.floor + (1.0 - self.floor) * left
        return min(self.peak * step / max(1, self.warmup_steps), self.peak * share)


@dataclass(frozen=True)
class Constant:
    """Rises to `peak` during the warm-up and stays there."""

    kind: Literal["constant"] = "constant"
    warmup_steps: int = 0
    """Updates during which the rate rises linearly."""
    peak: float = 5e-4
    """The rate after the warm-up."""

    def __post_init__(self) -> None:
        _check(warmup_steps=self.warmup_steps, peak=self.peak)

    def rate(self, step: int, d_model: int, progress: Progress) -> float:
        """The learning rate of update `step`."""
        return self.peak * min(1.0, step / max(1, self.warmup_steps))


Schedule = Annotated[Noam | InverseSqrt | Cosine | Linear | Constant, Discriminator("kind")]
