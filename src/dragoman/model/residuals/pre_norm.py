"""Pre-LN (Xiong et al. 2020, arXiv:2002.04745): x + Dropout(Sublayer(LayerNorm(x))).

The sum itself is never normalised, so that a stack of such layers needs one LayerNorm at its end.
"""

from __future__ import annotations

from torch import Tensor, nn

from dragoman.model.transformer import Sublayer


class PreNorm(nn.Module):
    """The residual connection around a sub-layer that sees normalised input."""

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        y: Tensor = x + self.dropout(sublayer(self.norm(x)))  # [B, T, D]
        return y
