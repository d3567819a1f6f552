"""Equation (1) on small matrices worked out by hand, and its rule for queries that may look at nothing."""

from __future__ import annotations

import pytest
import torch

from dragoman.model.transformer import MultiHeadAttention, attention, causal_mask

Q = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1]])
K = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]])
V = torch.tensor([[1.0, 2], [3, 4], [5, 6]])


def test_the_worked_example() -> None:
    expected = torch.tensor([[3.3985690107, 4.3985690107], [3.6403133357, 4.6403133357]])
    assert torch.allclose(attention(Q, K, V), expected, atol=1e-6)


def test_the_causal_example() -> None:
    x = torch.tensor([[1.0, 0], [0, 1], [1, 1]])
    expected = torch.tensor([[1.0, 0], [0.3302384507, 0.6697615493], [0.7517449218, 0.7517449218]])
    assert torch.allclose(attention(x, x, x, causal_mask(3)), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_row_with_nothing_to_see_gives_zeros_and_finite_gradients(dtype: torch.dtype) -> None:
    q = torch.randn(2, 3, 4, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 5, 4, dtype=dtype, requires_grad=True)
    v = torch.randn(2, 5, 6, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    mask[0, 1] = False
    y = attention(q, k, v, mask)
    assert (y[0, 1] == 0).all()
    y.float().square().sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert (q.grad[0, 1] == 0).all()  # type: ignore[index]


def test_a_mask_of_too_high_rank_is_refused_instead_of_broadcasting() -> None:
    scores = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="more dimensions than the scores"):
        attention(scores, scores, scores, torch.ones(2, 1, 1, 5, dtype=torch.bool))


def test_masked_keys_have_no_weight_at_all() -> None:
    q, k, v = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 6)
    mask = torch.tensor([True, True, False, True, False])
    assert torch.allclose(attention(q, k, v, mask), attention(q, k[:, :, mask], v[:, :, mask]), atol=1e-6)


def test_heads_are_slices_of_the_width() -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(d_model=6, n_heads=3, d_k=4, d_v=5)
    x, y = torch.randn(2, 7, 6), torch.randn(2, 5, 6)
    heads = []
    for head in range(3):
        w = [
            part.weight[head * width : (head + 1) * width]
            for part, width in ((module.q, 4), (module.k, 4), (module.v, 5))
        ]
        heads.append(attention(x @ w[0].T, y @ w[1].T, y @ w[2].T))  # biases are zero only by init; set below
    for part in (module.q, module.k, module.v, module.o):
        torch.nn.init.zeros_(part.bias)
    expected = torch.cat(heads, dim=-1) @ module.o.weight.T
    assert torch.allclose(module(x, y, y), expected, atol=1e-6)
