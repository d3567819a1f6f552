"""A translation in text: what `translate` gives, in Python and as JSON alike."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a line."""

    text: str
    score: float
    """log_prob divided by the length penalty."""
    log_prob: float
    """Natural logarithm of the model's probability of the tokens."""
    length: int
    """Tokens, EOS included."""
    finished: bool
    """False where the length cap came before EOS."""
    tokens: list[str]
    """Pieces, with EOS at the end when finished."""
    token_log_probs: list[float]
    alignment: list[tuple[int, int]] | None = None
    """(source token, target token) pairs where asked for, both counted from 0."""

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON has them; `alignment` only where it was asked for."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.alignment is None:
            del fields["alignment"]
        return fields


@dataclass(frozen=True)
class Translation:
    """What became of one line. `text` to `token_log_probs` are those of the first hypothesis."""

    line: int
    """Counted from 1."""
    source: str
    """As it was given."""
    hypotheses: list[Hypothesis]
    """Best first, or samples in the order of their draws; none for a blank line."""
    truncated: bool = False
    """Whether the end of the source was left out (`long_input = "truncate"`)."""
    pieces: int = 1
    """How many parts the line was translated in."""
    source_tokens: list[str] | None = None
    """What an alignment counts; None where none was asked for."""

    @property
    def text(self) -> str:
        return self.hypotheses[0].text if self.hypotheses else ""

    @property
    def score(self) -> float | None:
        return self.hypotheses[0].score if self.hypotheses else None

    @property
    def log_prob(self) -> float | None:
        return self.hypotheses[0].log_prob if self.hypotheses else None

    @property
    def length(self) -> int:
        return self.hypotheses[0].length if self.hypotheses else 0

    @property
    def finished(self) -> bool:
        return self.hypotheses[0].finished if self.hypotheses else True

    @property
    def tokens(self) -> list[str]:
        return self.hypotheses[0].tokens if self.hypotheses else []

    @property
    def token_log_probs(self) -> list[float]:
        return self.hypotheses[0].token_log_probs if self.hypotheses else []

    @property
    def alignment(self) -> list[tuple[int, int]] | None:
        return self.hypotheses[0].alignment if self.hypotheses else None

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of `translate --json`."""
        found = {
            "line": self.line,
            "source": self.source,
            "text": self.text,
            "score": self.score,
            "log_prob": self.log_prob,
            "length": self.length,
            "finished": self.finished,
            "tokens": self.tokens,
            "token_log_probs": self.token_log_probs,
            "hypotheses": [hypothesis.as_dict() for hypothesis in self.hypotheses],
            "truncated": self.truncated,
            "pieces": self.pieces,
        }
        if self.source_tokens is not None:
            found["source_tokens"] = self.source_tokens
        return found
