"""The positions that a model adds to its embeddings, as a picture: §3.5's sinusoids, or whatever table it has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman.model.transformer import PositionalEncoding

SHOWN = 96
"""Positions in the picture."""


def position_table(model: nn.Module, length: int = SHOWN) -> Tensor | None:
    """The first `length` rows of the table that `model` adds: [length, D], or None for a model that adds none."""
    for module in model.modules():
        if isinstance(module, PositionalEncoding):
            width = int(module.table.size(1))
            was_training = module.training
            module.eval()
            try:
                with torch.no_grad():  # asked for, not read, so that a table that grows on demand has grown
                    rows: Tensor = module(torch.zeros(1, length, width, device=module.table.device))  # [1, length, D]
            finally:
                module.train(was_training)
            return rows[0].float().cpu()  # [length, D]
    return None


def similarity(table: Tensor) -> Tensor:
    """Cosine of each position's row with each other's: table [L, D] -> [L, L].

    For the sinusoids it depends on the distance alone, since PE(pos) . PE(pos + k) = sum of cos(k w_i) (§3.5).
    """
    rows = table / table.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    cosines: Tensor = rows @ rows.T
    return cosines
