"""A model folder: `config.toml`, the tokenizer and `weights.safetensors`; it is enough to translate, wherever it lies.

Loading runs no code from the folder: TOML, JSON, SentencePiece's own format and safetensors, never pickle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import nn

from dragoman import config as toml
from dragoman.checkpoints.atomic import write_file
from dragoman.checkpoints.weights import load_into, load_tensors, save_tensors
from dragoman.errors import ConfigError, ModelError
from dragoman.model.choices import ModelSpec
from dragoman.tokens.tokenizer import Tokenizer, load_tokenizer

FORMAT_VERSION = 1
CONFIG = "config.toml"
WEIGHTS = "weights.safetensors"
METRICS = "metrics.jsonl"
TRAINING = "training"


@dataclass(frozen=True)
class _ModelSection:
    """The one part of `config.toml` that loading needs; the rest belongs to other stations."""

    model: ModelSpec


@dataclass(frozen=True)
class Loaded:
    """What a model folder holds, ready to use; the model is in evaluation mode."""

    model: Any
    """The module: a `Decodable` with `forward`."""
    tokenizer: Tokenizer
    config: toml.Tree
    """`config.toml` as tables: `data`, `tokenizer`, `model`, `training`, `decoding`."""
    spec: ModelSpec
    """`[model]`, checked."""
    notes: Mapping[str, str]
    """What the weights say of themselves, such as `average_of`."""


def save_model(
    folder: str | Path, model: nn.Module, tokenizer: Tokenizer, config: Any, notes: Mapping[str, str] | None = None
) -> None:
    """Write a model folder, each file whole or not at all. `config`: a RunConfig, or its tables.

    `notes` go into the metadata of the weights. Raises ModelError where the folder cannot be written.
    """
    folder = Path(folder)
    prepare(folder, tokenizer, config)
    save_weights(folder / WEIGHTS, model, notes)


def prepare(folder: Path, tokenizer: Tokenizer, config: Any) -> None:
    """Write all of a model folder but its weights."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder} cannot be made: {error.strerror}") from None
    tree = toml.tree_of(config) if dataclasses.is_dataclass(config) else dict(config)
    tree = {"format_version": FORMAT_VERSION, **{key: value for key, value in tree.items() if key != "format_version"}}
    write_file(folder / CONFIG, tomli_w.dumps(tree).encode())
    try:
        tokenizer.save(folder)
    except OSError as error:
        raise ModelError(f"{folder}: the tokenizer cannot be written: {error.strerror}") from None


def save_weights(path: Path, model: nn.Module, notes: Mapping[str, str] | None = None) -> None:
    """Write the weights of `model`, tied ones once."""
    save_tensors(path, model.state_dict(), {"format_version": str(FORMAT_VERSION), **(notes or {})})


def read_config(folder: str | Path) -> toml.Tree:
    """`config.toml` of a model folder as tables. Raises ModelError where it is no model folder or a newer one."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ModelError(f"{folder} {what}; a model is a folder with {CONFIG}, a tokenizer and {WEIGHTS}")
    if not (folder / CONFIG).exists():
        raise ModelError(f"{folder} has no {CONFIG}, so it is not a model folder")
    try:
        tree = toml.read_toml(folder / CONFIG)
    except ConfigError as error:
        raise ModelError(error.problems) from None
    version = tree.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ModelError(
            f"{folder / CONFIG} has format_version {version!r}, and this dragoman reads up to {FORMAT_VERSION}: "
            "a newer version wrote it; upgrade with pip install -U dragoman"
        )
    return tree


def load_model(folder: str | Path, device: str | torch.device = "cpu") -> Loaded:
    """The model of a folder, on `device`, in evaluation mode. Raises ModelError with all that is wrong with it."""
    folder = Path(folder)
    tree = read_config(folder)
    spec = spec_of(tree, folder)
    tokenizer = load_tokenizer(folder)
    tensors, notes = load_tensors(folder / WEIGHTS)
    model = empty_model(spec, tokenizer)
    load_into(model, tensors, str(folder / WEIGHTS), f"the tokenizer in {folder}")
    return Loaded(model.to(device).eval(), tokenizer, tree, spec, notes)


def spec_of(tree: toml.Tree, folder: Path) -> ModelSpec:
    """The `[model]` table of a model folder's config, checked."""
    if "model" not in tree:
        raise ModelError(f"{folder / CONFIG} has no [model] table")
    try:
        return toml.build(_ModelSection, {"model": tree["model"]}, where=str(folder / CONFIG)).model
    except ConfigError as error:
        raise ModelError(error.problems) from None


def empty_model(spec: ModelSpec, tokenizer: Tokenizer) -> nn.Module:
    """A model whose weights are about to be loaded: the random state of the caller is left as it was."""
    with torch.random.fork_rng(devices=[]):
        return spec.build(len(tokenizer), tokenizer.pad_id)
