"""What the parts of a model must answer, on one page. Letters and masks are those of transformer.py.

Nothing needs to inherit from these: a part that has the methods fits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

from torch import Tensor


class Position(Protocol):
    """Socket *position*: gives embeddings their places."""

    def __call__(self, x: Tensor, start: int = 0) -> Tensor:
        """x [B, T, D] at positions start ... start + T - 1 -> [B, T, D], dropout applied."""


class FeedForward(Protocol):
    """Socket *feed-forward*: each position by itself."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""


class Residual(Protocol):
    """Socket *residual*: one class for each order of sub-layer, sum and normalisation."""

    def __call__(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""


class State(Protocol):
    """All that decoding remembers between two steps. It is passed in and out, never kept on a module."""

    def select(self, rows: Tensor) -> Self:
        """rows [B'] of indices into B -> the state of those hypotheses, in that order, repeats allowed."""


class Decodable(Protocol):
    """What a family must answer so that every search can use it."""

    def start(self, src: Tensor, src_mask: Tensor | None = None) -> State:
        """src [B, S] ending in EOS, src_mask [B, S] -> the state before the first target token."""

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """tokens [B], the newest of each hypothesis -> logits [B, V] of the next, and the new state."""
