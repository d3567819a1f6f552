"""float32, bfloat16 and float16: which one, where it applies, and the scale that float16 needs.

Weights, optimiser and losses stay in float32; the lower precisions are for matrix products (autocast).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dragoman.errors import TrainingError
from dragoman.training.options import Precision

Chosen = Literal["float32", "bfloat16", "float16"]


def choose(precision: Precision, device: torch.device) -> Chosen:
    """What a run computes in. `auto` is bfloat16 where the device multiplies it fast, and float32 elsewhere.

    Raises TrainingError for a precision that the device does not have.
    """
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if precision == "bfloat16" and not has_bfloat16:
            raise TrainingError(
                f"{torch.cuda.get_device_name(device)} does not compute in bfloat16; "
                'set training.precision = "float16" or "float32"'
            )
        if precision == "auto":
            return "bfloat16" if has_bfloat16 else "float16"
        return precision
    if precision == "float16":
        raise TrainingError('float16 training needs a GPU; on a CPU set training.precision = "bfloat16" or "float32"')
    if precision == "auto":
        return "bfloat16" if _cpu_multiplies_bfloat16() else "float32"
    return precision


def _cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products (AVX-512 BF16 or AMX)."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return False
    return "AVX512" in capabilities and ("avx512_bf16" in flags or "amx_bf16" in flags)


def autocast(chosen: Chosen, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The block in which matrix products are computed in `chosen`."""
    if chosen == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if chosen == "bfloat16" else torch.float16)


@dataclass
class LossScale:
    """Multiplies the loss so that small gradients do not vanish in float16; 1 and idle in the other precisions.

    It halves when a gradient overflows and doubles after `patience` updates that did not (Micikevicius et al. 2017,
    arXiv:1710.03740).
    """

    value: float = 1.0
    good: int = 0
    """Updates since the scale last changed."""
    active: bool = False
    patience: int = 2000
    least: float = 2.0**-14

    @classmethod
    def of(cls, chosen: Chosen) -> LossScale:
        """The scale that a precision starts with."""
        return cls(value=2.0**15, active=True) if chosen == "float16" else cls()

    def update(self, finite: bool) -> bool:
        """Learn whether an update was finite. True: it was an overflow that a smaller scale may cure."""
        if not self.active:
            return False
        if finite:
            self.good += 1
            if self.good >= self.patience:
                self.value, self.good = self.value * 2.0, 0
            return False
        self.value, self.good = self.value / 2.0, 0
        return self.value >= self.least
