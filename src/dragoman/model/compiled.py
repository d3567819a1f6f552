"""The C kernels of native/training.c: compiled by the machine's own compiler on first use, called through ctypes.

Nothing depends on them: without a C compiler, or on a processor where the compiler makes no good of them, `load`
returns None and training runs on `kernels.Kernels`. The library is kept in the user's cache folder under the hash of
source, compiler and processor, so that the two seconds of compiling are spent once.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dragoman.model import native
from dragoman.model.kernels import AttentionShape, Dropout, Kernels


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class CompiledKernels(Kernels):
    """The same numbers as `Kernels` to rounding; ctypes lets go of the interpreter lock, so lanes run side by side."""

    name = "compiled"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {
            torch.float32: self._bind(library, "float32"),
            torch.bfloat16: self._bind(library, "bfloat16"),
        }

    @staticmethod
    def _bind(library: ctypes.CDLL, suffix: str) -> dict[str, Any]:
        p, n, i, f = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
        heads = [n, n, n, n, p, p, p, p, n, n, i, f, p, n, p, n, p, n]
        signatures = {
            "residual_norm_forward": [n, n, p, p, p, i, f, p, p, f, p, p, p, p],
            "residual_norm_backward": [n, n, p, p, p, i, f, p, p, p, p, p, p, p],
            "embed_forward": [n, n, p, p, p, p, f, p, i, f, p],
            "embed_backward": [n, n, p, f, p, i, f, p, p],
            "attention_forward": [*heads, p, n, p],
            "attention_backward": [*heads, p, p, n, p, n, p, n, p, n],
            "smoothed_loss": [n, n, p, p, n, f, f, n, p],
            "r_drop_loss": [n, n, p, p, p, n, f, f, n, f, p],
        }
        functions = {}
        for name, arguments in signatures.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes = arguments
            function.restype = i
            functions[name] = function
        return functions

    def _call(self, name: str, dtype: torch.dtype, *arguments: Any) -> None:
        if self._functions[dtype][name](*arguments):
            raise MemoryError(f"no memory for the work space of {name}")

    def fits(self, *widths: int) -> bool:
        """Rows are read sixteen numbers at a time."""
        return all(width % 16 == 0 for width in widths)

    def residual_norm(
        self, x: Tensor, y: Tensor, bits: Tensor | None, dropout: Dropout, gamma: Tensor, beta: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, y = x.contiguous(), y.contiguous()
        n, d = x.shape
        z, out = torch.empty_like(x), torch.empty_like(x)
        mean, rstd = torch.empty(n), torch.empty(n)
        self._call(
            "residual_norm_forward", x.dtype, n, d, _pointer(x), _pointer(y), _pointer(bits), dropout.threshold,
            dropout.scale, _pointer(gamma), _pointer(beta), eps, _pointer(z), _pointer(out), _pointer(mean),
            _pointer(rstd),
        )  # fmt: skip
        return out, z, mean, rstd

    def residual_norm_backward(
        self,
        grad: Tensor,
        z: Tensor,
        bits: Tensor | None,
        dropout: Dropout,
        gamma: Tensor,
        beta: Tensor,
        mean: Tensor,
        rstd: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad = grad.contiguous()
        n, d = grad.shape
        dx = torch.empty_like(grad)
        dy = dx if bits is None else torch.empty_like(grad)
        dgamma, dbeta = torch.zeros(d), torch.zeros(d)
        self._call(
            "residual_norm_backward", grad.dtype, n, d, _pointer(grad), _pointer(z), _pointer(bits), dropout.threshold,
            dropout.scale, _pointer(gamma), _pointer(mean), _pointer(rstd), _pointer(dx), _pointer(dy),
            _pointer(dgamma), _pointer(dbeta),
        )  # fmt: skip
        return dx, dy, dgamma, dbeta

    def embed(
        self,
        tokens: Tensor,
        positions: Tensor,
        table: Tensor,
        sinusoids: Tensor,
        factor: float,
        bits: Tensor | None,
        dropout: Dropout,
        dtype: torch.dtype,
    ) -> Tensor:
        _check_indices(tokens, table.size(0))
        out = torch.empty(tokens.numel(), table.size(1), dtype=dtype)
        self._call(
            "embed_forward", dtype, *out.shape, _pointer(tokens), _pointer(positions), _pointer(table),
            _pointer(sinusoids), factor, _pointer(bits), dropout.threshold, dropout.scale, _pointer(out),
        )  # fmt: skip
        return out

    def embed_backward(
        self, grad: Tensor, tokens: Tensor, rows: int, factor: float, bits: Tensor | None, dropout: Dropout
    ) -> Tensor:
        grad = grad.contiguous()
        out = torch.zeros(rows, grad.size(1))
        self._call(
            "embed_backward", grad.dtype, *grad.shape, _pointer(tokens), factor, _pointer(bits), dropout.threshold,
            dropout.scale, _pointer(grad), _pointer(out),
        )  # fmt: skip
        return out

    @staticmethod
    def _shape(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> tuple[Any, ...]:
        return (
            shape.queries.length.numel(), shape.n_heads, shape.d_k, shape.d_v,
            _pointer(shape.queries.start), _pointer(shape.queries.length),
            _pointer(shape.keys.start), _pointer(shape.keys.length),
            shape.queries.widest, shape.keys.widest, int(shape.causal), shape.d_k**-0.5,
            _pointer(q), q.stride(0), _pointer(k), k.stride(0), _pointer(v), v.stride(0),
        )  # fmt: skip

    def attention(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, out: Tensor) -> Tensor:
        lse = torch.empty(q.size(0), shape.n_heads)
        self._call(
            "attention_forward", q.dtype, *self._shape(q, k, v, shape), _pointer(out), out.stride(0), _pointer(lse)
        )
        return lse

    def attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, shape: AttentionShape, into: list[Tensor]
    ) -> None:
        steps = [x for to in into for x in (_pointer(to), to.stride(0))]
        self._call(
            "attention_backward", q.dtype, *self._shape(q, k, v, shape), _pointer(lse), _pointer(grad),
            grad.stride(0), *steps,
        )  # fmt: skip

    def smoothed_loss(
        self, logits: Tensor, targets: Tensor, pad_id: int, on: float, off: float, never: int | None
    ) -> tuple[float, float]:
        targets = targets.contiguous()
        _check_indices(targets, logits.size(1))
        sums = torch.zeros(2, dtype=torch.float64)
        self._call(
            "smoothed_loss", logits.dtype, *logits.shape, _pointer(logits), _pointer(targets), pad_id, on, off,
            -1 if never is None else never, _pointer(sums),
        )  # fmt: skip
        return float(sums[0]), float(sums[1])

    def r_drop_loss(
        self,
        first: Tensor,
        second: Tensor,
        targets: Tensor,
        pad_id: int,
        on: float,
        off: float,
        never: int | None,
        alpha: float,
    ) -> tuple[float, float]:
        targets = targets.contiguous()
        _check_indices(targets, first.size(1))
        sums = torch.zeros(2, dtype=torch.float64)
        self._call(
            "r_drop_loss", first.dtype, *first.shape, _pointer(first), _pointer(second), _pointer(targets), pad_id, on,
            off, -1 if never is None else never, alpha, _pointer(sums),
        )  # fmt: skip
        return float(sums[0]), float(sums[1])


def _check_indices(indices: Tensor, n: int) -> None:
    """IndexError as PyTorch would raise it: C would read on past the table."""
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < n):
        raise IndexError(f"token {int(indices.max())} or {int(indices.min())} is not one of a vocabulary of {n}")


@cache
def load() -> CompiledKernels | None:
    """The C kernels, or None where they cannot be had. Never raises: they are only a matter of speed."""
    library = native.loaded("training.c")
    try:
        return None if library is None else CompiledKernels(library)
    except AttributeError:
        return None


def best_kernels(*widths: int) -> Kernels:
    """The C kernels where they can be had and rows of these widths fit them, else those of PyTorch."""
    native = load()
    return native if native is not None and native.fits(*widths) else Kernels()
