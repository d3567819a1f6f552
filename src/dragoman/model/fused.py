"""The 2017 model of transformer.py again, for training on a CPU: the same numbers, sooner.

What it does otherwise, and why:
- rows without padding: nothing is computed for a token that is not there;
- queries, keys and values of a self-attention are one matrix product, keys and values of a cross-attention another;
- residual, dropout and LayerNorm are one pass over memory; dropout costs 16 random bits an element;
- the products read a copy of the weights in their precision and layout, made once an update, not once a use
  (projections.py); parameters, their gradients, LayerNorm's and softmax's sums stay float32.

    joined = Joined(model, torch.bfloat16)       # the copies: once an update
    x, index, real = features(model, joined, src, tgt_in, src != pad_id, tgt_out != pad_id, Bits(seed, step))

Parameters are those of the model: gradients arrive in the leaves as usual. `sdpa` is equation (1) by PyTorch's own
kernel, for where padded rows are wanted (a GPU): `use_sdpa(model)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dragoman.model.compiled import CompiledKernels, best_kernels
from dragoman.model.kernels import AttentionShape, Bits, Dropout, Kernels, Rows, pack
from dragoman.model.projections import Projection, best_projection
from dragoman.model.transformer import (
    DecoderLayer,
    EncoderLayer,
    MultiHeadAttention,
    PositionwiseFeedForward,
    PostNorm,
    Transformer,
    sinusoids,
)

# ---------------------------------------------------------------------------------------------------------------------
# §3.2 by PyTorch's kernels
# ---------------------------------------------------------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`transformer.attention` by scaled_dot_product_attention: q [..., T, K], k, v [..., S, K or V] -> [..., T, V].

    A query that may look at nothing gets zeros here too.
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v)
    if mask.dim() > q.dim():
        raise ValueError(f"a mask of shape {list(mask.shape)} has more dimensions than queries {list(q.shape)}")
    sees = mask.any(dim=-1, keepdim=True)  # [..., T, 1]
    # An empty row may look everywhere and its result is thrown away: minus infinity throughout would give NaN.
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | ~sees)
    return y.masked_fill(~sees, 0.0)


def use_sdpa(model: nn.Module) -> nn.Module:
    """Every `MultiHeadAttention` of the model computes equation (1) by `sdpa` from now on; returns the model."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.attention = sdpa
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Weights as the matrix products want them
# ---------------------------------------------------------------------------------------------------------------------


def encoder_layers(model: Transformer) -> list[EncoderLayer]:
    """The layers of the encoder, as what they are."""
    return cast(list[EncoderLayer], list(model.encoder.layers))


def decoder_layers(model: Transformer) -> list[DecoderLayer]:
    """The layers of the decoder, as what they are."""
    return cast(list[DecoderLayer], list(model.decoder.layers))


def first_heads(model: Transformer) -> MultiHeadAttention:
    """An attention of the model: all have the same sizes."""
    return cast(MultiHeadAttention, encoder_layers(model)[0].self_attention)


class _Layer(NamedTuple):
    """The projections of a layer: self-attention, feed-forward network and, in a decoder, across (q, kv, o)."""

    qkv: Projection
    o: Projection
    inner: Projection
    outer: Projection
    across: tuple[Projection, ...] = ()


class Joined:
    """The weights of a `Transformer`, joined and in the precision of the products: what `features` reads.

    Call `refresh()` after each update of the parameters. ValueError where the model is not of the 2017 family, or where
    the kernels do not fit its widths.
    """

    def __init__(
        self,
        model: Transformer,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels | None = None,
        projection: type[Projection] | None = None,
    ) -> None:
        if not isinstance(model, Transformer):
            raise ValueError(f"the fused passes know the 2017 Transformer, not {type(model).__name__}")
        self.dtype = dtype
        heads = first_heads(model)
        widths = (model.config.d_model, model.config.d_ff, heads.d_k, heads.d_v)
        self.kernels = best_kernels(*widths) if kernels is None else kernels
        if not self.kernels.fits(*widths):
            raise ValueError(f"the {self.kernels.name} kernels do not fit the widths {widths}")

        if projection is None:
            projection = best_projection(dtype) if self.kernels.name == CompiledKernels.name else Projection

        def join(*linears: nn.Linear) -> Projection:
            return projection([linear.weight for linear in linears], [linear.bias for linear in linears], dtype)

        def layer(module: EncoderLayer | DecoderLayer, *across: Projection) -> _Layer:
            own = cast(MultiHeadAttention, module.self_attention)
            inside = cast(PositionwiseFeedForward, module.feed_forward)
            return _Layer(join(own.q, own.k, own.v), join(own.o), join(inside.inner), join(inside.outer), across)

        self.encoder = [layer(module) for module in encoder_layers(model)]
        self.decoder = [
            layer(module, join(cross.q), join(cross.k, cross.v), join(cross.o))
            for module in decoder_layers(model)
            for cross in [module.cross_attention]
        ]
        self.vocabulary = projection([model.generator.weight], [model.generator.bias], dtype)
        """The pre-softmax linear transformation (§3.4)."""
        layers = (*self.encoder, *self.decoder)
        self._all = [p for layer in layers for p in (layer.qkv, layer.o, layer.inner, layer.outer, *layer.across)]
        self._all.append(self.vocabulary)

    def refresh(self, part: int = 0, of: int = 1) -> None:
        """Take over the parameters as they are now; or a share of them, so that threads may divide the work."""
        for each in self._all[part::of]:
            each.refresh()


