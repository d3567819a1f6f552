"""`[decoding]` of a run: how a translation is searched for. These are the defaults of `translate`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

Penalty = Literal["paper", "none", "power", "average"]
LongInput = Literal["split", "truncate", "error"]

SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Options that only sampling looks at, and the values that change nothing."""
MOST_ROWS = 8192
"""Hypotheses that one step computes at most (model/packed.py), and so of one sentence."""
MOST_EXTRA = 1_000_000
"""No translation is so much longer than its source; a cap far beyond it is no number that a tensor holds."""
MOST_ALPHA = 20
"""Beyond it a penalty is larger or smaller than any number."""


@dataclass(frozen=True)
class DecodingConfig:
    """How to search; the defaults are the paper's (§6.1). Nothing here changes with the batch that a line is in."""

    beam_size: int = 4
    """Hypotheses kept at each step."""
    alpha: float = 0.6
    """Exponent of the length penalty."""
    penalty: Penalty = "paper"
    """Length penalty: `paper` ((5 + n) / 6)^alpha, `power` n^alpha, `average` n, `none` 1."""
    greedy: bool = False
    """Take the likeliest token at each step; the beam is not used."""
    sample: bool = False
    """Draw each token at random from the model's distribution; the beam is not used."""
    temperature: float = 1.0
    """Sampling: logits are divided by it before the softmax."""
    top_k: int = 0
    """Sampling: draw among the k likeliest tokens only; 0 for all."""
    top_p: float = 1.0
    """Sampling: draw among the fewest tokens whose probabilities reach p."""
    min_p: float = 0.0
    """Sampling: leave out tokens below this share of the likeliest one's probability."""
    seed: int = 0
    """Sampling: with a line's own tokens it fixes that line's draws, wherever the line stands."""
    n_best: int = 1
    """Hypotheses returned for each line: the best of the beam, or as many independent samples."""
    max_extra: int = 50
    """A translation ends after (source tokens with EOS) + max_extra tokens, finished or not."""
    min_length: int = 0
    """Fewest target tokens, EOS included; of a line that is split, of each part."""
    no_repeat_ngram: int = 0
    """No run of this many tokens comes twice in a translation; 0 allows it."""
    prefix: str = ""
    """Text that every translation begins with."""
    ban: tuple[str, ...] = ()
    """Texts whose token sequences are never generated."""
    keep: tuple[str, ...] = ()
    """Regular expressions of what must come through unchanged, such as placeholders and tags; one hypothesis a line."""
    alignment: bool = False
    """Report which source token each target token attended to most."""
    long_input: LongInput = "split"
    """What to do with a line of more than data.max_length tokens."""
    batch_tokens: int = 8192
    """Most padded source tokens searched at once in each thread, each counted once per beam: it bounds memory, not the
    result."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be at least {least}, not {getattr(self, name)}"
            for name, least in (
                ("beam_size", 1),
                ("top_k", 0),
                ("n_best", 1),
                ("max_extra", 0),
                ("min_length", 0),
                ("no_repeat_ngram", 0),
                ("batch_tokens", 1),
            )
            if getattr(self, name) < least
        ]
        wrong += [
            f"{name} must be at most {most:,}, not {getattr(self, name):,}"
            for name, most in (("beam_size", MOST_ROWS), ("n_best", MOST_ROWS), ("max_extra", MOST_EXTRA))
            if getattr(self, name) > most
        ]
        if not -MOST_ALPHA <= self.alpha <= MOST_ALPHA:
            wrong.append(f"alpha must be from {-MOST_ALPHA} to {MOST_ALPHA}, not {self.alpha}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            wrong.append(f"temperature must be above 0, not {self.temperature}; greedy is the limit at 0")
        if not 0 < self.top_p <= 1:
            wrong.append(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            wrong.append(f"min_p must be from 0 to 1, not {self.min_p}")
        for pattern in self.keep:
            try:
                re.compile(pattern)
            except re.error as error:
                wrong.append(f"keep {pattern!r} is not a regular expression: {error}")
        wrong += [
            f"keep repairs one hypothesis of each line: {what} does not go with it"
            for what, asked in (("n_best", self.n_best > 1), ("prefix", self.prefix), ("alignment", self.alignment))
            if self.keep and asked
        ]
        if self.greedy and self.sample:
            wrong.append("greedy and sample exclude each other: choose one")
        elif self.greedy and self.n_best > 1:
            wrong.append(f"greedy search finds one hypothesis, so n_best must be 1, not {self.n_best}")
        elif not self.sample and not self.greedy and self.n_best > self.beam_size:
            wrong.append(f"n_best {self.n_best} is more than the {self.beam_size} of beam_size: widen the beam")
        if wrong:
            raise ValueError("; ".join(wrong))
