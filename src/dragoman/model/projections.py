"""Linear layers as training computes them: forward, backward and the gradients of the weights, in a given precision.

A `Projection` is one `nn.Linear` or several of the same input, as one matrix product; parameters and their gradients
stay as they are, the product reads a copy in its own precision, made once an update. `LaidOut` computes the same by
native/layers.cpp, one thread at a time, for many lanes. `best_projection` says which of them is the faster here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.model import native
from dragoman.model.native.huge_pages import in_huge_pages

Gradients = tuple[Tensor, Tensor]
"""Of the weights [M, K] and of the bias [M], in float32 or better."""


class Projection:
    """y = x W^T + b with W [M, K] joined of `weights`, b of `biases` (0 where there is none), by PyTorch."""

    name = "torch"

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], dtype: torch.dtype) -> None:
        self.weights, self.biases, self.dtype = list(weights), list(biases), dtype
        self.parameters = [*weights, *(bias for bias in biases if bias is not None)]
        self.sizes = [weight.size(0) for weight in weights]
        self.n_in, self.n_out = weights[0].size(1), sum(self.sizes)
        self.has_bias = any(bias is not None for bias in biases)
        self.multiple = 1 if dtype == torch.float32 else 32
        """Of how many rows their number is best: oneDNN prepares a kernel for each new number in bfloat16."""
        self._prepare()
        self.refresh()

    def _prepare(self) -> None:
        self._shared = len(self.weights) == 1 and self.weights[0].dtype == self.dtype
        self._weight = self.weights[0].new_empty(0 if self._shared else self.n_out, self.n_in, dtype=self.dtype)
        self._bias = self._weight.new_zeros(self.n_out) if self.has_bias else None

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the parameters as they are now."""
        if self._shared:
            self._weight = self.weights[0].detach()
        else:
            for to, weight in zip(self._weight.split_with_sizes(self.sizes), self.weights, strict=True):
                to.copy_(weight)
        self._copy_biases(self._bias)

    def _copy_biases(self, into: Tensor | None) -> None:
        if into is not None:
            for to, bias in zip(into[: self.n_out].split_with_sizes(self.sizes), self.biases, strict=True):
                if bias is not None:
                    to.copy_(bias)

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """x [n, K] -> x W^T + b, or ReLU of that [n, M]."""
        y = F.linear(x, self._weight, self._bias)
        return y.relu_() if relu else y

    def backward(self, grad: Tensor, hidden: Tensor | None = None) -> Tensor:
        """grad [n, M] -> grad W [n, K]; with `hidden` [n, K], what ReLU left: 0 where that is 0."""
        dx = grad @ self._weight
        return dx if hidden is None else torch.ops.aten.threshold_backward(dx, hidden, 0)

    def gradients(self, grad: Tensor, x: Tensor, into: Gradients | None = None) -> Gradients:
        """grad [n, M], x [n, K] -> the gradients of the joined weights and bias, or `into` with them added to it.

        Where there is no bias, what stands in its place means nothing.
        """
        exact = torch.promote_types(grad.dtype, torch.float32)
        bias = grad.sum(0, dtype=exact) if self.has_bias else grad.new_zeros(self.n_out, dtype=exact)
        if into is None:
            return (grad.t() @ x).to(exact), bias
        if grad.dtype == exact:
            into[0].addmm_(grad.t(), x)
        else:
            into[0].add_(grad.t() @ x)
        return into[0], into[1].add_(bias)

    def split(self, gradients: Gradients) -> list[Tensor]:
        """The gradients of `parameters`, one by one."""
        weights, biases = (each.split_with_sizes(self.sizes) for each in gradients)
        return [*weights, *(part for part, bias in zip(biases, self.biases, strict=True) if bias is not None)]


_KINDS = {torch.float32: (0, "float32"), torch.bfloat16: (1, "bfloat16")}


@cache
def _library() -> ctypes.CDLL | None:
    library = native.loaded("layers.cpp")
    if library is None:
        return None
    p, n, i = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    signatures: dict[str, list[Any]] = {"worth_having": [i], "laid_out_size": [i, n, n]}
    signatures["lay_out"] = [i, p, n, n, n, n, p, p]
    for name in ("float32", "bfloat16"):
        signatures[f"multiply_{name}"] = [p, n, n, n, p, n, p, i, p, p]
        signatures[f"gradients_{name}"] = [p, n, p, n, n, n, i, p, p]
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = n if name == "laid_out_size" else i
    return library


