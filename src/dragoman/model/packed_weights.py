"""The weights of a trained model, laid out once for products in the chosen precision.

It covers post-norm encoder-decoders: the paper's and Marian's. D is d_model, V the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.model import native
from dragoman.model.families.encoder_decoder import EncoderDecoder
from dragoman.model.native.calls import Precision
from dragoman.model.native.huge_pages import in_huge_pages
from dragoman.model.transformer import MultiHeadAttention, PostNorm, Transformer

INPUT_TYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
PRODUCT_TYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int32,
}

VOCABULARY_BLOCK = 1024
"""Vocabulary columns whose logits are reduced together, while they are still in the processor's cache."""

HAS_BLOCKS = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
TYPICAL_ROWS = 256

ACTIVATIONS = {"relu": 0, "swish": 1, "gelu": 2}


class PackedLinear:
    """x W^T + b with W [out, in]; the bias is left to the kernel that reads the product."""

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: Precision) -> None:
        weight = weight.detach().float()
        self.n_out, self.n_in = weight.shape
        self.bias = torch.zeros(self.n_out) if bias is None else bias.detach().float().contiguous()
        self.scales = torch.ones(0)
        if precision == "int8":  # each output's weights have their own scale, symmetric about zero
            self.scales = (weight.abs().amax(dim=1) / 127).clamp_min(1e-12)  # [out]
            self.stored = (weight / self.scales[:, None]).round().to(torch.int8)  # [out, in]
        else:
            self.stored = weight.t().to(INPUT_TYPES[precision])  # [in, out]
        self.in_blocks = HAS_BLOCKS and precision == "float32"
        self._blocks: Tensor | None = None
        self.move_to(self.stored)

    def product(self, x: Tensor, out: Tensor | None) -> Tensor:
        """x [R, in] -> [R, out] without the bias, in `out` unless `in_blocks`; int8 gives int32 sums.

        In float32 oneDNN keeps the weights in the blocks in which its product reads them, a second copy that is made
        on first use: a tenth faster at 256 rows, twice at five. A row's numbers do not depend on how many there are.
        """
        if self.stored.dtype == torch.int8:
            return torch._int_mm(x, self.weight, out=out)
        if self.in_blocks:
            if self._blocks is None:
                self._blocks = torch.ops.mkldnn._reorder_linear_weight(self.stored.t().contiguous(), TYPICAL_ROWS)
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocks, None, "none", [], "")
            return y
        return torch.mm(x, self.weight, out=out)

    def move_to(self, stored: Tensor) -> None:
        """The same weights at another place in memory."""
        self.stored = stored
        self.weight = stored.t() if stored.dtype == torch.int8 else stored  # [in, out], as a product reads it


class Norm(NamedTuple):
    """LayerNorm's parameters."""

    gamma: Tensor
    beta: Tensor
    epsilon: float


@dataclass(frozen=True)
class Heads:
    """A MultiHeadAttention's sizes."""

    n: int
    d_k: int
    d_v: int

    @property
    def kept(self) -> int:
        """E: what one position leaves behind."""
        return self.n * (self.d_k + self.d_v)


@dataclass(frozen=True)
class PackedEncoderLayer:
    """One encoder layer's weights."""

    heads: Heads
    qkv: PackedLinear
    o: PackedLinear
    norm: Norm
    inner: PackedLinear
    outer: PackedLinear
    last_norm: Norm

    @property
    def linears(self) -> list[PackedLinear]:
        return [part for part in vars(self).values() if isinstance(part, PackedLinear)]


@dataclass(frozen=True)
class PackedDecoderLayer(PackedEncoderLayer):
    """One decoder layer's weights; `memory` gives keys and values of the source, once a sentence."""

    cross_heads: Heads
    q: PackedLinear
    memory: PackedLinear
    cross_o: PackedLinear
    cross_norm: Norm


