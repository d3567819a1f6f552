"""`torch.nn.Transformer` as the 2017 model: scaled embeddings, sinusoids, Post-LN, one tied matrix.

Its attention goes through scaled_dot_product_attention, the target mask is declared causal, and the vocabulary
projection is computed where there is a target only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainTransformer(nn.Module):
    def __init__(self, vocab_size: int, d_model: int, d_ff: int, n_layers: int, n_heads: int, pad_id: int) -> None:
        super().__init__()
        self.pad_id, self.scale = pad_id, math.sqrt(d_model)
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.dropout = nn.Dropout(0.1)
        self.body = nn.Transformer(d_model, n_heads, n_layers, n_layers, d_ff, dropout=0.1, batch_first=True)
        for layer in (*self.body.encoder.layers, *self.body.decoder.layers):  # §5.4 drops only sub-layer outputs
            layer.dropout.p = 0.0
            layer.self_attn.dropout = 0.0
            if hasattr(layer, "multihead_attn"):
                layer.multihead_attn.dropout = 0.0
        angles = torch.arange(512)[:, None] / 10_000.0 ** (torch.arange(0, d_model, 2) / d_model)
        self.register_buffer("sinusoids", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embedding(tokens) * self.scale + self.sinusoids[: tokens.size(1)])

    def forward(self, src: Tensor, tgt_in: Tensor, tgt_out: Tensor) -> tuple[Tensor, Tensor]:
        """src [B, S], tgt_in, tgt_out [B, T] -> logits [n, V] and targets [n] where there is a target."""
        padding = src == self.pad_id
        causal = torch.ones(tgt_in.size(1), tgt_in.size(1), dtype=torch.bool).triu(1)  # here True = may not look
        y = self.body(
            self.embed(src),
            self.embed(tgt_in),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        real = tgt_out != self.pad_id
        return F.linear(y[real], self.embedding.weight), tgt_out[real]
