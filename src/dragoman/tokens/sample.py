"""A seeded sample of a stream: as likely any line as any other, in memory that does not grow with the stream."""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import exp, floor, log


def sample(texts: Iterable[str], size: int, seed: int) -> tuple[list[str], int]:
    """At most `size` of the texts, in the order they came, and how many there were.

    Reservoir sampling, algorithm L (Li 1994): random numbers are drawn for the lines that enter the sample only.
    """
    draw = random.Random(seed)
    kept: list[tuple[int, str]] = []
    total = 0
    next_in = 0
    spread = 1.0
    for total, text in enumerate(texts, 1):
        if len(kept) < size:
            kept.append((total, text))
            if len(kept) == size:
                spread *= _root(draw, size)
                next_in = total + _gap(draw, spread)
        elif total == next_in:
            kept[draw.randrange(size)] = (total, text)
            spread *= _root(draw, size)
            next_in = total + _gap(draw, spread)
    kept.sort()
    return [text for _, text in kept], total


def _root(draw: random.Random, size: int) -> float:
    return exp(log(1.0 - draw.random()) / size)


def _gap(draw: random.Random, spread: float) -> int:
    """How many lines further the next one stands that enters the sample."""
    if spread >= 1.0:
        return 1
    if spread <= 0.0:  # so many lines that the chance has underflowed
        return 2**62
    return floor(log(1.0 - draw.random()) / log(1.0 - spread)) + 1 if spread > 1e-15 else 2**62
