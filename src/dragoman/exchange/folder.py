"""Reading a Hugging Face folder without running anything in it: JSON and safetensors, in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dragoman.checkpoints.weights import load_tensors
from dragoman.errors import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "rust_model.ot")


def read_json(path: Path, problems: list[str], required: bool = True) -> dict[str, Any]:
    """The object in a JSON file, or an empty one; what is wrong is added to `problems`."""
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        if required:
            problems.append(f"{path} is missing")
        return {}
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
        return {}
    except ValueError as error:
        problems.append(f"{path} is not JSON: {error}")
        return {}
    if not isinstance(tree, dict):
        problems.append(f"{path} should hold a JSON object, not a {type(tree).__name__}")
        return {}
    return tree


def read_bytes(path: Path, problems: list[str]) -> bytes:
    """The content of a file, or nothing; what is wrong is added to `problems`."""
    try:
        return path.read_bytes()
    except OSError as error:
        problems.append(f"{path} is missing" if not path.exists() else f"{path} cannot be read: {error.strerror}")
        return b""


def read_tensors(folder: Path, problems: list[str]) -> dict[str, Tensor] | None:
    """All tensors of a folder, or None where some could not be read; what is wrong is added to `problems`."""
    before = len(problems)
    tensors: dict[str, Tensor] = {}
    for file, names in _files(folder, problems).items():
        if not (folder / file).exists():
            problems.append(f"{folder / file} is missing, which {INDEX} names for {len(names)} tensors")
            continue
        try:
            found, _ = load_tensors(folder / file)
        except ModelError as error:
            problems.extend(error.problems)
            continue
        absent = [name for name in names if name not in found]
        if absent:
            problems.append(f"{folder / file} lacks {_some(absent)}, which {INDEX} places there")
        tensors |= found
    return tensors if len(problems) == before else None


def _files(folder: Path, problems: list[str]) -> Mapping[str, list[str]]:
    """File -> the tensors that it must hold, as far as somebody says."""
    if (folder / WEIGHTS).exists():
        return {WEIGHTS: []}
    if (folder / INDEX).exists():
        files: dict[str, list[str]] = {}
        places = read_json(folder / INDEX, problems).get("weight_map")
        if not isinstance(places, dict) or not places:
            problems.append(f"{folder / INDEX} has no weight_map")
            return {}
        for name, file in places.items():
            if Path(str(file)).name != str(file):
                problems.append(f"{folder / INDEX} places {name} in {file!r}, outside the folder")
                return {}
            files.setdefault(str(file), []).append(name)
        return files
    pickles = [name for name in PICKLES if (folder / name).exists()]
    if pickles:
        problems.append(
            f"{folder} has its weights in {pickles[0]} only, which can run code when it is opened: convert it to "
            "safetensors first, as the section 'Models that ship a pickle' of docs/exchange.md shows"
        )
    else:
        problems.append(f"{folder} has no {WEIGHTS} and no {INDEX}")
    return {}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
