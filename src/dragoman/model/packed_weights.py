"""The weights of a trained model, laid out once for products in the chosen precision.

It covers post-norm encoder-decoders: the paper's and Marian's. D is d_model, V the vocabulary.
"""

from __future__ import annotations

import copy
import math
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.model import native
from dragoman.model.families.encoder_decoder import EncoderDecoder
from dragoman.model.native.calls import Precision, panel_columns
from dragoman.model.native.huge_pages import in_huge_pages
from dragoman.model.transformer import MultiHeadAttention, PostNorm, Transformer

ACTIVATIONS = {"relu": 0, "swish": 1, "gelu": 2}


class PackedLinear:
    """x W^T + b with W [out, in], laid out for the products of native/products.h: panels of columns, and in them groups
    of as many inputs as fill 32 bits. What columns and inputs the last ones lack is zeros."""

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: Precision, columns: int) -> None:
        weight = weight.detach().float()
        self.n_out, self.n_in = weight.shape
        group = {"float32": 1, "bfloat16": 2, "int8": 4}[precision]
        pad = nn.functional.pad
        more_out, more_in = -self.n_out % columns, -self.n_in % group
        self.bias = pad(torch.zeros(self.n_out) if bias is None else bias.detach().float(), (0, more_out))
        self.scales = torch.zeros(0)
        self.zeros = torch.zeros(0, dtype=torch.int32)
        if precision == "int8":  # each output's weights have their own scale, symmetric about zero
            scales = (weight.abs().amax(dim=1) / 127).clamp_min(1e-12)  # [out]
            weight = (weight / scales[:, None]).round().to(torch.int8)
            self.scales = pad(scales, (0, more_out))
            # Inputs are stored 128 too large, to be unsigned: what that adds to each sum is taken off again.
            self.zeros = pad(weight.sum(dim=1, dtype=torch.int32) * 128, (0, more_out))
        elif precision == "bfloat16":
            weight = weight.to(torch.bfloat16)
        panels = pad(weight, (0, more_in, 0, more_out)).unflatten(0, (-1, columns)).unflatten(2, (-1, group))
        self.weight = panels.transpose(1, 2).contiguous()  # [panels, groups, columns, inputs of a group]


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
        kernels = native.loaded("decoding.cpp")
        if kernels is None:
            raise RuntimeError("the kernels are not there; ask can_pack first")
        self.kernels = kernels
        self.precision: Precision = precision
        self.pad_id: int = model.pad_id
        config = model.config
        self.scale = math.sqrt(config.d_model) if getattr(config, "scale_embedding", True) else 1.0
        self.activation = ACTIVATIONS[getattr(getattr(config, "feed_forward", None), "activation", "relu")]
        self._position = copy.deepcopy(model.position).float()
        self._growing = threading.Lock()  # threads share the table
        self.source_embedding: Tensor = model.embedding.weight.detach().float().contiguous()  # [V, D]
        target = getattr(model, "embedding_of_target", model.embedding)
        self.target_embedding: Tensor = target.weight.detach().float().contiguous()  # [V, D]
        self.encoder = [self._encoder_layer(layer) for layer in model.encoder.layers]
        self.decoder = [self._decoder_layer(layer) for layer in model.decoder.layers]
        self.vocabulary = self._linear(model.generator.weight, model.generator.bias)
        self.n_vocabulary = self.vocabulary.n_out
        # A decoding step of one row does nothing but read these.
        linears = [self.vocabulary, *(part for layer in self.decoder for part in layer.linears)]
        for linear, weight in zip(linears, in_huge_pages([each.weight for each in linears]), strict=True):
            linear.weight = weight

    def positions(self, n: int) -> Tensor:
        """[n or more, D] float32: the encodings of the first n positions."""
        with self._growing:
            if n > self._position.table.size(0):
                self._position(torch.zeros(1, n, self.target_embedding.size(1)))  # the table grows on demand
            table: Tensor = self._position.table
        return table

    def _linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return PackedLinear(weight, bias, self.precision, panel_columns(self.kernels))

    def _into_heads(self, attention: MultiHeadAttention, *linears: nn.Linear) -> PackedLinear:
        """Maps of one input to queries, keys or values as one product, which leaves heads side by side."""
        orders = [_side_by_side(attention, linear.out_features) for linear in linears]
        weights = [linear.weight[order] for linear, order in zip(linears, orders, strict=True)]
        biases = [linear.bias[order] for linear, order in zip(linears, orders, strict=True)]
        return self._linear(torch.cat(weights), torch.cat(biases))

    def _out_of_heads(self, attention: MultiHeadAttention) -> PackedLinear:
        """The map of what heads that stand side by side have found."""
        order = _side_by_side(attention, attention.o.in_features)
        return self._linear(attention.o.weight[:, order], attention.o.bias)

    def _encoder_parts(self, layer: Any) -> dict[str, Any]:
        attention, ff = layer.self_attention, layer.feed_forward
        return {
            "heads": _heads(attention),
            "qkv": self._into_heads(attention, attention.q, attention.k, attention.v),
            "o": self._out_of_heads(attention),
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
            q=self._into_heads(cross, cross.q),
            memory=self._into_heads(cross, cross.k, cross.v),
            cross_o=self._out_of_heads(cross),
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


def _side_by_side(attention: MultiHeadAttention, width: int) -> Tensor:
    """[width] which of the model's columns, one head behind the other, each of ours is: entry i of every head in turn,
    as native/attention.h has them."""
    return torch.arange(width).view(attention.n_heads, -1).t().flatten()


def _norm(residual: PostNorm) -> Norm:
    norm = residual.norm
    return Norm(norm.weight.detach().float().contiguous(), norm.bias.detach().float().contiguous(), norm.eps)
