"""Pitfalls of §3.4: the scale of tied embeddings decides whether the first loss is about ln V or about 90."""

from __future__ import annotations

import math

import pytest
import torch

from dragoman.model.transformer import Transformer, TransformerConfig


@pytest.mark.parametrize(("vocab_size", "d_model"), [(8_000, 256), (2_000, 512)])
def test_the_first_loss_is_about_ln_v_plus_a_half(vocab_size: int, d_model: int) -> None:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size, 3, d_model, 4 * d_model, 8)).eval()
    src, tgt = torch.randint(4, vocab_size, (8, 20)), torch.randint(4, vocab_size, (8, 21))
    with torch.no_grad():
        logits = model(src, tgt[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten()).item()
    assert math.log(vocab_size) + 0.2 < loss < math.log(vocab_size) + 1.0


def test_scaled_embeddings_have_unit_size_and_positions_a_little_less() -> None:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(5_000, 1, 512)).eval()
    embedded = model.embedding(torch.arange(5_000)) * math.sqrt(512)
    assert embedded.square().mean().sqrt().item() == pytest.approx(1.0, abs=0.01)
    assert model.position.table.square().mean().sqrt().item() == pytest.approx(math.sqrt(0.5), abs=1e-4)


def test_matrices_are_glorot_uniform_and_biases_zero() -> None:
    torch.manual_seed(0)
    layer = Transformer(TransformerConfig(11, 1, 64, 160, 4)).decoder.layers[0]
    # queries, keys and values are one matrix in the authors' code: its fans count for each of them
    for linear, fan in (
        (layer.feed_forward.inner, 64 + 160),
        (layer.self_attention.o, 64 + 64),
        (layer.self_attention.q, 64 + 3 * 64),
        (layer.cross_attention.v, 64 + 3 * 64),
    ):
        bound = math.sqrt(6 / fan)
        assert linear.weight.abs().max().item() <= bound
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert (linear.bias == 0).all()
