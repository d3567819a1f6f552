"""The weights that are shown are those that the model used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dragoman.inspection.attention import attention_weights, entropy_bits, kind_of, record_attention
from dragoman.model.transformer import MultiHeadAttention, Transformer, TransformerConfig, causal_mask


def small() -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerConfig(11, n_layers=2, d_model=12, d_ff=20, n_heads=3, d_k=4, d_v=5)).eval()


SRC = torch.tensor([[4, 5, 6, 7, 3], [8, 9, 3, 0, 0]])  # [B=2, S=5], the second padded
TGT = torch.tensor([[2, 4, 5, 6, 7, 8, 9], [2, 4, 5, 0, 0, 0, 0]])  # [B=2, T=7]


@pytest.mark.parametrize("mask", [None, "causal", "padding"])
def test_weights_give_the_modules_own_output(mask: str | None) -> None:
    torch.manual_seed(1)
    module = MultiHeadAttention(12, n_heads=3, d_k=4, d_v=5)
    query = torch.randn(2, 7, 12)
    key = query if mask == "causal" else torch.randn(2, 5, 12)
    given: Tensor | None = None
    if mask == "causal":
        given = causal_mask(7)
    elif mask == "padding":
        given = (SRC != 0)[:, None, None]
    weights = attention_weights(module, query, key, given)
    assert weights.shape == (2, 3, 7, key.size(1))
    values = module.split(module.v(key))  # [B, H, S, V]
    output = module.o((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, module(query, key, key, given), atol=1e-5, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 7))
    if given is not None:
        assert weights.masked_select(~given.expand_as(weights)).abs().max() == 0


def test_a_query_that_may_look_at_nothing_has_no_weights() -> None:
    module = MultiHeadAttention(12, n_heads=3)
    x = torch.randn(1, 4, 12)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    weights = attention_weights(module, x, x, mask)
    assert weights[0, :, 2].abs().max() == 0
    torch.testing.assert_close(weights[0, :, 1].sum(-1), torch.ones(3))


def test_every_layer_and_use_is_recorded_in_order_and_nothing_stays() -> None:
    model = small()
    with torch.no_grad():
        plain = model(SRC, TGT)
        with record_attention(model) as maps:
            recorded = model(SRC, TGT)
    assert torch.equal(plain, recorded)
    assert [(found.kind, found.layer) for found in maps] == [
        ("encoder", 0),
        ("encoder", 1),
        ("decoder", 0),
        ("cross", 0),
        ("decoder", 1),
        ("cross", 1),
    ]
    shapes = {"encoder": (2, 3, 5, 5), "cross": (2, 3, 7, 5), "decoder": (2, 3, 7, 7)}
    assert all(found.weights.shape == shapes[found.kind] for found in maps)
    assert not any(found.weights.requires_grad for found in maps)
    model(SRC, TGT)
    assert len(maps) == 6
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_go_even_when_the_model_fails() -> None:
    model = small()
    with pytest.raises(IndexError), record_attention(model):
        model(torch.tensor([[99]]), TGT[:1])
    assert not any(module._forward_hooks for module in model.modules())


def test_padding_and_the_future_get_no_weight() -> None:
    model = small()
    with record_attention(model) as maps:
        model(SRC, TGT)
    for found in maps:
        if found.kind == "decoder":
            assert found.weights[0].triu(1).abs().max() == 0
        else:
            assert found.weights[1, :, :, 3:].abs().max() == 0
    torch.testing.assert_close(maps[0].weights.sum(-1), torch.ones(2, 3, 5))


def test_the_uses_are_told_from_the_path() -> None:
    assert kind_of("encoder.layers.0.self_attention") == "encoder"
    assert kind_of("decoder.layers.11.self_attention") == "decoder"
    assert kind_of("decoder.layers.1.cross_attention") == "cross"
    assert kind_of("layers.1.self_attention") == "decoder"


def test_entropy_is_zero_for_one_place_and_log2_for_all() -> None:
    one = torch.eye(8)
    assert entropy_bits(one).item() == pytest.approx(0.0, abs=1e-6)
    assert entropy_bits(torch.full((3, 8), 1 / 8)).item() == pytest.approx(3.0)
