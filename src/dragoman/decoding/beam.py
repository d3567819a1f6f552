"""Beam search, as the paper's authors run it (§6.1: "beam size of 4 and length penalty alpha = 0.6").

At each step every running hypothesis of a sentence is extended by every token. Of the 2N best extensions (T2T) those
that end in EOS compete for the N places of the finished, and the N best of the others run on. A sentence is done when N
hypotheses are finished and no running one can beat the worst of them, not even with the length penalty of the cap; or
at the cap, where unfinished hypotheses compete by the same score. N is the beam size; how many are asked for changes
nothing. A beam of one keeps the single best extension and nothing else: greedy search.

Where n of the N are asked for, what can no longer come among the n best is not computed: a running hypothesis whose
best possible score is not above that of the n-th finished is dropped, and the sentence is done when none is left. This
changes no answer. All running ones are equally long, so whatever a dropped one's children might push out of the beam is
less likely than they are, and could not come among the n best either.

Letters: B sentences in flight, N hypotheses of each, R of them all still running, C = 2N candidates, V vocabulary.
Hypotheses are kept as a trellis: for each step the candidates with their tokens and whose children they are. Nothing
that has been written is moved again until a sentence is done and its hypotheses are read off, from the last token to
the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.constraints import NEVER, Constraints
from dragoman.decoding.length import bound, score
from dragoman.decoding.options import Penalty
from dragoman.decoding.search import Advance, Best, Hypothesis, grown, joined, run

# Columns of a finished hypothesis; float64 holds each of them exactly enough.
SCORE, LOG_PROB, LENGTH, CANDIDATE, FINISHED = range(5)


class BeamSearch:
    """The beams of B sentences. The first step has one row a sentence, every other one up to N."""

    def __init__(
        self,
        keys: Sequence[int],
        caps: Tensor,
        constraints: Constraints,
        *,
        beam_size: int,
        bos_id: int,
        alpha: float = 0.6,
        penalty: Penalty = "paper",
        n_best: int = 1,
    ) -> None:
        """`keys` name the sentences in the results; caps [B] are the most tokens each may get."""
        device = caps.device
        n = len(keys)
        self.keys = list(keys)
        self.caps = caps
        self.constraints = constraints
        self.beam_size = beam_size
        self.alpha = alpha
        self.penalty: Penalty = penalty
        self.n_best = n_best
        self.lengths = torch.zeros(n, dtype=torch.long, device=device)  # [B] tokens so far
        self.newest = torch.full((n, 1), bos_id, dtype=torch.long, device=device)  # [B, N]
        self.log_probs = torch.zeros(n, 1, dtype=torch.float64, device=device)  # [B, N], minus infinity = no hypothesis
        self.live = torch.ones(n, 1, dtype=torch.bool, device=device)  # [B, N] which places have a row of the model
        self.slots = torch.zeros(n, 1, dtype=torch.long, device=device)  # [B, N] the candidate that each one was
        self.trellis_tokens = torch.zeros(n, 16, self.n_candidates, dtype=torch.long, device=device)  # [B, L, C]
        self.trellis_parents = torch.zeros_like(self.trellis_tokens)  # [B, L, C] candidates of the step before
        self.trellis_log_probs = torch.zeros(n, 16, self.n_candidates, device=device)  # [B, L, C] of the token alone
        self.pool = torch.full((n, beam_size, 5), NEVER, dtype=torch.float64, device=device)  # [B, N, 5], best first
        self.history: Tensor | None = None  # [B, N, L], kept for rules that look back
        if constraints.needs_history:
            self.history = torch.zeros(n, 1, 0, dtype=torch.long, device=device)

    @property
    def n_sentences(self) -> int:
        return len(self.keys)

    @property
    def n_candidates(self) -> int:
        """C: enough for N to run on, even if N end here."""
        return 2 * self.beam_size if self.beam_size > 1 else 1

    @property
    def tokens(self) -> Tensor:
        """[R]: what the model reads next, of the hypotheses that still run, sentence by sentence."""
        return self.newest[self.live]

    def advance(self, logits: Tensor) -> Advance:
        """logits [R, V] -> the rows that go on, up to N for each sentence that is not done."""
        return self._extend(*self._candidates(self._in_places(logits.float())))

    def barred(self) -> np.ndarray | None:
        """[R, n] int32: what `Best` must leave out, ending in -1; None where the rules need all logits."""
        barred = self.constraints.barred(self.lengths, self.newest.size(1))
        return barred if barred is None else barred[self.live.flatten().numpy()]

    def advance_best(self, best: Best) -> Advance:
        """As `advance`, from the `n_candidates` likeliest tokens of each row that are not barred."""
        tokens = best.tokens.long().clamp(min=0)
        return self._extend(*self._ranked(self._in_places(tokens), self._in_places(best.logits - best.totals[:, None])))

    def _in_places(self, rows: Tensor) -> Tensor:
        """[R, n] -> [B, N, n], with zeros where no hypothesis runs.

        A place that was never filled has a sum of minus infinity, whatever is added. One that was dropped keeps its own
        sum, and the children that zeros give it are at most as likely: they cannot win, nor push out what could (see
        the top of this file).
        """
        if rows.size(0) == self.live.numel():
            return rows.view(*self.live.shape, -1)
        places = rows.new_zeros(*self.live.shape, rows.size(1))
        places[self.live] = rows
        return places

    def _extend(self, parents: Tensor, tokens: Tensor, token_log_probs: Tensor, log_probs: Tensor) -> Advance:
        """Candidates [B, C] as `_ranked` gives them -> the rows that go on."""
        B = self.newest.size(0)
        ended = tokens == self.constraints.eos_id  # [B, C]

        # The trellis gets its next step, which for each sentence is at its own length.
        at = (torch.arange(B, device=tokens.device), self.lengths)
        room = int(self.lengths.max()) + 1
        self.trellis_tokens = grown(self.trellis_tokens, room)
        self.trellis_parents = grown(self.trellis_parents, room)
        self.trellis_log_probs = grown(self.trellis_log_probs, room)
        C = tokens.size(1)
        self.trellis_tokens[at[0], at[1], :C] = tokens
        self.trellis_parents[at[0], at[1], :C] = self.slots.gather(1, parents)
        self.trellis_log_probs[at[0], at[1], :C] = token_log_probs
        before = (self.log_probs, self.lengths, self.slots)
        self.lengths = self.lengths + 1

        # The best N that did not end run on; a stable sort keeps them in the order of their probability.
        chosen = ended.to(torch.uint8).argsort(dim=1, stable=True)[:, : self.beam_size]  # [B, N]
        running = log_probs.masked_fill(ended, NEVER).gather(1, chosen)  # [B, N]
        if (missing := self.beam_size - chosen.size(1)) > 0:  # fewer candidates than places: a tiny vocabulary
            chosen = torch.nn.functional.pad(chosen, (0, missing))
            running = torch.nn.functional.pad(running, (0, missing), value=NEVER)
        self.log_probs = running
        self.slots = chosen
        self.newest = tokens.gather(1, chosen)
        rows = parents.gather(1, chosen)  # [B, N] of the old places
        row_at = self.live.flatten().cumsum(0).view_as(self.live) - 1  # [B, old places]
        if self.history is not None:
            past = self.history.gather(1, rows[..., None].expand(-1, -1, self.history.size(2)))  # [B, N, L]
            past = torch.nn.functional.pad(past, (0, room - past.size(2)))
            self.history = past.scatter(2, at[1][:, None, None].expand(-1, past.size(1), 1), self.newest[..., None])

        at_cap = self.lengths >= self.caps  # [B]
        eligible = (ended | at_cap[:, None]) & (log_probs > NEVER)  # [B, C]
        if bool(eligible.any()):
            self._finish(log_probs.masked_fill(~eligible, NEVER), self.lengths, ended)
        self.live = self._may_win()
        done = at_cap | ~self.live.any(dim=1)
        alive = torch.cat([running, self.pool[..., SCORE]], dim=1).amax(dim=1) > NEVER  # [B]
        if not bool(alive.all()):
            # The rules left no candidate at all: what there was before this step is the answer, unfinished.
            self._give_up(~alive, *before)
            done = done | ~alive
        return self._leave(done, row_at.gather(1, rows), int(row_at[-1, -1]) + 1)

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """logits [B, N, V] -> the C best extensions of each sentence, best first.

        Their parents, tokens, the tokens' own log-probabilities and the sums; all [B, C]. No softmax over the
        vocabulary and no sort of it: the C best of a sentence are among the C best of each of its hypotheses, and
        log-probabilities lie in the order of logits.
        """
        V = logits.size(2)
        total = logits.logsumexp(-1, keepdim=True)  # [B, N, 1]
        allowed = self.constraints.apply(logits, self.lengths, self.history)
        k = min(self.n_candidates, V)
        best, tokens = allowed.topk(k, dim=-1) if k > 1 else allowed.max(dim=-1, keepdim=True)  # [B, N, k]
        return self._ranked(tokens, best - total)

    def _ranked(self, tokens: Tensor, token_log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The k best tokens of each hypothesis and their log-probabilities, both [B, N, k] -> as `_candidates`."""
        k = tokens.size(2)
        sums = (self.log_probs[..., None] + token_log_probs).flatten(1)  # [B, N * k]
        c = min(self.n_candidates, sums.size(1))
        log_probs, index = sums.topk(c, dim=-1) if c > 1 else sums.max(dim=-1, keepdim=True)  # [B, C]
        return (
            index // k,
            tokens.flatten(1).gather(1, index),
            token_log_probs.flatten(1).gather(1, index),
            log_probs,
        )

    def _finish(self, log_probs: Tensor, lengths: Tensor, ended: Tensor) -> None:
        """Candidates [B, C] (minus infinity = not one) compete with the finished for the N places."""
        n = lengths[:, None].expand_as(log_probs)
        rows = torch.stack(
            [
                score(log_probs, n, self.alpha, self.penalty),
                log_probs,
                n.double(),
                torch.arange(n.size(1), device=n.device).expand_as(n).double(),
                ended.double(),
            ],
            dim=2,
        )  # [B, C, 5]
        rows[..., SCORE].masked_fill_(log_probs == NEVER, NEVER)
        everyone = torch.cat([self.pool, rows], dim=1)  # [B, N + C, 5]
        best = everyone[..., SCORE].argsort(dim=1, descending=True, stable=True)[:, : self.beam_size]
        self.pool = everyone.gather(1, best[..., None].expand(-1, -1, 5))

    def _may_win(self) -> Tensor:
        """[B, N]: the running hypotheses that can still come among the n best."""
        reach = bound(self.log_probs, self.lengths[:, None], self.caps[:, None], self.alpha, self.penalty)  # [B, N]
        return (self.log_probs > NEVER) & (reach > self.pool[:, self.n_best - 1, SCORE, None])

    def _give_up(self, stuck: Tensor, log_probs: Tensor, lengths: Tensor, slots: Tensor) -> None:
        """Put the hypotheses from before this step into the pool of the sentences where `stuck` [B]."""
        n = lengths[:, None].expand_as(log_probs)
        unfinished = torch.zeros_like(log_probs)
        rows = torch.stack(
            [score(log_probs, n, self.alpha, self.penalty), log_probs, n.double(), slots.double(), unfinished], dim=2
        )  # [B, N, 5]
        rows[..., SCORE].masked_fill_(log_probs == NEVER, NEVER)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, self.beam_size - rows.size(1)), value=NEVER)
        self.pool = torch.where(stuck[:, None, None], rows, self.pool)

    def _leave(self, done: Tensor, rows: Tensor, n_rows: int) -> Advance:
        """Read off the sentences that are done and close the ranks of the others; rows [B, N] of the `n_rows` old."""
        results = [(self.keys[b], self._read_off(b)) for b in done.nonzero()[:, 0].tolist()]
        if results:
            stay = (~done).nonzero()[:, 0]
            self._select(stay)
            rows = rows[stay]
        flat = rows[self.live]  # [R]
        unmoved = flat.numel() == n_rows and torch.equal(flat, torch.arange(n_rows, device=flat.device))
        return Advance(None if unmoved else flat, results)

    def _select(self, sentences: Tensor) -> None:
        self.keys = [self.keys[b] for b in sentences.tolist()]
        self.constraints = self.constraints.select(sentences)
        self.caps = self.caps[sentences]
        self.lengths = self.lengths[sentences]
        self.newest = self.newest[sentences]
        self.log_probs = self.log_probs[sentences]
        self.live = self.live[sentences]
        self.slots = self.slots[sentences]
        self.trellis_tokens = self.trellis_tokens[sentences]
        self.trellis_parents = self.trellis_parents[sentences]
        self.trellis_log_probs = self.trellis_log_probs[sentences]
        self.pool = self.pool[sentences]
        if self.history is not None:
            self.history = self.history[sentences]

    def join(self, other: BeamSearch) -> None:
        """Take in the sentences of `other`. Both must be past their first step, and of one kind."""
        if self.newest.size(1) != other.newest.size(1):
            raise ValueError("beams can be joined when both are past their first step")
        self.keys = self.keys + other.keys
        self.constraints = self.constraints.join(other.constraints)
        self.caps = torch.cat([self.caps, other.caps])
        self.lengths = torch.cat([self.lengths, other.lengths])
        self.newest = torch.cat([self.newest, other.newest])
        self.log_probs = torch.cat([self.log_probs, other.log_probs])
        self.live = torch.cat([self.live, other.live])
        self.slots = torch.cat([self.slots, other.slots])
        self.trellis_tokens = joined(self.trellis_tokens, other.trellis_tokens)
        self.trellis_parents = joined(self.trellis_parents, other.trellis_parents)
        self.trellis_log_probs = joined(self.trellis_log_probs, other.trellis_log_probs)
        self.pool = torch.cat([self.pool, other.pool])
        if self.history is not None and other.history is not None:
            longest = max(self.history.size(2), other.history.size(2))
            self.history = torch.cat(
                [torch.nn.functional.pad(h, (0, longest - h.size(2))) for h in (self.history, other.history)]
            )

    def _read_off(self, b: int) -> list[Hypothesis]:
        """The n best of sentence b, from the trellis."""
        places = [place for place in self.pool[b].tolist()[: self.n_best] if place[SCORE] > NEVER]
        longest = max((int(place[LENGTH]) for place in places), default=0)
        tokens = self.trellis_tokens[b, :longest].tolist()
        parents = self.trellis_parents[b, :longest].tolist()
        log_probs = self.trellis_log_probs[b, :longest].tolist()
        hypotheses = []
        for place in places:
            ids, token_log_probs = [], []
            candidate = int(place[CANDIDATE])
            for step in reversed(range(int(place[LENGTH]))):
                ids.append(tokens[step][candidate])
                token_log_probs.append(log_probs[step][candidate])
                candidate = parents[step][candidate]
            hypotheses.append(
                Hypothesis(ids[::-1], place[SCORE], place[LOG_PROB], bool(place[FINISHED]), token_log_probs[::-1])
            )
        return hypotheses


