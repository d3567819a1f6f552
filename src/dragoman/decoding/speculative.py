"""Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192): a small model proposes, the large one checks.

The draft proposes a few tokens, one after the other; the model reads them all in one pass and keeps the longest part
that it would have chosen itself, then adds a token of its own. Greedy output is that of the model alone, token for
token. Sampled output has the model's law: a proposal x drawn with probability q(x) is kept with probability
min(1, p(x) / q(x)), and the first that is not is drawn anew in proportion to max(0, p - q).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dragoman.decoding.constraints import NEVER, Constraints
from dragoman.decoding.sampling import Filter, pick, uniform
from dragoman.decoding.search import has_whole_pass

LOOKAHEAD = 4
"""Tokens that the draft proposes at a time."""


class Reader:
    """The logits of one model after any tokens, stepping only through those that it has not just read.

    States are values: going back to an earlier one costs nothing.
    """

    def __init__(self, model: Any, src: Tensor, src_mask: Tensor) -> None:
        """src and src_mask [1, S]."""
        self.model = model
        self.device = src.device
        self.read: list[int] = []
        self.states = [model.start(src, src_mask)]
        self.logits: list[Tensor] = []

    def after(self, tokens: list[int], n_last: int = 1) -> Tensor:
        """tokens, BOS first -> logits [n_last, V]: after the last `n_last` prefixes of them, the whole one included."""
        same = 0
        while same < min(len(tokens), len(self.read)) and tokens[same] == self.read[same]:
            same += 1
        del self.read[same:], self.states[same + 1 :], self.logits[same:]
        for token in tokens[same:]:
            logits, state = self.model.step(torch.tensor([token], device=self.device), self.states[-1])
            self.read.append(token)
            self.states.append(state)
            self.logits.append(logits.float())
        return torch.cat(self.logits[-n_last:])


class WholePass:
    """The same answers by one teacher-forced pass: what checking several proposals at once is for."""

    def __init__(self, model: Any, src: Tensor, src_mask: Tensor) -> None:
        self.model = model
        self.src = src
        self.src_mask = src_mask

    def after(self, tokens: list[int], n_last: int = 1) -> Tensor:
        """As `Reader.after`."""
        logits: Tensor = self.model(self.src, torch.tensor([tokens], device=self.src.device), self.src_mask)
        return logits[0, -n_last:].float()


class Speculation:
    """One sentence, decoded by two models."""

    def __init__(
        self, model: Any, draft: Any, src: Tensor, src_mask: Tensor, constraints: Constraints, *, bos_id: int
    ) -> None:
        """src and src_mask [1, S]; constraints of that one sentence."""
        # A whole pass takes a pad for nothing to see: where decoding starts with one, the model must step.
        must_step = bos_id == getattr(model, "pad_id", None) or not has_whole_pass(model)
        self.model = Reader(model, src, src_mask) if must_step else WholePass(model, src, src_mask)
        self.draft = Reader(draft, src, src_mask)
        self.constraints = constraints
        self.bos_id = bos_id
        self.device = src.device

    def greedy(self, cap: int) -> tuple[list[int], list[float]]:
        """At most `cap` tokens, and the model's log-probability of each."""
        ids: list[int] = []
        log_probs: list[float] = []
        while not self._is_over(ids, cap):
            proposal: list[int] = []
            while len(proposal) < LOOKAHEAD and not self._is_over(ids + proposal, cap):
                allowed = self._allowed(self.draft.after([self.bos_id, *ids, *proposal])[0], ids + proposal)
                proposal.append(int(allowed.argmax()))
            logits = self.model.after([self.bos_id, *ids, *proposal], len(proposal) + 1)  # [n + 1, V]
            for i in range(len(proposal) + 1):
                if self._is_over(ids, cap):
                    break
                allowed = self._allowed(logits[i], ids)
                token = int(allowed.argmax())
                if allowed[token] == NEVER:
                    return ids, log_probs
                ids.append(token)
                log_probs.append(float(logits[i].log_softmax(-1)[token]))
                if i < len(proposal) and token != proposal[i]:
                    break
        return ids, log_probs

    def sample(self, cap: int, filters: Filter, seed: int) -> tuple[list[int], list[float]]:
        """The same by chance: every run of draws is a function of `seed`."""
        ids: list[int] = []
        log_probs: list[float] = []
        draws = _Draws(seed, self.device)
        while not self._is_over(ids, cap):
            proposal: list[int] = []
            proposed: list[Tensor] = []  # the draft's distributions
            while len(proposal) < LOOKAHEAD and not self._is_over(ids + proposal, cap):
                allowed = self._allowed(self.draft.after([self.bos_id, *ids, *proposal])[0], ids + proposal)
                if allowed.amax() == NEVER:
                    break
                proposed.append(filters.distribution(allowed[None])[0])
                proposal.append(draws.token(proposed[-1]))
            logits = self.model.after([self.bos_id, *ids, *proposal], len(proposal) + 1)  # [n + 1, V]
            for i in range(len(proposal) + 1):
                if self._is_over(ids, cap):
                    break
                allowed = self._allowed(logits[i], ids)
                if allowed.amax() == NEVER:
                    return ids, log_probs
                p = filters.distribution(allowed[None])[0]  # [V]
                kept = False
                if i < len(proposal):
                    token, q = proposal[i], proposed[i]
                    kept = draws.number() * float(q[token]) < float(p[token])
                    if not kept:
                        rest = (p - q).clamp(min=0.0)
                        token = draws.token(rest if float(rest.sum()) > 0.0 else p)
                else:
                    token = draws.token(p)
                ids.append(token)
                log_probs.append(float(logits[i].log_softmax(-1)[token]))
                if not kept:
                    break
        return ids, log_probs

    def _is_over(self, ids: list[int], cap: int) -> bool:
        return len(ids) >= cap or (bool(ids) and ids[-1] == self.constraints.eos_id)

    def _allowed(self, logits: Tensor, ids: list[int]) -> Tensor:
        """logits [V] after `ids` -> the same with minus infinity at what may not come next."""
        history = torch.tensor(ids, dtype=torch.long, device=self.device)[None, None]  # [1, 1, L]
        lengths = torch.tensor([len(ids)], device=self.device)
        return self.constraints.apply(logits[None, None], lengths, history)[0, 0]


class _Draws:
    """One random sequence, drawn from one number after the other."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = torch.tensor([seed], dtype=torch.long, device=device)
        self.count = torch.zeros(1, dtype=torch.long, device=device)

    def number(self) -> float:
        u = float(uniform(self.seed, self.count))
        self.count += 1
        return u

    def token(self, weights: Tensor) -> int:
        """weights [V], not necessarily normalised -> a token."""
        token = int(pick(weights[None], self.seed, self.count))
        self.count += 1
        return token
