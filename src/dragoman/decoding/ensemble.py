"""Several models as one: at each step the mean of their probabilities. An ensemble is a `Decodable` like any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dragoman.errors import ModelError


@dataclass(frozen=True)
class EnsembleState:
    """The states of the members, row for row."""

    members: tuple[Any, ...]

    def select(self, rows: Tensor) -> EnsembleState:
        return EnsembleState(tuple(state.select(rows) for state in self.members))


class Ensemble:
    """Models over one vocabulary. Its logits are log-probabilities already: the log of the mean probability."""

    def __init__(self, models: Sequence[Any]) -> None:
        if not models:
            raise ValueError("an ensemble needs at least one model")
        self.models = tuple(models)
        self.pad_id = models[0].pad_id

    def forward(self, src: Tensor, tgt_in: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """src [B, S], tgt_in [B, T] -> logits [B, T, V]."""
        return _mean([model.forward(src, tgt_in, src_mask) for model in self.models])

    __call__ = forward

    def start(self, src: Tensor, src_mask: Tensor | None = None) -> EnsembleState:
        return EnsembleState(tuple(model.start(src, src_mask) for model in self.models))

    def step(self, tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        """tokens [R] -> logits [R, V]."""
        answers = [model.step(tokens, member) for model, member in zip(self.models, state.members, strict=True)]
        return _mean([logits for logits, _ in answers]), EnsembleState(tuple(member for _, member in answers))

    @property
    def training(self) -> bool:
        """Whether any member is: a search puts the whole ensemble to evaluation while it runs."""
        return any(getattr(model, "training", False) for model in self.models)

    def eval(self) -> Ensemble:
        return self._each(lambda model: model.eval())

    def train(self, mode: bool = True) -> Ensemble:
        return self._each(lambda model: model.train(mode))

    def _each(self, act: Callable[[Any], Any]) -> Ensemble:
        for model in self.models:
            act(model)
        return self


def _mean(logits: Sequence[Tensor]) -> Tensor:
    """log of the mean over the members of softmax(logits), in float32."""
    stacked = torch.stack([member.float().log_softmax(dim=-1) for member in logits])
    return stacked.logsumexp(dim=0) - math.log(len(logits))


def check_members(names: Sequence[str], tokenizers: Sequence[Any]) -> None:
    """Raises ModelError, with every fault, where models cannot speak for one another: their token ids must agree."""
    first = tokenizers[0]
    problems = []
    for name, tokenizer in zip(names[1:], tokenizers[1:], strict=True):
        if len(tokenizer) != len(first):
            problems.append(f"{name} has a vocabulary of {len(tokenizer):,} and {names[0]} one of {len(first):,}")
        elif tokenizer.fingerprint != first.fingerprint:
            problems.append(
                f"{name} and {names[0]} have different tokenizers, so their token ids mean different pieces"
            )
    if problems:
        raise ModelError([f"{problem}: only models with the same tokenizer can work together" for problem in problems])