# ---------------------------------------------------------------------------------------------------------------------
# The parts, each with its own way back
# ---------------------------------------------------------------------------------------------------------------------


def _apply(function: Any, *arguments: Any) -> Tensor:
    y: Tensor = function.apply(*arguments)
    return y


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: Projection, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.projection = projection
        return projection.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,), projection = ctx.saved_tensors, ctx.projection
        dx = projection.backward(grad) if ctx.needs_input_grad[0] else None
        return dx, None, *projection.split(projection.gradients(grad, x))


class _FeedForward(Function):
    """Equation (2). Only the inner layer after ReLU is kept: its zeros are the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Projection, outer: Projection, *parameters: Tensor) -> Tensor:
        hidden = inner.forward(x, relu=True)  # [n, F]
        ctx.save_for_backward(x, hidden)
        ctx.inner, ctx.outer = inner, outer
        return outer.forward(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, hidden = ctx.saved_tensors
        inner, outer = ctx.inner, ctx.outer
        d_hidden = outer.backward(grad, hidden)  # [n, F]
        of_outer = outer.split(outer.gradients(grad, hidden))
        of_inner = inner.split(inner.gradients(d_hidden, x))
        return inner.backward(d_hidden), None, None, *of_inner, *of_outer


class _ResidualNorm(Function):
    """LayerNorm(x + Dropout(y))."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        gamma: Tensor,
        beta: Tensor,
        eps: float,
        bits: Tensor | None,
        dropout: Dropout,
        kernels: Kernels,
    ) -> Tensor:
        out, *kept = kernels.residual_norm(x, y, bits, dropout, gamma, beta, eps)
        ctx.save_for_backward(gamma, beta, *kept)
        ctx.bits, ctx.dropout, ctx.kernels = bits, dropout, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gamma, beta, z, mean, rstd = ctx.saved_tensors
        dx, dy, dgamma, dbeta = ctx.kernels.residual_norm_backward(
            grad, z, ctx.bits, ctx.dropout, gamma, beta, mean, rstd
        )
        return dx, dy, dgamma, dbeta, None, None, None, None


class _Embedding(Function):
    """Dropout(embedding * sqrt(d_model) + position) (§3.4, §3.5, §5.4)."""

    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        tokens: Tensor,
        positions: Tensor,
        sinusoids: Tensor,
        bits: Tensor | None,
        dropout: Dropout,
        joined: Joined,
    ) -> Tensor:
        ctx.tokens, ctx.bits, ctx.dropout, ctx.kernels = tokens, bits, dropout, joined.kernels
        ctx.entries, ctx.factor = table.size(0), math.sqrt(table.size(1))
        return joined.kernels.embed(tokens, positions, table, sinusoids, ctx.factor, bits, dropout, joined.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        table = ctx.kernels.embed_backward(grad, ctx.tokens, ctx.entries, ctx.factor, ctx.bits, ctx.dropout)
        return table, None, None, None, None, None, None


class _SelfAttention(Function):
    """Equation (1) on [q k v] side by side, [n, H * (2 K + V)] -> [n, H * V]; its gradient comes side by side too."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, shape: AttentionShape, kernels: Kernels) -> Tensor:
        out = _empty_heads(qkv, shape)
        q, k, v = _split(qkv, shape)
        lse = kernels.attention(q, k, v, shape, out)
        ctx.save_for_backward(qkv, lse)
        ctx.shape, ctx.kernels = shape, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        qkv, lse = ctx.saved_tensors
        into = _empty_like(qkv, ctx.shape.queries)
        ctx.kernels.attention_backward(
            grad.contiguous(), *_split(qkv, ctx.shape), lse, ctx.shape, list(_split(into, ctx.shape))
        )
        return into, None, None


class _CrossAttention(Function):
    """The same with queries [n, H * K] from the decoder, [k v] [m, H * (K + V)] side by side from the memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, shape: AttentionShape, kernels: Kernels) -> Tensor:
        out = _empty_heads(q, shape)
        k, v = _split(kv, shape)
        lse = kernels.attention(q, k, v, shape, out)
        ctx.save_for_backward(q, kv, lse)
        ctx.shape, ctx.kernels = shape, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, kv, lse = ctx.saved_tensors
        dq, dkv = _empty_like(q, ctx.shape.queries), _empty_like(kv, ctx.shape.keys)
        ctx.kernels.attention_backward(
            grad.contiguous(), q, *_split(kv, ctx.shape), lse, ctx.shape, [dq, *_split(dkv, ctx.shape)]
        )
        return dq, dkv, None, None


