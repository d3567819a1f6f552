"""Forward and backward on all cores of a CPU: one thread a lane, each with a share of every batch.

Two threads that each compute half of a batch alone finish sooner than one batch whose every operation is cut in two,
for between operations nobody waits. Gradients are summed lane by lane in a fixed order and each lane draws its dropout
from (seed, batch, lane), so the result is a function of parameters, batches, seed and the number of lanes, as long as
the machine and its number of threads stay the same: they decide which matrix products are the faster.

    lanes = Lanes(model, n=2, precision="bfloat16")
    loss_sum, nll_sum = lanes.gradients(batches, n_tokens, seed=step, label_smoothing=0.1)
    optimizer.step()                                 # .grad of every parameter is that of loss_sum / n_tokens
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.model.fused import Joined, features
from dragoman.model.kernels import Bits, Kernels
from dragoman.model.projections import Projection
from dragoman.model.transformer import Transformer
from dragoman.training.loss import Convention, projected_loss

Precision = Literal["float32", "bfloat16"]
Result = TypeVar("Result")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Padded(Protocol):
    """What a lane reads of a batch (batches/batch.py), padded at the right."""

    @property
    def src(self) -> Tensor: ...  # [B, S]
    @property
    def tgt_in(self) -> Tensor: ...  # [B, T]
    @property
    def tgt_out(self) -> Tensor: ...  # [B, T]


class Lanes:
    """The gradients of a 2017 model on the CPU.

    `n` lanes, by default as many as PyTorch has threads. The model's parameters stay float32 and its own; each call
    copies them once into the precision and the layout of the products. Close it, or use it in a `with`, to end its
    threads.
    """

    def __init__(
        self,
        model: Transformer,
        n: int | None = None,
        precision: Precision = "float32",
        kernels: Kernels | None = None,
    ) -> None:
        self.model = model
        self.n = torch.get_num_threads() if n is None else n
        if self.n < 1:
            raise ValueError(f"there must be at least one lane, not {self.n}")
        if precision not in DTYPES:
            raise ValueError(f"precision must be float32 or bfloat16, not {precision!r}")
        self._threads = max(torch.get_num_threads() // self.n, 1)
        # Our own products are for lanes of one thread each; PyTorch's share theirs among several.
        self._joined = Joined(model, DTYPES[precision], kernels, Projection if self._threads > 1 else None)
        self.kernels = self._joined.kernels
        self.products = self._joined.vocabulary.name
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._pool = ThreadPoolExecutor(self.n, thread_name_prefix="lane")
        keep_large_blocks()

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def gradients(
        self,
        batches: Sequence[Padded],
        n_tokens: int,
        seed: int = 0,
        label_smoothing: float = 0.1,
        convention: Convention = "paper",
        r_drop: float = 0.0,
    ) -> tuple[float, float]:
        """Sets `.grad` of every parameter to that of loss_sum / n_tokens, and returns (loss_sum, nll_sum).

        `batches` are the micro-batches of one update on this machine; `n_tokens` the real targets of the whole update,
        on all machines. Dropout follows the model's mode: `model.train()` has it. With `r_drop` each row is
        computed twice, with masks of its own each time (`r_drop_cross_entropy`). Where a loss is not finite the
        gradients are not either: look before the optimiser steps.
        """
        threads = torch.get_num_threads()
        try:
            self._each(lambda lane: self._joined.refresh(lane, self.n))
            results = self._each(
                lambda lane: self._lane(lane, batches, n_tokens, seed, label_smoothing, convention, r_drop)
            )
            total, *others = [gradients for gradients, _, _ in results if gradients]
            self._each(lambda lane: _add(total[lane :: self.n], [gradients[lane :: self.n] for gradients in others]))
        finally:
            torch.set_num_threads(threads)  # a lane's own setting reaches parts of PyTorch that are not its own
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient
        return sum(loss for _, loss, _ in results), sum(nll for _, _, nll in results)

    def _each(self, work: Callable[[int], Result]) -> list[Result]:
        """What every lane makes of its number, in the lanes' order; of errors, that of the first lane which has one."""

        def in_lane(lane: int) -> Result:
            torch.set_num_threads(self._threads)  # of this thread
            torch.set_flush_denormal(True)
            return work(lane)

        jobs = [self._pool.submit(in_lane, lane) for lane in range(self.n)]
        wait(jobs)
        return [job.result() for job in jobs]

    def _lane(
        self,
        lane: int,
        batches: Sequence[Padded],
        n_tokens: int,
        seed: int,
        label_smoothing: float,
        convention: Convention,
        r_drop: float,
    ) -> tuple[list[Tensor], float, float]:
        """The share of one lane: every n-th row of every batch."""
        model, joined = self.model, self._joined
        total: list[Tensor] = []
        loss_sum = nll_sum = 0.0
        for number, batch in enumerate(batches):
            src, tgt_in, tgt_out = (x[lane :: self.n] for x in (batch.src, batch.tgt_in, batch.tgt_out))
            if not src.size(0):
                continue
            bits = Bits(seed, number, lane) if model.training else None
            if r_drop:
                src, tgt_in, tgt_out = (torch.cat([x, x]) for x in (src, tgt_in, tgt_out))
            real = tgt_out != model.pad_id
            x, index, n = features(model, joined, src, tgt_in, src != model.pad_id, real, bits)  # [n, D]
            targets = tgt_out.flatten()[index]
            targets[n:] = model.pad_id
            if r_drop:
                # Each pass with a round number of rows, for products that want few different sizes.
                extra = -(n // 2) % joined.vocabulary.multiple
                x = F.pad(x[:n].unflatten(0, (2, -1)), (0, 0, 0, extra)).flatten(0, 1)
                targets = F.pad(targets[: n // 2], (0, extra), value=model.pad_id)
            loss, nll = projected_loss(
                x,
                model.generator.weight,
                model.generator.bias,
                targets,
                label_smoothing,
                model.pad_id,
                convention,
                r_drop=r_drop,
                projection=joined.vocabulary,
                kernels=joined.kernels,
            )
            gradients = list(torch.autograd.grad(loss, self._parameters, loss.new_tensor(1.0 / n_tokens)))
            if total:
                torch._foreach_add_(total, gradients)
            else:
                total = gradients
            loss_sum, nll_sum = loss_sum + loss.item(), nll_sum + nll.item()
        return total, loss_sum, nll_sum


def _add(total: list[Tensor], others: list[list[Tensor]]) -> None:
    for gradients in others:
        if gradients:
            torch._foreach_add_(total, gradients)


def keep_large_blocks() -> bool:
    """Tell glibc's malloc to keep freed blocks for the next step instead of handing them back to the system.

    By default each tensor above 32 MB, and much of what threads free, is unmapped and then faulted in again page by
    page. True where it could be told; elsewhere it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8  # <malloc.h>
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    told = [mallopt(arena_max, 1), mallopt(mmap_threshold, 32 << 20), mallopt(trim_threshold, (2 << 30) - 1)]
    return all(told) and bool(mallopt(top_pad, 64 << 20))
