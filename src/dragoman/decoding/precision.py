"""The form that a model decodes in: packed for this machine's cores where that is possible, in a precision by choice.

float32 is what every promise is made for. bfloat16 and int8 keep these: a batch and its order change nothing but
rounding, and scores can be recomputed in the same precision. They do not keep the translations of float32.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from dragoman.decoding.continuous import ContinuousDecoder
from dragoman.decoding.ensemble import Ensemble
from dragoman.errors import ConfigError
from dragoman.model.native.calls import Precision
from dragoman.model.packed_weights import PackedWeights, can_pack

PRECISIONS = ("float32", "bfloat16", "int8")


class Prepared:
    """A model in the form that it decodes in, made when first asked for and again when its weights have changed."""

    def __init__(self, model: Any, precision: str) -> None:
        """Raises ConfigError for a precision that is not known."""
        if precision not in PRECISIONS:
            raise ConfigError(f"precision {precision!r} is unknown: one of {', '.join(PRECISIONS)}")
        self.model = model
        self.precision = precision
        self._form: Any = None
        self._made_from: tuple[int, ...] = ()

    def form(self) -> Any:
        """The `Decodable` to search with; the model that was given stays as it is."""
        members = self.model.models if isinstance(self.model, Ensemble) else (self.model,)
        versions = tuple(
            number
            for member in members
            if isinstance(member, nn.Module)
            for parameter in member.parameters()
            for number in (_changes(parameter), parameter.data_ptr())  # changed in place, or replaced
        )
        if self._form is None or versions != self._made_from:
            self._form = prepared(self.model, self.precision)
            self._made_from = versions
        return self._form


def _changes(parameter: Tensor) -> int:
    """How often it was changed in place. What was made under `torch.inference_mode` counts no changes: always 0."""
    return 0 if parameter.is_inference() else parameter._version


def prepared(model: Any, precision: str) -> Any:
    """The model for decoding in `precision`; the one that is given stays as it is."""
    if isinstance(model, Ensemble):
        return Ensemble([prepared(member, precision) for member in model.models])
    if not isinstance(model, nn.Module):
        return model
    if can_pack(model):
        return ContinuousDecoder(PackedWeights(model, cast("Precision", precision)))
    if precision == "bfloat16":
        return copy.deepcopy(model).to(torch.bfloat16).eval()
    if precision == "int8":
        return _in_int8(copy.deepcopy(model).float().eval())
    return model


def _in_int8(model: nn.Module) -> nn.Module:
    """The model with the numbers of int8 in its linear layers, where nothing packs it: no faster than float32."""
    for name, child in model.named_children():
        if type(child) is nn.Linear:
            setattr(model, name, Int8Linear(child))
        else:
            _in_int8(child)
    return model


class Int8Linear(nn.Module):
    """A linear layer of 8 bits: weights with a scale for each output, inputs with one for each row, so that a row's
    result does not depend on its neighbours. Products are exact in float32, their sums to rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.scales = weight.abs().amax(dim=1).clamp(min=1e-12) / 127  # [out]
        self.weight = (weight / self.scales[:, None]).round()  # [out, in], whole numbers
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
        y = nn.functional.linear((x / scale).round(), self.weight) * (scale * self.scales)
        return y if self.bias is None else y + self.bias
