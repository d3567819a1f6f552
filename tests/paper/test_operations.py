"""Table 1 and its constants: operations counted by PyTorch's own counter, not by our formula."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dragoman.model.transformer import MultiHeadAttention, PositionwiseFeedForward, attention


def operations(module: torch.nn.Module, *inputs: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize(("n", "d"), [(10, 16), (20, 16), (10, 48)])
def test_table_1(n: int, d: int) -> None:
    """Self-attention costs O(n^2 d) beside its projections: 4 n^2 d operations, all heads together."""
    q, k, v = (torch.randn(1, 4, n, d // 4) for _ in range(3))

    class Core(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v)

    assert operations(Core(), q, k, v) == 4 * n * n * d


def test_projections_and_feed_forward() -> None:
    n, d = 7, 32
    x = torch.randn(1, n, d)
    assert operations(MultiHeadAttention(d, 4), x, x, x) == 8 * n * d * d + 4 * n * n * d
    assert operations(PositionwiseFeedForward(d, 4 * d), x) == 16 * n * d * d


def test_where_attention_costs_as_much_as_the_feed_forward() -> None:
    d = 16
    feed_forward = PositionwiseFeedForward(d, 4 * d)
    whole = MultiHeadAttention(d, 2)

    def at(n: int) -> tuple[int, int, int]:
        x = torch.randn(1, n, d)
        return operations(feed_forward, x), operations(whole, x, x, x), 4 * n * n * d

    ffn, _, core = at(4 * d)
    assert core == ffn
    ffn, attention_with_projections, _ = at(2 * d)
    assert attention_with_projections == ffn
