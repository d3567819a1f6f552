"""Searches as plain loops, sharing nothing with those under test but the model's whole pass."""

from __future__ import annotations

import math

import numpy as np
import torch

MEMORY: dict[object, dict[tuple[int, ...], np.ndarray]] = {}


class NextLogProbs:
    """log P(next token | tokens so far) by teacher forcing from the beginning, remembered between tests."""

    def __init__(self, model, src: list[int], bos_id: int) -> None:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        self.memory = MEMORY.setdefault((hash(weights), tuple(src), bos_id), {})
        self.model, self.src, self.bos_id = model, src, bos_id

    def look_up(self, prefixes: list[tuple[int, ...]]) -> None:
        """Prefixes of one length in one pass: nothing but time is saved by it."""
        new = [prefix for prefix in prefixes if prefix not in self.memory]
        if not new:
            return
        tgt_in = torch.tensor([[self.bos_id, *prefix] for prefix in new])
        with torch.no_grad():
            logits = self.model(torch.tensor([self.src] * len(new)), tgt_in)[:, -1].double().numpy()
        for prefix, row in zip(new, logits, strict=True):
            self.memory[prefix] = row - row.max() - math.log(np.exp(row - row.max()).sum())

    def __call__(self, prefix: tuple[int, ...]) -> np.ndarray:
        self.look_up([prefix])
        return self.memory[prefix]


def divisor(length: int, alpha: float, penalty: str) -> float:
    return {
        "paper": lambda: math.pow((5 + length) / 6, alpha),
        "power": lambda: math.pow(length, alpha),
        "average": lambda: float(length),
        "none": lambda: 1.0,
    }[penalty]()


def every_output(next_log_probs: NextLogProbs, tokens: list[int], eos_id: int, cap: int):
    """(ids, log_prob, finished) of all outputs of at most `cap` tokens: ended by EOS, or cut at the cap."""
    running = [((), 0.0)]
    for _ in range(cap):
        extended = []
        next_log_probs.look_up([ids for ids, _ in running])
        for ids, log_prob in running:
            after = next_log_probs(ids)
            yield (*ids, eos_id), log_prob + after[eos_id], True
            extended += [((*ids, token), log_prob + after[token]) for token in tokens]
        running = extended
    for ids, log_prob in running:
        yield ids, log_prob, False


def exhaustive(next_log_probs: NextLogProbs, tokens: list[int], eos_id: int, cap: int, alpha: float, penalty: str):
    """All outputs, the best first: (score, ids, log_prob, finished)."""
    scored = [
        (log_prob / divisor(len(ids), alpha, penalty), ids, log_prob, finished)
        for ids, log_prob, finished in every_output(next_log_probs, tokens, eos_id, cap)
    ]
    return sorted(scored, key=lambda output: -output[0])


def greedy(next_log_probs: NextLogProbs, tokens: list[int], eos_id: int, cap: int) -> tuple[int, ...]:
    ids: tuple[int, ...] = ()
    while len(ids) < cap and eos_id not in ids:
        after = next_log_probs(ids)
        ids = (*ids, max([*tokens, eos_id], key=lambda token: after[token]))
    return ids


def beam(next_log_probs: NextLogProbs, tokens: list[int], eos_id: int, cap: int, size: int, alpha: float, penalty: str):
    """The authors' beam search, one hypothesis at a time: (score, ids, log_prob, finished), best first.

    Ends at the cap or when the finished cannot be displaced, whatever the running ones become.
    """
    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[float, tuple[int, ...], float, bool]] = []
    for length in range(1, cap + 1):
        next_log_probs.look_up([ids for ids, _ in running])
        candidates = sorted(
            (
                ((*ids, token), log_prob + next_log_probs(ids)[token])
                for ids, log_prob in running
                for token in [*tokens, eos_id]
            ),
            key=lambda candidate: -candidate[1],
        )[: 2 * size if size > 1 else 1]
        for ids, log_prob in candidates:
            if ids[-1] == eos_id or length == cap:
                finished.append((log_prob / divisor(length, alpha, penalty), ids, log_prob, ids[-1] == eos_id))
        finished = sorted(finished, key=lambda output: -output[0])[:size]
        running = [candidate for candidate in candidates if candidate[0][-1] != eos_id][:size]
        if not running:
            break
        hope = (
            max(running[0][1] / divisor(n, alpha, penalty) for n in range(length + 1, cap + 1)) if length < cap else 0
        )
        if len(finished) == size and length < cap and hope <= finished[-1][0]:
            break
    return finished
