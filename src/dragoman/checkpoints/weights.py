"""Tensors in safetensors files: each storage once, tied names remembered, and nothing that could run code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dragoman.checkpoints.atomic import replacing
from dragoman.errors import ModelError


def unique(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, under its first name, and for every further name of the same memory that first name."""
    first: dict[tuple[object, ...], str] = {}
    once: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            once[name] = tensor
    return once, tied


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors`, tied ones once, atomically. Raises ModelError where the disk is full or the folder read-only."""
    once, tied = unique(tensors)
    notes = {"format": "pt", **(metadata or {})}
    if tied:
        notes["tied"] = json.dumps(tied)
    with replacing(path) as temporary:
        save_file({name: t.detach().contiguous().cpu() for name, t in once.items()}, temporary, notes)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, tied names included, and its metadata.

    Raises ModelError where the file is missing, truncated or not safetensors; pickled files are never opened.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except SafetensorError as error:
        size = path.stat().st_size
        raise ModelError(
            f"{path} is damaged or cut short ({size:,} bytes: {error}); take an intact copy of it"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    for name, first in json.loads(metadata.get("tied", "{}")).items():
        if first in tensors:
            tensors.setdefault(name, tensors[first])
    return tensors, metadata


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], where: str, vocabulary: str = "") -> None:
    """Copy `tensors` into the weights of `model`, which keep their precision. Raises ModelError with every mismatch.

    `vocabulary`: how the message names the model's vocabulary where a tensor differs in its first dimension only.
    """
    own = model.state_dict()
    _, tied = unique(own)
    problems = []
    for name, target in own.items():
        if name in tied and name not in tensors:
            continue  # its first name answers for it
        given = tensors.get(name)
        if given is None:
            partners = [other for other, first in tied.items() if first == name]
            if not any(other in tensors for other in partners):
                problems.append(f"{where} lacks the tensor {name} of shape {list(target.shape)}")
        elif given.shape != target.shape:
            what = f"{where}: {name} has the shape {list(given.shape)}, and the model wants {list(target.shape)}"
            if vocabulary and given.shape[1:] == target.shape[1:]:
                what += (
                    f": it was trained with a vocabulary of {given.shape[0]}, and {vocabulary} has {target.shape[0]}"
                )
            problems.append(what)
        elif name in tied and tied[name] in tensors and not torch.equal(given, tensors[tied[name]]):
            problems.append(f"{where}: {name} and {tied[name]} are one matrix in this model, but differ in the file")
    problems += [f"{where} has a tensor {name} that the model does not know" for name in tensors if name not in own]
    if problems:
        raise ModelError(problems)
    with torch.no_grad():
        for name, target in own.items():
            if (given := tensors.get(name)) is not None:
                target.copy_(given)
