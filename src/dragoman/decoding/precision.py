"""The number formats that a model can be run in. float32 is the one that every promise is made for."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

from dragoman.errors import ConfigError

PRECISIONS = ("float32", "bfloat16", "int8")


def converted(model: Any, precision: str) -> Any:
    """The model for inference in `precision`; the one that is given stays as it is. Raises ConfigError."""
    if precision == "float32":
        return model
    if precision == "bfloat16":
        return copy.deepcopy(model).to(torch.bfloat16).eval()
    if precision == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module's own talk of where it will move
            return torch.ao.quantization.quantize_dynamic(model.float().eval(), {nn.Linear}, dtype=torch.qint8)
    raise ConfigError(f"precision {precision!r} is unknown: one of {', '.join(PRECISIONS)}")