def _split(x: Tensor, shape: AttentionShape) -> Sequence[Tensor]:
    """[n, ... k v] -> the parts of the width that belong to q (if it is there), k and v."""
    k, v = shape.n_heads * shape.d_k, shape.n_heads * shape.d_v
    return x.split_with_sizes([k, k, v] if x.size(1) == 2 * k + v else [k, v], dim=1)


def _empty_heads(q: Tensor, shape: AttentionShape) -> Tensor:
    return _clear(q.new_empty(q.size(0), shape.n_heads * shape.d_v), shape.queries)


def _empty_like(x: Tensor, rows: Rows) -> Tensor:
    return _clear(torch.empty_like(x), rows)


def _clear(x: Tensor, rows: Rows) -> Tensor:
    """Zeros in the rows that hold no token: what memory held there might be NaN, and 0 * NaN is no 0."""
    x[rows.real :].zero_()
    return x


# ---------------------------------------------------------------------------------------------------------------------
# Figure 1
# ---------------------------------------------------------------------------------------------------------------------


def features(
    model: Transformer,
    joined: Joined,
    src: Tensor,
    tgt_in: Tensor,
    src_mask: Tensor,
    tgt_mask: Tensor,
    bits: Bits | None = None,
) -> tuple[Tensor, Tensor, int]:
    """`Transformer.features` on packed rows, for targets padded at the right.

    src [B, S], tgt_in [B, T], masks of the same shapes, True = a real token; no dropout without `bits`.
    Returns the decoder's output [n, D], the index [n] of its rows in the flattened [B, T], and how many of them are
    real: what stands behind those only makes n a round number.
    """
    kernels, p = joined.kernels, model.config.dropout
    dropout = Dropout(p)
    src_index, sources = pack(src_mask, joined.vocabulary.multiple)
    tgt_index, targets = pack(tgt_mask, joined.vocabulary.multiple)

    def draw(rows: int) -> Tensor | None:
        if bits is None or p == 0.0:
            return None
        whole = -(-rows // 32) * 32  # the same masks whatever `multiple` adds
        return bits.draw(whole, model.config.d_model)[:rows]

    def embed(tokens: Tensor, rows: Rows) -> Tensor:
        table = model.position.table
        if rows.widest > table.size(0):
            table = model.position.table = sinusoids(2 * rows.widest, model.config.d_model)
        return _apply(_Embedding, model.embedding.weight, tokens, rows.positions, table, draw(rows.n), dropout, joined)

    def shape(queries: Rows, keys: Rows, causal: bool = False) -> AttentionShape:
        heads = first_heads(model)
        return AttentionShape(heads.n_heads, heads.d_k, heads.d_v, queries, keys, causal)

    def linear(projection: Projection, x: Tensor) -> Tensor:
        return _apply(_Linear, x, projection, *projection.parameters)

    def look(x: Tensor, layer: _Layer, who: AttentionShape) -> Tensor:
        return linear(layer.o, _apply(_SelfAttention, linear(layer.qkv, x), who, kernels))

    def look_across(x: Tensor, memory: Tensor, layer: _Layer, who: AttentionShape) -> Tensor:
        q, kv, o = layer.across
        return linear(o, _apply(_CrossAttention, linear(q, x), linear(kv, memory), who, kernels))

    def feed_forward(x: Tensor, layer: _Layer) -> Tensor:
        parameters = (*layer.inner.parameters, *layer.outer.parameters)
        return _apply(_FeedForward, x, layer.inner, layer.outer, *parameters)

    def add(x: Tensor, y: Tensor, residual: nn.Module | Tensor) -> Tensor:
        norm = cast(PostNorm, residual).norm
        return _apply(_ResidualNorm, x, y, norm.weight, norm.bias, norm.eps, draw(x.size(0)), dropout, kernels)

    x, who = embed(src.flatten()[src_index], sources), shape(sources, sources)  # [m, D]
    for layer, names in zip(joined.encoder, encoder_layers(model), strict=True):
        x = add(x, look(x, layer, who), names.self_attention_residual)
        x = add(x, feed_forward(x, layer), names.feed_forward_residual)
    memory = x

    x, who = embed(tgt_in.flatten()[tgt_index], targets), shape(targets, targets, causal=True)  # [n, D]
    across = shape(targets, sources)
    for layer, below in zip(joined.decoder, decoder_layers(model), strict=True):
        x = add(x, look(x, layer, who), below.self_attention_residual)
        x = add(x, look_across(x, memory, layer, across), below.cross_attention_residual)
        x = add(x, feed_forward(x, layer), below.feed_forward_residual)
    return x, tgt_index, targets.real
