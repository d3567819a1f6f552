"""The decoding kernels as Python calls: tensors and arrays in, pointers out. Nothing is copied, no lock is held."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import numpy as np
from torch import Tensor

Precision = Literal["float32", "bfloat16", "int8"]
KINDS: dict[Precision, int] = {"float32": 0, "bfloat16": 1, "int8": 2}

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_PRODUCT = [_INT, _POINTER, _POINTER, _POINTER, _POINTER]  # kind, product, row scales, column scales, bias
_OUT = [_POINTER, _POINTER]
_HEADS = [_LONG, _LONG, _LONG]
_SIGNATURES = {
    "residual_norm": [*_PRODUCT, _POINTER, _POINTER, _POINTER, _FLOAT, _LONG, _LONG, *_OUT],
    "activate": [*_PRODUCT, _LONG, _LONG, _INT, *_OUT],
    "prepare": [_INT, _POINTER, _LONG, _LONG, *_OUT],
    "finish": [*_PRODUCT, _LONG, _LONG, _LONG, _POINTER],
    "attend_past": [*_PRODUCT, _LONG, *_HEADS, _POINTER, _INT, _POINTER, _LONG, _POINTER, *_OUT],
    "attend_memory": [*_PRODUCT, _LONG, *_HEADS, _POINTER, _POINTER, *_OUT],
    "attend_source": [*_PRODUCT, _LONG, _POINTER, *_HEADS, *_OUT],
    "best_tokens": [*_PRODUCT, _LONG, _LONG, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _POINTER],
}


class Kernels:
    """The functions of decoding.cpp for one precision; what each does is said there."""

    def __init__(self, library: ctypes.CDLL, precision: Precision) -> None:
        self.kind = KINDS[precision]
        for name, signature in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = signature
            function.restype = None
        self._library = library

    def _product(self, product: Any) -> tuple[int, ...]:
        linear = product.linear
        return (
            self.kind,
            product.values.data_ptr(),
            product.row_scales.data_ptr(),
            linear.scales.data_ptr(),
            linear.bias.data_ptr(),
        )

    def residual_norm(self, product: Any, x: Tensor, norm: Any, out: Tensor, scales: Tensor) -> None:
        self._library.residual_norm(
            *self._product(product),
            x.data_ptr(),
            norm.gamma.data_ptr(),
            norm.beta.data_ptr(),
            norm.epsilon,
            x.size(0),
            x.size(1),
            out.data_ptr(),
            scales.data_ptr(),
        )

    def activate(self, product: Any, activation: int, out: Tensor, scales: Tensor) -> None:
        rows, n = product.values.shape
        self._library.activate(*self._product(product), rows, n, activation, out.data_ptr(), scales.data_ptr())

    def prepare(self, x: Tensor, out: Tensor, scales: Tensor) -> None:
        self._library.prepare(self.kind, x.data_ptr(), x.size(0), x.size(1), out.data_ptr(), scales.data_ptr())

    def finish(self, product: Any, out: Tensor) -> None:
        rows, n = product.values.shape
        self._library.finish(*self._product(product), rows, n, out.stride(0), out.data_ptr())

    def attend_past(
        self,
        product: Any,
        heads: Any,
        pages: np.ndarray,
        page_bits: int,
        slots: np.ndarray,
        lengths: np.ndarray,
        out: Tensor,
        scales: Tensor,
    ) -> None:
        self._library.attend_past(
            *self._product(product),
            out.size(0),
            heads.n,
            heads.d_k,
            heads.d_v,
            pages.ctypes.data,
            page_bits,
            slots.ctypes.data,
            slots.shape[1],
            lengths.ctypes.data,
            out.data_ptr(),
            scales.data_ptr(),
        )

    def attend_memory(
        self, product: Any, heads: Any, starts: np.ndarray, lengths: np.ndarray, out: Tensor, scales: Tensor
    ) -> None:
        self._library.attend_memory(
            *self._product(product),
            out.size(0),
            heads.n,
            heads.d_k,
            heads.d_v,
            starts.ctypes.data,
            lengths.ctypes.data,
            out.data_ptr(),
            scales.data_ptr(),
        )

    def attend_source(self, product: Any, offsets: np.ndarray, heads: Any, out: Tensor, scales: Tensor) -> None:
        self._library.attend_source(
            *self._product(product),
            len(offsets) - 1,
            offsets.ctypes.data,
            heads.n,
            heads.d_k,
            heads.d_v,
            out.data_ptr(),
            scales.data_ptr(),
        )

    def best_tokens(self, product: Any, first: int, barred: np.ndarray, best: Any) -> None:
        rows, n = product.values.shape
        self._library.best_tokens(
            *self._product(product),
            rows,
            n,
            first,
            barred.ctypes.data,
            barred.shape[1],
            best.logits.size(1),
            best.logits.data_ptr(),
            best.tokens.data_ptr(),
            best.largest.data_ptr(),
            best.sums.data_ptr(),
        )
