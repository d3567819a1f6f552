"""Greedy search, and what it shares with sampling: paths that never branch, one row each.

Letters: R paths in flight, L tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.constraints import NEVER, Constraints
from dragoman.decoding.options import Penalty
from dragoman.decoding.search import Advance, Best, Hypothesis, grown, joined, run


class Choice(Protocol):
    """How a path goes on."""

    def choose(self, logits: Tensor, lengths: Tensor) -> Tensor:
        """logits [R, V], minus infinity at what is forbidden, and the tokens so far [R] -> the next tokens [R]."""

    def select(self, rows: Tensor) -> Choice:
        """The choice for those paths."""

    def join(self, other: Any) -> Choice:
        """The choice for these paths and then those."""


class Likeliest:
    """Greedy: the token of the highest probability."""

    def choose(self, logits: Tensor, lengths: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def select(self, rows: Tensor) -> Likeliest:
        return self

    def join(self, other: Likeliest) -> Likeliest:
        return self


class PathSearch:
    """R paths, each extended by one token at a time until EOS or its cap."""

    def __init__(
        self,
        keys: Sequence[int],
        caps: Tensor,
        constraints: Constraints,
        choice: Choice,
        *,
        bos_id: int,
        alpha: float = 0.6,
        penalty: Penalty = "paper",
    ) -> None:
        """`keys` name the paths in the results; caps [R] are the most tokens each may get."""
        device = caps.device
        n = len(keys)
        self.keys = list(keys)
        self.caps = caps
        self.constraints = constraints
        self.choice = choice
        self.alpha = alpha
        self.penalty: Penalty = penalty
        self.lengths = torch.zeros(n, dtype=torch.long, device=device)  # [R] tokens so far
        self.newest = torch.full((n,), bos_id, dtype=torch.long, device=device)  # [R]
        self.path_tokens = torch.zeros(n, 16, dtype=torch.long, device=device)  # [R, L]
        self.path_log_probs = torch.zeros(n, 16, dtype=torch.float32, device=device)  # [R, L]

    @property
    def n_sentences(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> Tensor:
        return self.newest

    @property
    def n_candidates(self) -> int:
        """Greedy search looks at one token of each path, a draw at all of them."""
        return 1 if isinstance(self.choice, Likeliest) else 0

    def barred(self) -> np.ndarray | None:
        """[R, n] int32: what `Best` must leave out, ending in -1; None where all logits are needed."""
        return self.constraints.barred(self.lengths, 1) if self.n_candidates else None

    def advance_best(self, best: Best) -> Advance:
        """As `advance`, from the likeliest token of each path that is not barred."""
        return self._extend(best.tokens[:, 0].long().clamp(min=0), best.logits[:, 0] - best.totals)

    def advance(self, logits: Tensor) -> Advance:
        """logits [R, V] -> the rows that go on: those that are not done, in place."""
        logits = logits.float()
        allowed = self.constraints.apply(logits[:, None], self.lengths, self.path_tokens[:, None])[:, 0]  # [R, V]
        tokens = self.choice.choose(allowed, self.lengths)  # [R]
        chosen = allowed.gather(1, tokens[:, None])[:, 0]  # [R]
        return self._extend(tokens, chosen - logits.logsumexp(-1))

    def _extend(self, tokens: Tensor, log_probs: Tensor) -> Advance:
        """The next tokens [R] and their log-probabilities over the whole vocabulary -> the rows that go on."""
        R = tokens.size(0)
        stuck = log_probs == NEVER  # [R] the rules left nothing to choose
        room = int(self.lengths.max()) + 1
        self.path_tokens = grown(self.path_tokens, room)
        self.path_log_probs = grown(self.path_log_probs, room)
        at = (torch.arange(R, device=tokens.device), self.lengths)
        self.path_tokens[at] = tokens
        self.path_log_probs[at] = log_probs
        self.lengths = self.lengths + (~stuck).long()
        self.newest = tokens
        ended = (tokens == self.constraints.eos_id) & ~stuck
        done = ended | stuck | (self.lengths >= self.caps)
        if not bool(done.any()):
            return Advance(None, [])
        results = [(self.keys[r], [self._read_off(r)]) for r in done.nonzero()[:, 0].tolist()]
        stay = (~done).nonzero()[:, 0]
        self._select(stay)
        return Advance(stay, results)

    def _read_off(self, r: int) -> Hypothesis:
        n = int(self.lengths[r])
        token_log_probs = self.path_log_probs[r, :n].tolist()
        ids = self.path_tokens[r, :n].tolist()
        return Hypothesis.of(ids, token_log_probs, self.constraints.eos_id, self.alpha, self.penalty)

    def _select(self, rows: Tensor) -> None:
        self.keys = [self.keys[r] for r in rows.tolist()]
        self.constraints = self.constraints.select(rows)
        self.choice = self.choice.select(rows)
        self.caps = self.caps[rows]
        self.lengths = self.lengths[rows]
        self.newest = self.newest[rows]
        self.path_tokens = self.path_tokens[rows]
        self.path_log_probs = self.path_log_probs[rows]

    def join(self, other: PathSearch) -> None:
        """Take in the paths of `other`, whose rows come after ours."""
        self.keys = self.keys + other.keys
        self.constraints = self.constraints.join(other.constraints)
        self.choice = self.choice.join(other.choice)
        self.caps = torch.cat([self.caps, other.caps])
        self.lengths = torch.cat([self.lengths, other.lengths])
        self.newest = torch.cat([self.newest, other.newest])
        self.path_tokens = joined(self.path_tokens, other.path_tokens)
        self.path_log_probs = joined(self.path_log_probs, other.path_log_probs)


def greedy_search(
    model: Any,
    src: Tensor,
    src_mask: Tensor | None,
    max_length: int | Tensor,
    bos_id: int,
    eos_id: int,
    *,
    alpha: float = 0.6,
    penalty: Penalty = "paper",
    banned: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """The greedy hypothesis of each source. Arguments as in `beam_search`; alpha and penalty only give the score."""
    B = src.size(0)
    if not B:
        return []
    if banned is None:
        banned = sorted({getattr(model, "pad_id", bos_id), bos_id} - {eos_id})
    caps = torch.as_tensor(max_length, dtype=torch.long, device=src.device).expand(B).clone()
    constraints = Constraints.of(eos_id, B, banned=banned, device=src.device)
    search = PathSearch(range(B), caps, constraints, Likeliest(), bos_id=bos_id, alpha=alpha, penalty=penalty)
    results = run(model, src, src_mask, search)
    return [results[b][0] for b in range(B)]
