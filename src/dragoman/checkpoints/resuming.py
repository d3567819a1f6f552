"""Whether a run may write where it is told to, and what may differ when it goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dragoman.checkpoints.atomic import LITTER
from dragoman.checkpoints.store import CONFIG, METRICS, TRAINING, WEIGHTS
from dragoman.config import tree_of
from dragoman.errors import ConfigError, ModelError
from dragoman.run import RunConfig
from dragoman.training.options import LENGTHS_AND_INTERVALS

RESETS = ("step", "optimizer", "schedule", "data")
"""What `--reset` may name."""

_FREED = {
    "step": (),
    "optimizer": ("training.optimizer.",),
    "schedule": ("training.schedule.",),
    "data": ("data.", "training.batch_tokens", "training.seed"),
}
"""Keys that may change where something that depends on them is reset."""


def claim(out: Path, *, resume: bool, force: bool) -> None:
    """See that a run may write to `out`, and with `force` clear an earlier run away. Raises ModelError where not.

    Binarised data stays: it knows what it was made from.
    """
    if out.exists() and not out.is_dir():
        raise ModelError(f"{out} is a file; a model is a folder: choose another --out")
    if resume or not out.exists():
        return
    names = sorted(path.name for path in out.iterdir() if not path.name.startswith(LITTER))
    if not names:
        return
    if not force:
        raise ModelError(
            f"{out} is not empty ({', '.join(names[:4])}{', …' if len(names) > 4 else ''}): --resume goes on with the "
            "run that is there, --force overwrites it, --out takes another folder"
        )
    if not {CONFIG, TRAINING, WEIGHTS} & set(names):
        raise ModelError(f"{out} holds something else than a run, which --force does not delete; choose another --out")
    for name in (WEIGHTS, METRICS, CONFIG, "tokenizer.json", "tokenizer.model"):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "best", ignore_errors=True)
    for path in (out / TRAINING).glob("*"):
        if path.is_dir() and path.name != "data":
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink()


def continued(saved: RunConfig, asked: RunConfig, reset: frozenset[str] = frozenset()) -> RunConfig:
    """The config to go on with: what is asked for, where it differs from what was saved in nothing but lengths and
    intervals, and in what depends on something that is `reset`. Raises ConfigError with every other key.
    """
    if asked.training.precision == "auto":
        asked = replace(asked, training=replace(asked.training, precision=saved.training.precision))
    before, after = dict(_leaves(tree_of(saved))), dict(_leaves(tree_of(asked)))
    allowed = {f"training.{name}" for name in LENGTHS_AND_INTERVALS}
    freed = tuple(prefix for what in reset for prefix in _FREED[what])
    problems = [
        f"{key} was {_shown(before, key)} and is now {_shown(after, key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
        and key not in allowed
        and key not in ("preset", "format_version")
        and not key.startswith(("decoding.", *freed))
    ]
    if problems:
        raise ConfigError(
            [
                *problems,
                "with --resume only lengths and intervals of training may change; --reset optimizer, schedule or data "
                "frees what depends on them, and --from MODEL starts a new run from a model's weights",
            ]
        )
    return asked


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return repr(leaves[key]) if key in leaves else "not set"
