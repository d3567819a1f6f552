"""What turns gradients into new weights: Adam as the paper has it (§5.3), and AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator

if TYPE_CHECKING:
    import torch


def _check(betas: tuple[float, float], epsilon: float, weight_decay: float = 0.0) -> None:
    wrong = [f"betas must be at least 0 and below 1, not {beta}" for beta in betas if not 0.0 <= beta < 1.0]
    if not 0.0 < epsilon < math.inf:
        wrong.append(f"epsilon must be above 0 and finite, not {epsilon}")
    if not 0.0 <= weight_decay < math.inf:
        wrong.append(f"weight_decay must be at least 0 and finite, not {weight_decay}")
    if wrong:
        raise ValueError("; ".join(wrong))


@dataclass(frozen=True)
class Adam:
    """The paper's: beta_1 = 0.9, beta_2 = 0.98, epsilon = 1e-9 (§5.3)."""

    kind: Literal["adam"] = "adam"
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of the running means of the gradient and of its square."""
    epsilon: float = 1e-9
    """Added to the root of the second, so that nothing is divided by zero."""

    def __post_init__(self) -> None:
        _check(self.betas, self.epsilon)

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser; its learning rate is set before each update."""
        import torch

        return torch.optim.Adam(list(parameters), lr=0.0, betas=self.betas, eps=self.epsilon, fused=True)


@dataclass(frozen=True)
class AdamW:
    """Adam with weight decay apart from the gradient (Loshchilov and Hutter, arXiv:1711.05101).

    Only matrices decay; biases and norms, which have one dimension, do not.
    """

    kind: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of the running means of the gradient and of its square."""
    epsilon: float = 1e-9
    """Added to the root of the second, so that nothing is divided by zero."""
    weight_decay: float = 0.01
    """Share of the learning rate by which matrices shrink in each update."""

    def __post_init__(self) -> None:
        _check(self.betas, self.epsilon, self.weight_decay)

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser; its learning rate is set before each update."""
        import torch

        parameters = list(parameters)
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.epsilon, fused=True)


Optimizer = Annotated[Adam | AdamW, Discriminator("kind")]
