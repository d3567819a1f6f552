"""Whether a run may write where it is told to, and what may differ when it goes on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from dragoman.checkpoints import snapshots
from dragoman.checkpoints.atomic import LITTER
from dragoman.checkpoints.store import CONFIG, METRICS, TRAINING, WEIGHTS
from dragoman.checkpoints.weights import load_tensors
from dragoman.config import tree_of
from dragoman.errors import ConfigError, ModelError
from dragoman.training.options import LENGTHS_AND_INTERVALS, WAYS, TrainingConfig

RESETS = ("step", "optimizer", "schedule", "data")
"""What `--reset` may name."""

_FREED = {
    "step": (),
    "optimizer": ("training.optimizer.",),
    "schedule": ("training.schedule.",),
    "data": ("data.", "training.batch_tokens", "training.seed"),
}
"""Keys that may change where something that depends on them is reset."""


STARTING_POINT = {"step": "0", "kept": "what training starts from"}
"""The notes of weights that a run has taken from a model, until it has a checkpoint of its own."""
PATIENCE = 60.0
"""Seconds that a run waits for the process before it to leave the folder: one that a scheduler stops still saves."""


class HasTraining(Protocol):
    """A run's config, of which only this is known here."""

    @property
    def training(self) -> TrainingConfig: ...


Config = TypeVar("Config", bound=HasTraining)


@contextlib.contextmanager
def alone(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder of a run for this process; it is made where there is none.

    Raises ModelError where another training does not let go of it in time. The system lets go when a process ends,
    however it does; on a file system without locks nothing is held.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except (FileExistsError, NotADirectoryError):
        raise ModelError(f"{out} is a file, or below one; a model is a folder: choose another --out") from None
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror}; choose another --out") from None
    try:
        _lock(descriptor, out, say)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, out: Path, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + PATIENCE
    waiting = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ModelError(
                    f"another training is writing to {out}: let it end or stop it, or give another --out"
                ) from None
        except OSError:
            return
        if not waiting:
            say(f"another training is writing to {out}: waiting up to {PATIENCE:.0f} seconds for it to end")
            waiting = True
        time.sleep(0.1)


def holds_starting_point(out: Path) -> bool:
    """Whether a run ended before its first checkpoint, and the weights in its folder are those it was to start from."""
    path = out / WEIGHTS
    return not snapshots.folders(out) and path.exists() and load_tensors(path)[1].get("kept") == STARTING_POINT["kept"]


def claim(out: Path, *, resume: bool, force: bool) -> None:
    """See that a run may write to `out`, and with `force` clear an earlier run away. Raises ModelError where not.

    Binarised data stays: it knows what it was made from.
    """
    if out.exists() and not out.is_dir():
        raise ModelError(f"{out} is a file; a model is a folder: choose another --out")
    if not out.exists():
        return
    if resume:
        _refuse_average(out)
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


def _refuse_average(out: Path) -> None:
    if (out / WEIGHTS).exists() and not snapshots.folders(out) and "average_of" in load_tensors(out / WEIGHTS)[1]:
        raise ModelError(
            f"{out} is an average of checkpoints: no optimiser belongs to it, so it cannot be resumed; "
            f"start a new run from it with --from {out}"
        )


def continued(saved: Config, asked: Config, reset: frozenset[str] = frozenset()) -> Config:
    """The config to go on with: what is asked for, where it differs from what was saved in nothing but lengths,
    intervals and ways to compute an update, and in what depends on something that is `reset`. Raises ConfigError with
    every other key.

    What was left to us, such as the precision, stays as it was chosen.
    """
    before, now = saved.training, asked.training
    now = replace(
        now,
        precision=before.precision if now.precision == "auto" else now.precision,
        lanes=before.lanes if now.lanes == 0 else now.lanes,
    )
    asked = cast("Config", replace(cast("Any", asked), training=now))
    old, new = dict(_leaves(tree_of(saved))), dict(_leaves(tree_of(asked)))
    allowed = {f"training.{name}" for name in (*LENGTHS_AND_INTERVALS, *WAYS)}
    freed = tuple(prefix for what in reset for prefix in _FREED[what])
    problems = [
        f"{key} was {_shown(old, key)} and is now {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and key not in allowed
        and key not in ("preset", "format_version")
        and not key.startswith(("decoding.", *freed))
    ]
    if problems:
        raise ConfigError(
            [
                *problems,
                "with --resume only lengths and intervals of training may change, and accumulation, "
                "activation_checkpointing and workers; --reset optimizer, schedule or data frees what depends on them, "
                "and --from MODEL starts a new run from a model's weights",
            ]
        )
    return asked


def check_origin(facts: Mapping[str, Any], folder: Path, tokenizer: str, data: str, reset: frozenset[str]) -> None:
    """ModelError where tokens, or the place in the data, would mean something else than when `folder` was saved.

    `tokenizer` and `data` are the fingerprints of what there is now.
    """
    if facts.get("tokenizer", tokenizer) != tokenizer:
        raise ModelError(f"{folder} was made with another tokenizer than the one that lies beside it")
    if "data" not in reset and facts.get("data", data) != data:
        raise ModelError(
            f"the training corpus is not what it was when {folder} was saved, so the place in it means nothing: put "
            "the corpus back, or begin it anew with --reset data"
        )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return repr(leaves[key]) if key in leaves else "not set"
