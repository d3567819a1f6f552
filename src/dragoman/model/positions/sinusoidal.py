"""Sinusoids laid out in halves, as Marian has them (Junczys-Dowmunt et al. 2018, arXiv:1804.00344).

    PE(pos, i) = sin(pos / 10000^(2i / d_model)),  PE(pos, d_model / 2 + i) = cos(the same),  0 <= i < d_model / 2

The same numbers as §3.5 in another order of the width: all sines, then all cosines. A model trained with one layout
needs that layout, or the width of all its weights permuted (`halves_order`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dragoman.model.transformer import PositionalEncoding, sinusoids


def halves_order(d_model: int) -> Tensor:
    """[D] indices: `x[..., halves_order(D)]` brings an interleaved width into halves."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


class SinusoidsInHalves(PositionalEncoding):
    """`PositionalEncoding` with the width in Marian's order."""

    def __init__(self, d_model: int, max_length: int = 512, dropout: float = 0.1) -> None:
        super().__init__(d_model, max_length, dropout)
        self.table = self.table[:, halves_order(d_model)].contiguous()

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x [B, T, D] at positions start ... start + T - 1 -> [B, T, D]."""
        end = start + x.size(1)
        if end > self.table.size(0):
            longer = sinusoids(max(end, 2 * self.table.size(0)), x.size(2))[:, halves_order(x.size(2))]
            self.table = longer.contiguous().to(self.table)
        y: Tensor = self.dropout(x + self.table[start:end])  # [B, T, D]
        return y
