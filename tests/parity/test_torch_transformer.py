"""The framework's own `nn.Transformer`, its two final norms removed, with our weights: the same logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dragoman.model.transformer import MultiHeadAttention, Transformer, TransformerConfig, sinusoids


def theirs_with_our_weights(ours: Transformer) -> nn.Transformer:
    config = ours.config
    theirs = nn.Transformer(
        config.d_model,
        config.n_heads,
        config.n_layers,
        config.n_layers,
        config.d_ff,
        dropout=0.0,
        batch_first=True,
    )
    theirs.encoder.norm = None
    theirs.decoder.norm = None

    def copy_attention(mine: MultiHeadAttention, other: nn.MultiheadAttention) -> None:
        other.in_proj_weight.copy_(torch.cat([mine.q.weight, mine.k.weight, mine.v.weight]))
        other.in_proj_bias.copy_(torch.cat([mine.q.bias, mine.k.bias, mine.v.bias]))
        other.out_proj.load_state_dict(mine.o.state_dict())

    with torch.no_grad():
        for mine, other in zip(ours.encoder.layers, theirs.encoder.layers, strict=True):
            copy_attention(mine.self_attention, other.self_attn)
            other.norm1.load_state_dict(mine.self_attention_residual.norm.state_dict())
            other.norm2.load_state_dict(mine.feed_forward_residual.norm.state_dict())
            other.linear1.load_state_dict(mine.feed_forward.inner.state_dict())
            other.linear2.load_state_dict(mine.feed_forward.outer.state_dict())
        for mine, other in zip(ours.decoder.layers, theirs.decoder.layers, strict=True):
            copy_attention(mine.self_attention, other.self_attn)
            copy_attention(mine.cross_attention, other.multihead_attn)
            other.norm1.load_state_dict(mine.self_attention_residual.norm.state_dict())
            other.norm2.load_state_dict(mine.cross_attention_residual.norm.state_dict())
            other.norm3.load_state_dict(mine.feed_forward_residual.norm.state_dict())
            other.linear1.load_state_dict(mine.feed_forward.inner.state_dict())
            other.linear2.load_state_dict(mine.feed_forward.outer.state_dict())
    return theirs


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("n_layers", "d_model", "n_heads"), [(2, 24, 3), (6, 64, 8)])
def test_the_same_logits(n_layers: int, d_model: int, n_heads: int, training: bool) -> None:
    torch.manual_seed(1)
    ours = Transformer(TransformerConfig(101, n_layers, d_model, 5 * d_model, n_heads, dropout=0.0)).train(training)
    for parameter in ours.parameters():  # biases and norms too, so that a forgotten one shows
        torch.nn.init.normal_(parameter, std=0.15) if parameter.dim() == 1 else None
    theirs = theirs_with_our_weights(ours).train(training)

    src, tgt_in = torch.randint(1, 101, (3, 5)), torch.randint(1, 101, (3, 7))
    src[1, 3:] = 0
    tgt_in[2, 4:] = 0

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        return ours.embedding(tokens) * math.sqrt(d_model) + sinusoids(tokens.size(1), d_model)

    with torch.no_grad():
        expected = (
            theirs(
                embed(src),
                embed(tgt_in),
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(7),
                src_key_padding_mask=(src == 0).float().masked_fill(src == 0, -torch.inf),
                memory_key_padding_mask=(src == 0).float().masked_fill(src == 0, -torch.inf),
            )
            @ ours.embedding.weight.T
        )
        logits = ours(src, tgt_in)
    real = tgt_in != 0
    assert (logits - expected)[real].abs().max().item() < 1e-5
