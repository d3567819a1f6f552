"""What every search has in common: sentences in flight, a model that steps, and hypotheses that come out.

A search never sees a model, only logits: it says which tokens come next (`tokens`), is given the logits of the ones
after (`advance`), and answers which rows of the model's state go on, in which order. Each sentence has its own length
cap, rules and end, so neighbours in a batch cannot change its result; sentences leave when they are done, and two
searches of one kind can be joined, so that others may enter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.length import score
from dragoman.decoding.options import Penalty
from dragoman.model.contracts import Decodable


@dataclass(frozen=True)
class Hypothesis:
    """One translation in tokens."""

    ids: list[int]
    """What was generated, with EOS at its end when `finished`; never BOS."""
    score: float
    """log_prob divided by the length penalty of len(ids)."""
    log_prob: float
    """The model's own log-probability of `ids`: the sum of `token_log_probs`."""
    finished: bool
    """False where the length cap came before EOS."""
    token_log_probs: list[float]

    @classmethod
    def of(
        cls, ids: list[int], token_log_probs: list[float], eos_id: int, alpha: float, penalty: Penalty
    ) -> Hypothesis:
        """The hypothesis of these tokens, finished where they end in EOS."""
        log_prob = float(sum(token_log_probs))
        finished = bool(ids) and ids[-1] == eos_id
        return cls(ids, score(log_prob, len(ids), alpha, penalty), log_prob, finished, token_log_probs)


@dataclass(frozen=True)
class Advance:
    """What one step of a search has decided."""

    rows: Tensor | None
    """[R'] the row of the old state that each row of the new one continues; None where every row stays in place."""
    done: list[tuple[int, list[Hypothesis]]]
    """The sentences that left, by key, each with its hypotheses, best first."""


class Best(Protocol):
    """The likeliest tokens of R rows, from a model that need not write out all logits."""

    @property
    def logits(self) -> Tensor:
        """[R, k], descending."""

    @property
    def tokens(self) -> Tensor:
        """[R, k] which those are."""

    @property
    def totals(self) -> Tensor:
        """[R] the logarithm of the sum of exponentials over the whole vocabulary."""


class Search(Protocol):
    """R rows of hypotheses that belong to the sentences in flight, in the order of the model's state."""

    @property
    def n_sentences(self) -> int:
        """Sentences in flight; the search is over at 0."""

    @property
    def tokens(self) -> Tensor:
        """[R] the newest token of each row: what the model reads next."""

    def advance(self, logits: Tensor) -> Advance:
        """logits [R, V] of the next token: extend every sentence by one, let go of those that are done."""

    @property
    def n_candidates(self) -> int:
        """How many tokens of each row `advance_best` looks at; 0 where it must see all."""

    def barred(self) -> np.ndarray | None:
        """[R, n] int32: tokens that `advance_best` must not be shown, each row ending in -1; None: use `advance`."""

    def advance_best(self, best: Best) -> Advance:
        """As `advance`, from the `n_candidates` likeliest tokens of each row."""

    def join(self, other: Any) -> None:
        """Take in the sentences of `other`, whose rows come after ours; both must have the same rows per sentence."""


def run(model: Decodable, src: Tensor, src_mask: Tensor | None, search: Search, rows: Tensor | None = None) -> Results:
    """Search until every sentence is done; gives the hypotheses by key.

    src [B, S] with src_mask [B, S]; `rows` [R] says which source each row of the search belongs to, where that is not
    simply 0 ... B - 1.
    """
    results: Results = {}
    with torch.no_grad(), evaluating(model):
        state = model.start(src, src_mask)
        if rows is not None:
            state = state.select(rows)
        while True:
            logits, state = model.step(search.tokens, state)
            advance = search.advance(logits)
            results.update(advance.done)
            if not search.n_sentences:
                return results
            if advance.rows is not None:
                state = state.select(advance.rows)


Results = dict[int, list[Hypothesis]]


def has_whole_pass(model: Any) -> bool:
    """Whether the model, or every member of an ensemble, computes all positions of given targets at once; what is made
    for decoding alone only steps."""
    return callable(model) and all(callable(member) for member in getattr(model, "models", ()))


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model without dropout, and afterwards as it was."""
    training = getattr(model, "training", False)
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


def grown(buffer: Tensor, length: int, fill: int = 0) -> Tensor:
    """`buffer` [B, L, ...] with room for `length` positions: it doubles, so that growing costs a constant a token."""
    if length <= buffer.size(1):
        return buffer
    room = torch.full(
        (buffer.size(0), max(length, 2 * buffer.size(1)) - buffer.size(1), *buffer.shape[2:]),
        fill,
        dtype=buffer.dtype,
        device=buffer.device,
    )
    return torch.cat([buffer, room], dim=1)


def joined(a: Tensor, b: Tensor) -> Tensor:
    """Two buffers [B, L, ...] one above the other, the shorter one with room added."""
    length = max(a.size(1), b.size(1))
    return torch.cat([grown(a, length)[:, :length], grown(b, length)[:, :length]])
