"""Muon: the update of a matrix is its momentum with all singular values near 1 (Jordan and others, 2024).

Adam scales each entry by its own history, so a few directions of a matrix can take most of an update. Made orthogonal,
every direction that the gradient has is walked equally far, and a model of the same size needs fewer updates. The
price is products of matrices: here they are cut into blocks of a few rows, each made orthogonal for itself. A block of
m of n rows in place of the whole takes m / n of the operations or fewer.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.model import native

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial that is applied to the singular values again and again (Jordan and others, 2024): chosen so
that small ones grow quickly, at the price that they end between 0.68 and 1.14 and not at 1."""
STEPS = 5
"""How often: a singular value that is a five-hundredth of all is then among them."""
RMS = 0.2
"""Of the entries of an update at a rate of 1, that of a usual update of Adam: so both take the same rates (Liu and
others, "Muon is Scalable for LLM Training", arXiv:2502.16982, §2.2)."""


def orthogonal(x: Tensor) -> Tensor:
    """[N, m, n] with m <= n -> [N, m, n]: U V^T of each matrix's singular value decomposition U S V^T, nearly.

    A Newton-Schulz iteration x <- p(x x^T) x, with all steps taken on the m x m product: that all its powers commute
    leaves one product with x at the beginning and one at the end. Zero rows stay zero. In float32, whose precision the
    squares of small singular values need.
    """
    a, b, c = COEFFICIENTS
    gram = torch.bmm(x, x.mT)
    size = gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp_min(torch.finfo(torch.float32).tiny)
    gram = gram / size  # now no singular value is above 1
    whole = factor = _polynomial(gram, a, b, c)
    for _ in range(STEPS - 1):
        gram = torch.bmm(torch.bmm(gram, factor), factor)
        factor = _polynomial(gram, a, b, c)
        whole = torch.bmm(factor, whole)
    return torch.bmm(whole / size.sqrt(), x)


def _polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """a I + b gram + c gram^2, of [N, m, m]."""
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    result.diagonal(dim1=1, dim2=2).add_(a)
    return result


class MuonWithAdam(torch.optim.AdamW):
    """Muon for the groups of parameters that have a `momentum` and a `block`, AdamW for the others."""

    def __init__(self, groups: list[dict[str, Any]], **of_adam: Any) -> None:
        super().__init__(groups, **of_adam)
        self._threads = torch.get_num_threads()  # within an update of lanes PyTorch is told to take one
        if any(p.device.type == "cpu" for group in self.param_groups for p in group["params"]):
            _compiled()  # now, and not within the first update

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient; the gradients of Muon's are used up."""
        assert closure is None
        for group in self.param_groups:
            if "momentum" in group:
                matrices = [p for p in group["params"] if p.grad is not None]
                for matrix in matrices:
                    if not self.state[matrix]:
                        self.state[matrix]["momentum"] = torch.zeros_like(matrix)
                compiled = [matrix for matrix in matrices if _is_for_compiled(matrix)]
                others = [matrix for matrix in matrices if not _is_for_compiled(matrix)]
                self._step_compiled(group, compiled)
                self._step_by_pytorch(group, others)
                for matrix in matrices:
                    matrix.grad = None  # AdamW passes by what has none
        super().step()

    def _step_compiled(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        """By native/muon.c, a share of every matrix's blocks to each thread: blocks know nothing of each other."""
        if not matrices:
            return
        threads = self._threads
        keep = 1.0 - group["lr"] * group["weight_decay"]

        def share(thread: int) -> None:
            torch.set_flush_denormal(True)  # of this thread: momenta of units that are never active fade away
            for matrix in matrices:
                n, rows = sorted(matrix.shape)
                block = min(group["block"], n)
                blocks = -(-rows // block)
                first, last = thread * blocks // threads, (thread + 1) * blocks // threads
                steps = (n, 1) if _is_tall(matrix) else (1, rows)
                tensors = (matrix.grad, self.state[matrix]["momentum"], matrix)
                pointers = [tensor.data_ptr() for tensor in tensors if tensor is not None]
                rate = group["lr"] * RMS * math.sqrt(n)
                numbers = (group["momentum"], keep, rate, STEPS, *COEFFICIENTS)
                if _compiled()(first, last, block, rows, n, *steps, *pointers, *numbers):
                    raise MemoryError("no memory for the work space of muon_step")

        list(_pool(threads).map(share, range(threads)))
        for matrix in matrices:
            torch.autograd.graph.increment_version(matrix)  # as if PyTorch had written it

    def _step_by_pytorch(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        if not matrices:
            return
        momenta = [self.state[matrix]["momentum"] for matrix in matrices]
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1.0 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])  # as Nesterov's
        if group["weight_decay"]:
            torch._foreach_mul_(matrices, 1.0 - group["lr"] * group["weight_decay"])
        alike = defaultdict(list)
        for matrix, direction in zip(matrices, ahead, strict=True):
            blocks = _blocks(direction, group["block"])
            alike[blocks.shape[1:]].append((matrix, blocks))
        for (_, n), those in alike.items():
            updates = orthogonal(torch.cat([blocks for _, blocks in those]))
            for (matrix, _), update in zip(those, updates.split([len(blocks) for _, blocks in those]), strict=True):
                rows = update.reshape(-1, n)[: max(matrix.shape)]
                matrix.add_(rows if _is_tall(matrix) else rows.mT, alpha=-group["lr"] * RMS * math.sqrt(n))


@cache
def _compiled() -> Any:
    """`muon_step` of native/muon.c, or None where it cannot be had."""
    library = native.loaded("muon.c")
    if library is None:
        return None
    p, n, i, f = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
    library.muon_step.argtypes = [n, n, n, n, n, n, n, p, p, p, f, f, f, i, f, f, f]
    library.muon_step.restype = i
    return library.muon_step


def _is_for_compiled(matrix: Tensor) -> bool:
    tensors = (matrix, matrix.grad)
    return _compiled() is not None and all(
        x is not None and x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() for x in tensors
    )


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="muon")


def _is_tall(matrix: Tensor) -> bool:
    return matrix.size(0) >= matrix.size(1)


def _blocks(matrix: Tensor, rows: int) -> Tensor:
    """[M, N] -> [blocks, rows, n]: cut along its longer side; the last block may end in rows of zeros.

    Never more rows than columns, for those could not be orthogonal.
    """
    tall = matrix if _is_tall(matrix) else matrix.mT
    rows = min(rows, tall.size(1))
    missing = -tall.size(0) % rows
    return (F.pad(tall, (0, 0, 0, missing)) if missing else tall).reshape(-1, rows, tall.size(1))
