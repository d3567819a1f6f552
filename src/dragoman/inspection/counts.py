"""How many parameters a model has, and where. A tensor that is used twice counts once."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn


@dataclass
class Part:
    """The parameters at one place of the model; layers that are alike make one part."""

    name: str
    """A path in the model, with * for the number of the layer: `encoder.layers.*.self_attention`."""
    copies: set[str] = field(default_factory=set)
    """The layers that have it; one entry where there is no layer in its path."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The tensors of one copy: name within the part -> shape."""
    parameters: int = 0
    """Of all copies together."""


@dataclass(frozen=True)
class ParameterTable:
    """All parts in the order of the model, and what is tied."""

    parts: list[Part]
    tied: dict[str, str]
    """Names under which a tensor is met again -> its first name (§3.4: the softmax is the embedding)."""

    @property
    def total(self) -> int:
        return sum(part.parameters for part in self.parts)


def parameter_table(model: nn.Module) -> ParameterTable:
    """Count the parameters of any model by part."""
    parts: dict[str, Part] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
            continue
        first[id(parameter)] = name
        part_name, copy, leaf = split_name(name)
        part = parts.setdefault(part_name, Part(part_name))
        part.copies.add(copy)
        part.shapes.setdefault(leaf, tuple(parameter.shape))
        part.parameters += parameter.numel()
    return ParameterTable(list(parts.values()), tied)


def split_name(name: str) -> tuple[str, str, str]:
    """`encoder.layers.3.self_attention.q.weight` -> (`encoder.layers.*.self_attention`, `3`, `q.weight`)."""
    pieces = name.split(".")
    numbers = [i for i, piece in enumerate(pieces) if piece.isdigit()]
    if numbers and numbers[0] + 2 < len(pieces):
        at = numbers[0]
        return ".".join([*pieces[:at], "*", pieces[at + 1]]), pieces[at], ".".join(pieces[at + 2 :])
    return ".".join(pieces[:-1]) or pieces[-1], "", pieces[-1]
