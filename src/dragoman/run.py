"""A run: the stations' configs joined, and how its TOML file is read. Wiring only."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from dragoman import config
from dragoman.decoding.options import DecodingConfig
from dragoman.errors import ConfigError
from dragoman.model.choices import ModelSpec, PaperSpec
from dragoman.text.corpus import DataConfig
from dragoman.tokens.tokenizer import TokenizerConfig
from dragoman.training.options import TrainingConfig

FORMAT_VERSION = 1


@dataclass(frozen=True)
class RunConfig:
    """One TOML file: from corpora to decoding defaults. Frozen, because a run's config is a fact."""

    data: DataConfig
    """`[data]`: corpora and languages."""
    format_version: int = FORMAT_VERSION
    """The version of a model folder's layout; a higher one than ours is refused."""
    preset: str | None = None
    """The preset that filled the sections below the file's own keys."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """`[tokenizer]`: one joint vocabulary for both sides."""
    model: ModelSpec = field(default_factory=PaperSpec)
    """`[model]`: a family by its `kind`, and that family's sizes."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """`[training]`: lengths, batches, optimiser, schedule."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    """`[decoding]`: the defaults of `translate`."""


def presets() -> list[str]:
    """Names of the presets that ship with the package."""
    return sorted(
        file.name.removesuffix(".toml")
        for file in resources.files("dragoman.presets").iterdir()
        if file.name.endswith(".toml")
    )


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a TOML file describes: preset < file < overrides (`a.b=value`), its paths made absolute.

    Relative paths are relative to the file; those in `overrides` to the working directory first, if they exist there.
    Raises ConfigError with every fault at once.
    """
    tree = config.read_toml(path)
    folder = Path(path).parent
    above = config.set_values({}, overrides)
    name = above.get("preset", tree.get("preset"))
    below = _preset(str(name)) if name is not None else {}
    merged = config.merge(RunConfig, below, _with_absolute_paths(tree, [folder]))
    run = config.build(
        RunConfig,
        config.merge(RunConfig, merged, _with_absolute_paths(above, [Path(), folder])),
        where=str(path),
    )
    return replace(run, format_version=FORMAT_VERSION)


def read_run(path: str | Path) -> RunConfig:
    """The resolved `config.toml` of a model folder. Raises ConfigError, and plainly where a newer dragoman wrote it."""
    tree = config.read_toml(path)
    version = tree.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ConfigError(
            f"{path}: format_version is {version!r}, and this dragoman reads up to {FORMAT_VERSION}: "
            "a newer version wrote this model; upgrade with pip install -U dragoman"
        )
    return config.build(RunConfig, tree, where=str(path))


def _preset(name: str) -> config.Tree:
    if name not in presets():
        near = difflib.get_close_matches(name, presets(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(presets())}"
        raise ConfigError(f"preset {name!r} is not known; {hint}")
    with resources.as_file(resources.files("dragoman.presets") / f"{name}.toml") as file:
        return config.read_toml(file)


def _with_absolute_paths(tree: config.Tree, bases: Sequence[Path]) -> config.Tree:
    """The tree with the paths of [data] and [tokenizer] resolved against the first base where they exist, or the last.

    A model folder can then be moved, and still says what it was trained on.
    """

    def absolute(value: object) -> object:
        match value:
            case "":  # how --set takes a corpus away
                return value
            case str():
                candidates = [(base / value).resolve() for base in bases]
                return str(next((path for path in candidates if path.exists()), candidates[-1]))
            case list():
                return [absolute(item) for item in value]
            case dict():
                return {key: absolute(item) if key in ("src", "tgt", "tsv") else item for key, item in value.items()}
        return value

    resolved = dict(tree)
    for table, keys in (("data", ("train", "dev")), ("tokenizer", ("model",))):
        if isinstance(inner := tree.get(table), dict):
            resolved[table] = {key: absolute(value) if key in keys else value for key, value in inner.items()}
    return resolved
