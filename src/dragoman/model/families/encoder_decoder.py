"""Encoder and decoder with open sockets: the layers of transformer.py, and in them what `choices.py` offers.

With 2017 parts this is the paper's model: the same numbers from the same weights, parameter names included. What it
adds is what other people's models need: positions in another layout, other activations and norm orders, a bias on the
logits, embeddings of their own for source, target and softmax, and a decoder that starts with the pad token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from dragoman.model.choices import EncoderDecoderSpec
from dragoman.model.transformer import (
    Decoder,
    DecoderLayer,
    DecoderState,
    Encoder,
    EncoderLayer,
    Generator,
    MultiHeadAttention,
    causal_mask,
    initialise,
)


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(EncoderDecoderSpec):
    """The spec with what a tokenizer brings."""

    vocab_size: int
    """Entries of the vocabulary that both sides use."""
    pad_id: int = 0
    """The token that fills short rows. As the first token of a target it is looked at: Marian starts with it."""


class OpenGenerator(Generator):
    """The pre-softmax linear transformation with a matrix of anybody's and perhaps a bias."""

    def __init__(self, embedding: nn.Embedding, tied: bool, bias: bool) -> None:
        super().__init__(embedding)
        vocab_size, d_model = embedding.weight.shape
        if not tied:
            self.weight = nn.Embedding(vocab_size, d_model).weight  # [V, D], its own
        if bias:
            self.bias = nn.Parameter(self.weight.new_zeros(vocab_size))  # [V]

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> logits [B, T, V]; softmax and loss are the caller's."""
        return nn.functional.linear(x, self.weight, self.bias)


class EncoderDecoder(nn.Module):
    """Figure 1 with open sockets; answers what `Transformer` answers."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.pad_id = config.pad_id
        d_model, dropout = config.d_model, config.dropout

        def encoder_layer() -> EncoderLayer:
            heads = MultiHeadAttention(d_model, config.n_heads)
            return EncoderLayer(heads, config.feed_forward.build(d_model, config.d_ff), residual)

        def decoder_layer() -> DecoderLayer:
            heads = MultiHeadAttention(d_model, config.decoder_heads)
            cross = MultiHeadAttention(d_model, config.decoder_heads)
            return DecoderLayer(heads, cross, config.feed_forward.build(d_model, config.decoder_ff), residual)

        def residual() -> nn.Module:
            return config.residual.build(d_model, dropout)

        self.embedding = nn.Embedding(config.vocab_size, d_model)  # of the source, and of the target where shared
        if not config.share_embeddings:
            self.target_embedding = nn.Embedding(config.vocab_size, d_model)
        self.position = config.position.build(d_model, dropout)
        self.encoder = Encoder([encoder_layer() for _ in range(config.n_layers)])
        self.decoder = Decoder([decoder_layer() for _ in range(config.decoder_layers)])
        self.encoder_norm = config.residual.build_end(d_model)
        self.decoder_norm = config.residual.build_end(d_model)
        self.generator = OpenGenerator(self.embedding_of_target, config.tie_output, config.output_bias)
        initialise(self)
        if not config.tie_output:
            nn.init.normal_(self.generator.weight, std=d_model**-0.5)

    @property
    def embedding_of_target(self) -> nn.Embedding:
        """The matrix that target tokens are looked up in."""
        return self.embedding if self.config.share_embeddings else self.target_embedding

    @property
    def decoder_layers(self) -> Iterable[DecoderLayer]:
        """The decoder's layers, bottom first."""
        return cast("Iterable[DecoderLayer]", self.decoder.layers)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Source tokens [B, S] -> [B, S, D]: embeddings, scaled (§3.4), plus positions (§3.5), with dropout."""
        return self.place(self.embedding(tokens), start)

    def embed_target(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Target tokens [B, T] -> [B, T, D], in the same way."""
        return self.place(self.embedding_of_target(tokens), start)

    def place(self, x: Tensor, start: int) -> Tensor:
        """Embeddings [B, T, D] at positions from `start` -> [B, T, D]."""
        scale = math.sqrt(self.config.d_model) if self.config.scale_embedding else 1.0
        y: Tensor = self.position(x * scale, start)
        return y

    def encode(self, src: Tensor, memory_mask: Tensor) -> Tensor:
        """src [B, S], mask [B, 1, 1, S] -> memory [B, S, D]."""
        memory: Tensor = self.encoder_norm(self.encoder(self.embed(src), memory_mask))
        return memory

    def forward(self, src: Tensor, tgt_in: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """src [B, S] ending in EOS, tgt_in [B, T] shifted right, src_mask [B, S] -> logits [B, T, V]."""
        logits: Tensor = self.generator(self.features(src, tgt_in, src_mask))
        return logits

    def features(self, src: Tensor, tgt_in: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """As `forward`, up to the decoder's output [B, T, D], before the Generator."""
        memory_mask = self.source_mask(src, src_mask)  # [B, 1, 1, S]
        real = tgt_in != self.pad_id  # [B, T]
        real[:, :1] = True  # the start token is there to be seen, even where it is the pad token
        tgt_mask = causal_mask(tgt_in.size(1), tgt_in.device) & real[:, None, None]  # [B, 1, T, T]
        memory = self.encode(src, memory_mask)  # [B, S, D]
        x = self.decoder(self.embed_target(tgt_in), memory, tgt_mask, memory_mask)  # [B, T, D]
        y: Tensor = self.decoder_norm(x)
        return y

    def source_mask(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        """src [B, S] and perhaps a mask of the same shape -> [B, 1, 1, S]."""
        return ((src != self.pad_id) if src_mask is None else src_mask)[:, None, None]

    def start(self, src: Tensor, src_mask: Tensor | None = None) -> DecoderState:
        """src [B, S] ending in EOS -> the state before the first target token."""
        memory_mask = self.source_mask(src, src_mask)  # [B, 1, 1, S]
        memory = self.encode(src, memory_mask)  # [B, S, D]
        return DecoderState(tuple(layer.start(memory) for layer in self.decoder_layers), memory_mask)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """tokens [B], the newest of each hypothesis (the start token first) -> logits [B, V], and the new state."""
        x = self.embed_target(tokens[:, None], state.length)  # [B, 1, D]
        layers = []
        for layer, past in zip(self.decoder_layers, state.layers, strict=True):
            x, grown = layer.step(x, past, state.memory_mask)
            layers.append(grown)
        logits: Tensor = self.generator(self.decoder_norm(x))[:, 0]  # [B, V]
        return logits, DecoderState(tuple(layers), state.memory_mask, state.length + 1)
