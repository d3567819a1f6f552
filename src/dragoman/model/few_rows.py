"""A decoding step for few rows as one call: a sentence alone, or the last ones of a batch.

At one row a product of a library costs as much in its call as in its work, and a step has dozens. Here the whole step
is one function (`few_rows_step` of native/decoding.cpp) over weights that lie where `PackedWeights` put them; what is
described to it once is below, in the layout of the C++ structures of the same names.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from dragoman.model.native.calls import KINDS

if TYPE_CHECKING:
    from dragoman.model.packed import Best, PackedState
    from dragoman.model.packed_weights import Norm as PackedNorm
    from dragoman.model.packed_weights import PackedDecoderLayer, PackedLinear, PackedWeights

FEW_ROWS = 4
"""Up to this many rows, reading each weight once beats the blocks of a library's product."""

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class _Linear(ctypes.Structure):
    _fields_ = [("weight", _pointer), ("scales", _pointer), ("bias", _pointer), ("n_in", _long), ("n_out", _long)]


class _Norm(ctypes.Structure):
    _fields_ = [("gamma", _pointer), ("beta", _pointer), ("epsilon", _float)]


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "o", "q", "cross_o", "inner", "outer")),
        *((name, _Norm) for name in ("norm", "cross_norm", "last_norm")),
        *((name, _long) for name in ("heads", "d_k", "d_v", "cross_heads", "cross_d_k", "cross_d_v")),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        *(("kind", _int), ("activation", _int), ("scale", _float)),
        *((name, _long) for name in ("d", "n_layers", "n_blocks")),
        *((name, _pointer) for name in ("embedding", "layers", "blocks")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *(("n", _long), ("tokens", _pointer), ("positions", _pointer)),
        *(("pages", _pointer), ("pages_stride", _long), ("page_bits", _int)),
        *(("slots", _pointer), ("slots_stride", _long), ("lengths", _pointer)),
        *(("memories", _pointer), ("memory_lengths", _pointer)),
        *(("barred", _pointer), ("barred_stride", _long)),
    ]


class FewRows:
    """The decoder's weights, described once for `few_rows_step`."""

    def __init__(self, weights: PackedWeights, library: ctypes.CDLL) -> None:
        self._weights = weights  # what is pointed at must live
        self._layers = (_DecoderLayer * len(weights.decoder))(*map(_layer, weights.decoder))
        self._blocks = (_Linear * len(weights.blocks))(*map(_linear, weights.blocks))
        self._decoder = _Decoder(
            KINDS[weights.precision],
            weights.activation,
            weights.scale,
            weights.target_embedding.size(1),
            len(weights.decoder),
            len(weights.blocks),
            weights.target_embedding.data_ptr(),
            ctypes.addressof(self._layers),
            ctypes.addressof(self._blocks),
        )
        self._step: Any = library.few_rows_step
        self._step.argtypes = [_pointer, _pointer, _long, *[_pointer] * 4]
        self._step.restype = None

    def best(
        self, tokens: Tensor, state: PackedState, pages: np.ndarray, page_bits: int, barred: np.ndarray, best: Best
    ) -> None:
        """One step of tokens [R], whose places in `state` are there already; the likeliest tokens go into `best`."""
        positions = self._weights.positions(int(state.lengths.max()))
        tokens = tokens.contiguous()
        rows = _Rows(
            tokens.size(0),
            tokens.data_ptr(),
            positions.data_ptr(),
            pages.ctypes.data,
            pages.shape[1],
            page_bits,
            state.slots.ctypes.data,
            state.slots.shape[1],
            state.lengths.ctypes.data,
            state.memory_at.ctypes.data,
            state.memory_lengths.ctypes.data,
            barred.ctypes.data,
            barred.shape[1],
        )
        self._step(
            ctypes.addressof(self._decoder),
            ctypes.addressof(rows),
            best.logits.size(1),
            best.logits.data_ptr(),
            best.tokens.data_ptr(),
            best.largest.data_ptr(),
            best.sums.data_ptr(),
        )


def _linear(linear: PackedLinear) -> _Linear:
    return _Linear(
        linear.weight.data_ptr(), linear.scales.data_ptr(), linear.bias.data_ptr(), linear.n_in, linear.n_out
    )


def _norm(norm: PackedNorm) -> _Norm:
    return _Norm(norm.gamma.data_ptr(), norm.beta.data_ptr(), norm.epsilon)


def _layer(layer: PackedDecoderLayer) -> _DecoderLayer:
    linears = (layer.qkv, layer.o, layer.q, layer.cross_o, layer.inner, layer.outer)
    norms = (layer.norm, layer.cross_norm, layer.last_norm)
    heads = (layer.heads, layer.cross_heads)
    sizes = [size for each in heads for size in (each.n, each.d_k, each.d_v)]
    return _DecoderLayer(*map(_linear, linears), *map(_norm, norms), *sizes)
