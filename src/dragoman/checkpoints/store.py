"""A model folder: `config.toml`, the tokenizer and `weights.safetensors`; it is enough to translate, wherever it lies.

Loading runs no code from the folder: TOML, JSON, SentencePiece's own format and safetensors, never pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import nn

from dragoman.checkpoints.atomic import write_file
from dragoman.checkpoints.weights import load_into, load_tensors, save_tensors
from dragoman.config import tree_of
from dragoman.errors import ConfigError, ModelError
from dragoman.model.choices import ModelSpec
from dragoman.run import FORMAT_VERSION, RunConfig, read_run
from dragoman.tokens.tokenizer import Tokenizer, load_tokenizer

CONFIG = "config.toml"
WEIGHTS = "weights.safetensors"
METRICS = "metrics.jsonl"
TRAINING = "training"


@dataclass(frozen=True)
class Loaded:
    """What a model folder holds, ready to use; the model is in evaluation mode."""

    model: Any
    """The module: a `Decodable` with `forward`."""
    tokenizer: Tokenizer
    config: RunConfig
    """`config.toml`, resolved and complete."""
    notes: Mapping[str, str]
    """What the weights say of themselves, such as `average_of`."""


def save_model(
    folder: str | Path,
    model: nn.Module,
    tokenizer: Tokenizer,
    config: RunConfig,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write a model folder, each file whole or not at all.

    `notes` go into the metadata of the weights. Raises ModelError where the folder cannot be written.
    """
    folder = Path(folder)
    prepare(folder, tokenizer, config)
    save_weights(folder / WEIGHTS, model, notes)


def prepare(folder: Path, tokenizer: Tokenizer, config: RunConfig) -> None:
    """Write all of a model folder but its weights."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder} cannot be made: {error.strerror}") from None
    tree = {"format_version": FORMAT_VERSION, **tree_of(config)}
    tree["format_version"] = FORMAT_VERSION
    write_file(folder / CONFIG, tomli_w.dumps(tree).encode())
    try:
        tokenizer.save(folder)
    except OSError as error:
        raise ModelError(f"{folder}: the tokenizer cannot be written: {error.strerror}") from None


def save_weights(path: Path, model: nn.Module, notes: Mapping[str, str] | None = None) -> None:
    """Write the weights of `model`, tied ones once."""
    save_tensors(path, model.state_dict(), {"format_version": str(FORMAT_VERSION), **(notes or {})})


def read_config(folder: str | Path) -> RunConfig:
    """`config.toml` of a model folder. Raises ModelError where it is no model folder, or a newer dragoman's."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ModelError(f"{folder} {what}; a model is a folder with {CONFIG}, a tokenizer and {WEIGHTS}")
    if not (folder / CONFIG).exists():
        raise ModelError(f"{folder} has no {CONFIG}, so it is not a model folder")
    try:
        return read_run(folder / CONFIG)
    except ConfigError as error:
        raise ModelError(error.problems) from None


def load_model(folder: str | Path, device: str | torch.device = "cpu") -> Loaded:
    """The model of a folder, on `device`, in evaluation mode. Raises ModelError with all that is wrong with it."""
    folder = Path(folder)
    config = read_config(folder)
    tokenizer = load_tokenizer(folder)
    tensors, notes = load_tensors(folder / WEIGHTS)
    model = empty_model(config.model, tokenizer)
    load_into(model, tensors, str(folder / WEIGHTS), f"the tokenizer in {folder}")
    return Loaded(model.to(device).eval(), tokenizer, config, notes)


def empty_model(spec: ModelSpec, tokenizer: Tokenizer) -> nn.Module:
    """A model whose weights are about to be loaded: the random state of the caller is left as it was."""
    with torch.random.fork_rng(devices=[]):
        return spec.build(len(tokenizer), tokenizer.pad_id)
