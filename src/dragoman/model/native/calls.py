"""The functions of decoding.cpp as Python calls: a model described once, tensors and arrays in, pointers out.

What is described is laid out as the C++ structures of the same names. Nothing is copied, and the interpreter's lock is
let go for as long as a call lasts: a whole step, or the encoding of some hundred tokens.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from dragoman.model.packed import Best, PackedState
    from dragoman.model.packed_weights import (
        Heads,
        Norm,
        PackedDecoderLayer,
        PackedEncoderLayer,
        PackedLinear,
        PackedWeights,
    )

Precision = Literal["float32", "bfloat16", "int8"]
KINDS: dict[Precision, int] = {"float32": 0, "bfloat16": 1, "int8": 2}

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("weight", "scales", "bias", "zeros")),
        *((name, _long) for name in ("n_in", "n_out")),
    ]


class _Norm(ctypes.Structure):
    _fields_ = [("gamma", _pointer), ("beta", _pointer), ("epsilon", _float)]


class _Heads(ctypes.Structure):
    _fields_ = [(name, _long) for name in ("n", "d_k", "d_v")]


class _EncoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "o", "inner", "outer")),
        *((name, _Norm) for name in ("norm", "last_norm")),
        ("heads", _Heads),
    ]


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "o", "inner", "outer", "q", "memory", "cross_o")),
        *((name, _Norm) for name in ("norm", "last_norm", "cross_norm")),
        *((name, _Heads) for name in ("heads", "cross_heads")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *(("kind", _int), ("activation", _int), ("scale", _float)),
        *((name, _long) for name in ("d", "n_encoder", "n_decoder", "source_words", "target_words")),
        *((name, _pointer) for name in ("source_embedding", "target_embedding", "encoder", "decoder")),
        ("vocabulary", _Linear),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *(("n", _long), ("tokens", _pointer), ("positions", _pointer)),
        *(("pages", _pointer), ("pages_stride", _long), ("page_bits", _int)),
        *(("slots", _pointer), ("slots_stride", _long), ("lengths", _pointer)),
        *(("memories", _pointer), ("memory_lengths", _pointer)),
        *(("barred", _pointer), ("barred_stride", _long)),
    ]


def panel_columns(library: ctypes.CDLL) -> int:
    """How many columns of a weight matrix its products read together."""
    columns: int = library.panel_columns()
    return columns


class DescribedModel:
    """A model's weights, described once for the functions that compute with them."""

    def __init__(self, weights: PackedWeights, library: ctypes.CDLL) -> None:
        self._weights = weights  # what is pointed at must live
        self._encoder = (_EncoderLayer * len(weights.encoder))(*map(_encoder_layer, weights.encoder))
        self._decoder = (_DecoderLayer * len(weights.decoder))(*map(_decoder_layer, weights.decoder))
        self._model = _Model(
            KINDS[weights.precision],
            weights.activation,
            weights.scale,
            weights.target_embedding.size(1),
            len(weights.encoder),
            len(weights.decoder),
            weights.source_embedding.size(0),
            weights.target_embedding.size(0),
            weights.source_embedding.data_ptr(),
            weights.target_embedding.data_ptr(),
            ctypes.addressof(self._encoder),
            ctypes.addressof(self._decoder),
            _linear(weights.vocabulary),
        )
        self._encode: Any = library.encode
        self._encode.argtypes = [_pointer, _pointer, _pointer, _long, _pointer, _pointer]
        self._step: Any = library.step
        self._step.argtypes = [_pointer, _pointer, _long, *[_pointer] * 5]
        self._encode.restype = self._step.restype = _int

    def encode(self, tokens: Tensor, offsets: np.ndarray, memory: np.ndarray) -> None:
        """tokens [offsets[-1]] of sentences end to end, offsets [S + 1] int32; memory [L] addresses to write to."""
        positions = self._weights.positions(int(np.diff(offsets).max()))
        answer = self._encode(
            ctypes.addressof(self._model),
            tokens.data_ptr(),
            positions.data_ptr(),
            len(offsets) - 1,
            offsets.ctypes.data,
            memory.ctypes.data,
        )
        _check(answer)

    def step(
        self, tokens: Tensor, state: PackedState, pages: np.ndarray, page_bits: int, barred: np.ndarray, best: Best
    ) -> None:
        """One step of tokens [R], whose places in `state` are there already; the likeliest tokens go into `best`."""
        outputs = (best.logits, best.tokens, best.largest, best.sums)
        self._call(tokens, state, pages, page_bits, barred, best.logits.size(1), *(x.data_ptr() for x in outputs), 0)

    def logits(self, tokens: Tensor, state: PackedState, pages: np.ndarray, page_bits: int, logits: Tensor) -> None:
        """As `step`, but all logits [R, V] are written out."""
        self._call(tokens, state, pages, page_bits, np.zeros((1, 0), np.int32), 0, 0, 0, 0, 0, logits.data_ptr())

    def _call(
        self, tokens: Tensor, state: PackedState, pages: np.ndarray, page_bits: int, barred: np.ndarray, *rest: int
    ) -> None:
        positions = self._weights.positions(int(state.lengths.max(initial=0)))
        tokens = tokens.contiguous()
        step = _Step(
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
        _check(self._step(ctypes.addressof(self._model), ctypes.addressof(step), *rest))


def _check(answer: int) -> None:
    """Raises what a call answered, as the model's own code would."""
    if answer == 1:
        raise MemoryError("there is no memory for this batch: use a smaller batch_tokens")
    if answer == 2:
        raise IndexError("a token is not in the model's vocabulary")


def _linear(linear: PackedLinear) -> _Linear:
    parts = (linear.weight, linear.scales, linear.bias, linear.zeros)
    return _Linear(*(part.data_ptr() for part in parts), linear.n_in, linear.n_out)


def _norm(norm: Norm) -> _Norm:
    return _Norm(norm.gamma.data_ptr(), norm.beta.data_ptr(), norm.epsilon)


def _heads(heads: Heads) -> _Heads:
    return _Heads(heads.n, heads.d_k, heads.d_v)


def _encoder_layer(layer: PackedEncoderLayer) -> _EncoderLayer:
    linears = (layer.qkv, layer.o, layer.inner, layer.outer)
    norms = (layer.norm, layer.last_norm)
    return _EncoderLayer(*map(_linear, linears), *map(_norm, norms), _heads(layer.heads))


def _decoder_layer(layer: PackedDecoderLayer) -> _DecoderLayer:
    linears = (layer.qkv, layer.o, layer.inner, layer.outer, layer.q, layer.memory, layer.cross_o)
    norms = (layer.norm, layer.last_norm, layer.cross_norm)
    heads = (layer.heads, layer.cross_heads)
    return _DecoderLayer(*map(_linear, linears), *map(_norm, norms), *map(_heads, heads))