def beam_search(
    model: Any,
    src: Tensor,
    src_mask: Tensor | None,
    beam_size: int,
    alpha: float,
    max_length: int | Tensor,
    bos_id: int,
    eos_id: int,
    n_best: int = 1,
    penalty: Penalty = "paper",
    *,
    banned: Sequence[int] | None = None,
    constraints: Constraints | None = None,
) -> list[list[Hypothesis]]:
    """The `n_best` hypotheses of each source, best first.

    src [B, S] ending in EOS, src_mask [B, S] (None: what the model takes for padding); `max_length`, one number or [B],
    is the most tokens generated, EOS included. `banned` ids are never generated: by default the model's pad and BOS.
    `constraints` replaces it where there is more to forbid. Raises ValueError where n_best is more than beam_size.
    """
    if beam_size < 1:
        raise ValueError(f"beam_size must be at least 1, not {beam_size}")
    if not 1 <= n_best <= beam_size:
        raise ValueError(f"n_best must be from 1 to beam_size, {beam_size}, not {n_best}: widen the beam")
    B = src.size(0)
    caps = torch.as_tensor(max_length, dtype=torch.long, device=src.device).expand(B).clone()
    if B and int(caps.min()) < 1:
        raise ValueError(f"max_length must be at least 1, not {int(caps.min())}")
    if not B:
        return []
    if constraints is None:
        if banned is None:
            banned = sorted({getattr(model, "pad_id", bos_id), bos_id} - {eos_id})
        constraints = Constraints.of(eos_id, B, banned=banned, device=src.device)
    search = BeamSearch(
        range(B),
        caps,
        constraints,
        beam_size=beam_size,
        bos_id=bos_id,
        alpha=alpha,
        penalty=penalty,
        n_best=n_best,
    )
    results = run(model, src, src_mask, search)
    return [results[b] for b in range(B)]
