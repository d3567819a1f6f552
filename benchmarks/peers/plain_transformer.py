"""`torch.nn.Transformer` as the 2017 model: scaled embeddings, sinusoids, Post-LN, one tied matrix.

Its attention goes through scaled_dot_product_attention, the target mask is declared causal, and the vocabulary
projection is computed where there is a target only. Decoding remembers keys and values, as that of any engine does, and
answers the same two questions (`start`, `step`) as our own models, so that one and the same search decodes both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Cache = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of one layer: keys and values of the target so far and of the memory, each [B, H, T or S, K]."""


@dataclass(frozen=True)
class PlainState:
    """What decoding remembers."""

    layers: tuple[Cache, ...]
    real: Tensor
    """[B, 1, 1, S], True = a source token."""
    length: int = 0

    def select(self, rows: Tensor) -> PlainState:
        """The state of the hypotheses `rows` ([B'] of indices into B)."""
        layers = tuple((k[rows], v[rows], mk[rows], mv[rows]) for k, v, mk, mv in self.layers)
        return PlainState(layers, self.real[rows], self.length)


class PlainTransformer(nn.Module):
    sinusoids: Tensor

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        d_ff: int,
        n_layers: int,
        n_heads: int,
        pad_id: int,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.pad_id, self.scale = pad_id, math.sqrt(d_model)
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.dropout = nn.Dropout(dropout)
        self.body = nn.Transformer(d_model, n_heads, n_layers, n_layers, d_ff, dropout, batch_first=True)
        for layer in (*self.body.encoder.layers, *self.body.decoder.layers):  # §5.4 drops only sub-layer outputs
            layer.dropout.p = 0.0
            layer.self_attn.dropout = 0.0
            if hasattr(layer, "multihead_attn"):
                layer.multihead_attn.dropout = 0.0
        angles = torch.arange(1024)[:, None] / 10_000.0 ** (torch.arange(0, d_model, 2) / d_model)
        self.register_buffer("sinusoids", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.embedding(tokens) * self.scale + self.sinusoids[: tokens.size(1)])
        return x

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

    def start(self, src: Tensor, src_mask: Tensor | None = None) -> PlainState:
        """src [B, S] ending in EOS, src_mask [B, S] (True = a token) -> the state before the first target token."""
        real = src != self.pad_id if src_mask is None else src_mask
        memory = self.body.encoder(self.embed(src), src_key_padding_mask=~real)
        layers: list[Cache] = []
        for layer in self.body.decoder.layers:
            _, k, v = self.projected(layer.multihead_attn, memory)
            layers.append((k[:, :, :0], v[:, :, :0], k, v))
        return PlainState(tuple(layers), real[:, None, None])

    def step(self, tokens: Tensor, state: PlainState) -> tuple[Tensor, PlainState]:
        """tokens [B], the newest of each hypothesis -> logits [B, V] of the next, and the new state."""
        x = self.dropout(self.embedding(tokens) * self.scale + self.sinusoids[state.length])[:, None]  # [B, 1, D]
        layers: list[Cache] = []
        for layer, (k, v, memory_k, memory_v) in zip(self.body.decoder.layers, state.layers, strict=True):
            q, new_k, new_v = self.projected(layer.self_attn, x)
            k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
            seen = F.scaled_dot_product_attention(q, k, v)
            x = layer.norm1(x + layer.self_attn.out_proj(seen.transpose(1, 2).flatten(2)))
            q, _, _ = self.projected(layer.multihead_attn, x)
            seen = F.scaled_dot_product_attention(q, memory_k, memory_v, state.real)
            x = layer.norm2(x + layer.multihead_attn.out_proj(seen.transpose(1, 2).flatten(2)))
            x = layer.norm3(x + layer.linear2(F.relu(layer.linear1(x))))
            layers.append((k, v, memory_k, memory_v))
        logits = F.linear(self.body.decoder.norm(x)[:, 0], self.embedding.weight)
        return logits, PlainState(tuple(layers), state.real, state.length + 1)

    def projected(self, attention: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D] -> queries, keys and values of an attention, each [B, H, T, K]."""
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
        )
        return q, k, v
