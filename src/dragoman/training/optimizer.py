"""What turns gradients into new weights: Adam as the paper has it (§5.3), AdamW, and Muon."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator

if TYPE_CHECKING:
    import torch
    from torch import nn


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

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of all parameters; its learning rate is set before each update."""
        import torch

        return torch.optim.Adam(model.parameters(), lr=0.0, betas=self.betas, eps=self.epsilon, fused=True)


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

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of all parameters; its learning rate is set before each update."""
        import torch

        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.epsilon, fused=True)


@dataclass(frozen=True)
class Muon:
    """Momentum made orthogonal for the weights of linear transformations, AdamW for all else (training/muon.py).

    Jordan and others, 2024 (kellerjordan.github.io/posts/muon), scaled so that one learning rate suits both
    (arXiv:2502.16982, §2.2). Embeddings, biases, norms and the softmax's matrix are AdamW's, and do not decay.
    """

    kind: Literal["muon"] = "muon"
    betas: tuple[float, float] = (0.9, 0.98)
    """As Adam's, for what is not Muon's."""
    epsilon: float = 1e-9
    """As Adam's."""
    weight_decay: float = 0.0
    """Share of the learning rate by which Muon's matrices shrink in each update."""
    momentum: float = 0.95
    """Decay of the running mean of the gradient that is made orthogonal."""
    block: int = 32
    """Rows that are made orthogonal together: more cost more."""

    def __post_init__(self) -> None:
        _check(self.betas, self.epsilon, self.weight_decay)
        wrong = []
        if not 0.0 <= self.momentum < 1.0:
            wrong.append(f"momentum must be at least 0 and below 1, not {self.momentum}")
        if self.block < 1:
            wrong.append(f"block must be at least 1, not {self.block}")
        if wrong:
            raise ValueError("; ".join(wrong))

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of all parameters; its learning rate is set before each update."""
        from torch import nn

        from dragoman.training.muon import MuonWithAdam

        linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
        matrices = [p for p in model.parameters() if p in linear]
        others = [p for p in model.parameters() if p not in linear]
        ours = {"weight_decay": self.weight_decay, "momentum": self.momentum, "block": self.block}
        groups = [{"params": matrices, **ours}, {"params": others, "weight_decay": 0.0}]
        return MuonWithAdam(
            [group for group in groups if group["params"]], lr=0.0, betas=self.betas, eps=self.epsilon, fused=True
        )


Optimizer = Annotated[Adam | AdamW | Muon, Discriminator("kind")]
