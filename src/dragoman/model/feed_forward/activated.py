"""The position-wise network of §3.3 with another activation: FFN(x) = f(x W_1 + b_1) W_2 + b_2.

f is ReLU in the paper; GELU is x Phi(x) (Hendrycks and Gimpel 2016, arXiv:1606.08415); swish is x sigmoid(x)
(Ramachandran et al. 2017, arXiv:1710.05941), what most Marian models on the hub use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from dragoman.model.transformer import PositionwiseFeedForward

Activation = Literal["relu", "gelu", "swish"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}


class ActivatedFeedForward(PositionwiseFeedForward):
    """Equation (2) with f in place of ReLU; the parameters keep their names."""

    def __init__(self, d_model: int, d_ff: int, activation: Activation = "relu") -> None:
        super().__init__(d_model, d_ff)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, F] -> [B, T, D]."""
        y: Tensor = self.outer(self.activation(self.inner(x)))
        return y
