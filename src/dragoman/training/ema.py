"""A running mean of the weights, as Marian keeps one: smoother than the last ones, and free of a second run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Ema:
    """mean <- decay * mean + (1 - decay) * weights after each update; early on the decay is lower, so that the random
    start is soon forgotten."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters: list[Tensor] = [parameter for _, parameter in model.named_parameters()]
        self.means = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after update `step` (from 1) into the mean."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.means, self.parameters, 1.0 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the mean for its weights within the block, and its own again after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mean, parameter in zip(self.means, self.parameters, strict=True):
            weights = parameter.detach().clone()
            parameter.copy_(mean)
            mean.copy_(weights)

    def named_means(self) -> dict[str, Tensor]:
        """The mean of each parameter by its name."""
        return dict(zip(self.names, self.means, strict=True))