class PackedWeights:
    """All weights of a model in one precision; shared by every thread that decodes with it."""

    def __init__(self, model: Any, precision: Precision) -> None:
        self.precision: Precision = precision
        self.pad_id: int = model.pad_id
        config = model.config
        self.scale = math.sqrt(config.d_model) if getattr(config, "scale_embedding", True) else 1.0
        self.activation = ACTIVATIONS[getattr(getattr(config, "feed_forward", None), "activation", "relu")]
        self.position = model.position
        self.source_embedding: Tensor = model.embedding.weight.detach().float()  # [V, D]
        target = getattr(model, "embedding_of_target", model.embedding)
        self.target_embedding: Tensor = target.weight.detach().float()  # [V, D]
        self.encoder = [self._encoder_layer(layer) for layer in model.encoder.layers]
        self.decoder = [self._decoder_layer(layer) for layer in model.decoder.layers]
        weight, bias = model.generator.weight, model.generator.bias
        self.n_vocabulary = weight.size(0)
        self.blocks = [
            self._linear(weight[i : i + VOCABULARY_BLOCK], None if bias is None else bias[i : i + VOCABULARY_BLOCK])
            for i in range(0, self.n_vocabulary, VOCABULARY_BLOCK)
        ]
        # A decoding step of one row does nothing but read these.
        linears = [*self.blocks, *(part for layer in self.decoder for part in layer.linears)]
        for linear, stored in zip(linears, in_huge_pages([each.stored for each in linears]), strict=True):
            linear.move_to(stored)

    def positions(self, n: int) -> Tensor:
        """[n or more, D]: the encodings of the first n positions."""
        if n > self.position.table.size(0):
            self.position(torch.zeros(1, n, self.target_embedding.size(1)))  # the table grows on demand
        table: Tensor = self.position.table
        return table

    def _linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return PackedLinear(weight, bias, self.precision)

    def _stacked(self, *linears: nn.Linear) -> PackedLinear:
        """Several maps of one input as one product."""
        return self._linear(torch.cat([x.weight for x in linears]), torch.cat([x.bias for x in linears]))

    def _encoder_parts(self, layer: Any) -> dict[str, Any]:
        attention, ff = layer.self_attention, layer.feed_forward
        return {
            "heads": _heads(attention),
            "qkv": self._stacked(attention.q, attention.k, attention.v),
            "o": self._linear(attention.o.weight, attention.o.bias),
            "norm": _norm(layer.self_attention_residual),
            "inner": self._linear(ff.inner.weight, ff.inner.bias),
            "outer": self._linear(ff.outer.weight, ff.outer.bias),
            "last_norm": _norm(layer.feed_forward_residual),
        }

    def _encoder_layer(self, layer: Any) -> PackedEncoderLayer:
        return PackedEncoderLayer(**self._encoder_parts(layer))

    def _decoder_layer(self, layer: Any) -> PackedDecoderLayer:
        cross = layer.cross_attention
        return PackedDecoderLayer(
            **self._encoder_parts(layer),
            cross_heads=_heads(cross),
            q=self._linear(cross.q.weight, cross.q.bias),
            memory=self._stacked(cross.k, cross.v),
            cross_o=self._linear(cross.o.weight, cross.o.bias),
            cross_norm=_norm(layer.cross_attention_residual),
        )


def can_pack(model: Any) -> bool:
    """Whether `PackedWeights` knows all that this model computes, and the kernels are there."""
    if type(model) not in (Transformer, EncoderDecoder) or native.loaded("decoding.cpp") is None:
        return False
    on_processor = all(parameter.device.type == "cpu" for parameter in model.parameters())
    residuals = [
        part
        for layer in [*model.encoder.layers, *model.decoder.layers]
        for name, part in layer.named_children()
        if name.endswith("_residual")
    ]
    return on_processor and all(isinstance(part, PostNorm) for part in residuals)


def _heads(attention: MultiHeadAttention) -> Heads:
    return Heads(attention.n_heads, attention.d_k, attention.d_v)


def _norm(residual: PostNorm) -> Norm:
    norm = residual.norm
    return Norm(norm.weight.detach().float().contiguous(), norm.bias.detach().float().contiguous(), norm.eps)