class LaidOut(Projection):
    """The same by our own products on the CPU, in one thread, with gradients summed in float32 throughout.

    Weights are float32 parameters, K a multiple of 16 and, where several are joined, even sizes. ValueError
    for others and RuntimeError where the library cannot be had: ask `best_projection`.
    """

    name = "compiled"

    def _prepare(self) -> None:
        library = _library()
        if library is None:
            raise RuntimeError("native/layers.cpp could not be compiled here")
        if self.n_in % 16 or any(size % 2 for size in self.sizes[:-1]):
            raise ValueError(f"cannot lay out weights of {self.n_in} inputs and {self.sizes} outputs")
        if any(parameter.dtype != torch.float32 for parameter in self.parameters):
            raise ValueError("parameters must be float32")
        self.multiple = 1
        self._kind, name = _KINDS[self.dtype]
        self._call = library
        self._multiply: Any = getattr(library, f"multiply_{name}")
        self._gradients: Any = getattr(library, f"gradients_{name}")
        shapes = ((self.n_in, self.n_out), (self.n_out, self.n_in))  # inputs and columns, forward and backward
        sizes = [library.laid_out_size(self._kind, *shape) for shape in shapes]
        panels = in_huge_pages([torch.zeros(size, dtype=torch.int32) for size in sizes])
        self._panels, self._turned_panels = panels
        self._bias = torch.zeros(library.laid_out_size(0, 1, self.n_out)) if self.has_bias else None

    @torch.no_grad()
    def refresh(self) -> None:
        first = 0
        for weight in self.weights:
            held = weight.detach().contiguous()  # kept until it has been read
            self._call.lay_out(
                self._kind, held.data_ptr(), *held.shape, first, self.n_out,
                self._panels.data_ptr(), self._turned_panels.data_ptr(),
            )  # fmt: skip
            first += held.size(0)
        self._copy_biases(self._bias)

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        return self._product(x.contiguous(), self._panels, self.n_out, self._bias, relu, None)

    def backward(self, grad: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self._product(self._in_pairs(grad), self._turned_panels, self.n_in, None, False, hidden)

    def gradients(self, grad: Tensor, x: Tensor, into: Gradients | None = None) -> Gradients:
        grad, x = self._in_pairs(grad), x.contiguous()
        weight, bias = into or (torch.empty(self.n_out, self.n_in), torch.empty(self.n_out))
        if self._gradients(
            grad.data_ptr(), grad.stride(0), x.data_ptr(), x.size(0), self.n_out, self.n_in, int(into is not None),
            weight.data_ptr(), bias.data_ptr(),
        ):  # fmt: skip
            raise MemoryError("no memory for the work space of a gradient")
        return weight, bias

    def _in_pairs(self, grad: Tensor) -> Tensor:
        """The same numbers, with a zero behind each row of an odd number of bfloat16: they are read two at a time."""
        grad = grad.contiguous()
        if self.dtype == torch.float32 or grad.size(1) % 2 == 0:
            return grad
        return F.pad(grad, (0, 1))[:, :-1]

    def _product(
        self, x: Tensor, panels: Tensor, columns: int, bias: Tensor | None, relu: bool, hidden: Tensor | None
    ) -> Tensor:
        out = torch.empty(x.size(0), columns, dtype=self.dtype)
        hidden = None if hidden is None else hidden.contiguous()
        bias_at, hidden_at = (None if each is None else each.data_ptr() for each in (bias, hidden))
        self._multiply(
            x.data_ptr(), x.stride(0), *x.shape, panels.data_ptr(), columns, bias_at, int(relu), hidden_at,
            out.data_ptr(),
        )  # fmt: skip
        return out


def best_projection(dtype: torch.dtype) -> type[Projection]:
    """What is faster on this processor for one thread, and can be had."""
    library = _library() if dtype in _KINDS else None
    return LaidOut if library is not None and library.worth_having(_KINDS[dtype][0]) else Projection
