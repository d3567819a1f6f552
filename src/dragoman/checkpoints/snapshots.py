"""What a run can go on from: `training/step-NNNNNNNN/`, whole, checksummed, and never pickle.

    weights.safetensors   the model as it would be used at this step (the running mean, where there is one)
    state.safetensors     the optimiser; and the weights themselves, where the model is their running mean
    state.json            step, place in the data, what was best so far, ...
    manifest.json         size and SHA-256 of the other three

A folder appears under its name when all of it is on the disk. Older ones keep their weights alone, for averaging.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dragoman.checkpoints.atomic import sweep, write_file, write_folder
from dragoman.checkpoints.store import TRAINING, WEIGHTS
from dragoman.checkpoints.weights import load_tensors, save_tensors
from dragoman.errors import ModelError

STATE = "state.safetensors"
FACTS = "state.json"
MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint, read."""

    folder: Path
    step: int
    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    facts: dict[str, Any]


def save(run: Path, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], facts: Any) -> Path:
    """Write the checkpoint of `step` below the model folder `run`; give its folder.

    Raises ModelError where the disk is full or the folder read-only; those that were there before stay as they are.
    """
    folder = folder_of(run, step)

    def fill(temporary: Path) -> None:
        save_tensors(temporary / WEIGHTS, weights)
        save_tensors(temporary / STATE, state)
        (temporary / FACTS).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        files = {name: _measure(temporary / name) for name in (WEIGHTS, STATE, FACTS)}
        (temporary / MANIFEST).write_text(_manifest(step, files), encoding="utf-8")

    write_folder(folder, fill)
    return folder


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step stands, if there is one."""
    return run / TRAINING / f"step-{step:08d}"


def folders(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first, intact or not."""
    found = [path for path in (run / TRAINING).glob("step-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise ModelError(f"{folder} is not a checkpoint: its name is not step-NNNNNNNN")
    return int(match.group(1))


def faults(folder: Path, *, resuming: bool = True) -> list[str]:
    """What is wrong with a checkpoint, in words. `resuming`: its weights alone are not enough."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, Any] = dict(manifest["files"])
        version = int(manifest["format_version"])
    except FileNotFoundError:
        return [f"{folder / MANIFEST} is missing"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        return [f"{folder / MANIFEST} cannot be read ({error})"]
    if version > FORMAT_VERSION:
        return [f"{folder} has format_version {version}; this dragoman reads up to {FORMAT_VERSION}"]
    wrong = []
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                wrong.append(f"{path} has {size:,} bytes and should have {expected['bytes']:,}: it was cut short")
            elif _measure(path) != expected:
                wrong.append(f"{path} is damaged: its SHA-256 is not the one written down when it was saved")
        except FileNotFoundError:
            wrong.append(f"{path} is missing")
        except OSError as error:
            wrong.append(f"{path} cannot be read: {error.strerror}")
        except (KeyError, TypeError, ValueError):
            wrong.append(f"{folder / MANIFEST} is damaged: it does not say what {name!r} should be")
    if resuming and STATE not in files:
        wrong.append(f"{folder} keeps its weights only")
    return wrong


def load(folder: Path) -> Snapshot:
    """Read a checkpoint. Raises ModelError with all that is wrong with it."""
    if wrong := faults(folder):
        raise ModelError(wrong)
    weights, _ = load_tensors(folder / WEIGHTS)
    state, _ = load_tensors(folder / STATE)
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return Snapshot(folder, step_of(folder), weights, state, facts)


def newest_intact(run: Path, warn: Callable[[str], None]) -> Snapshot | None:
    """The newest checkpoint that can be gone on from; those that are damaged are named through `warn`.

    None where there is no checkpoint at all. Raises ModelError where there are some and none is intact.
    """
    damaged = []
    for folder in folders(run):
        wrong = faults(folder)
        if not wrong:
            return load(folder)
        if not faults_of_weights_only(wrong):
            damaged.append(folder.name)
            for problem in wrong:
                warn(f"damaged checkpoint: {problem}")
            warn(f"{folder.name} is passed over; the one before is taken")
    if damaged:
        raise ModelError(
            f"no checkpoint under {run / TRAINING} is intact ({', '.join(damaged)}); train anew with --force"
        )
    return None


def faults_of_weights_only(wrong: list[str]) -> bool:
    """Whether a checkpoint has nothing wrong but that it was slimmed to its weights."""
    return len(wrong) == 1 and wrong[0].endswith("keeps its weights only")


def regular(run: Path) -> list[Path]:
    """The checkpoints that a mean may be taken of, newest first: the newest, and before it those that stand at equal
    distances (§6.1), not where a signal came or training began."""
    found = [folder for folder in folders(run) if step_of(folder) > 0]
    return found[:1] + [folder for folder in found[1:] if not _was_interrupted(folder)]


def for_mean(run: Path, n: int, warn: Callable[[str], None]) -> list[Path]:
    """The newest `n` of the regular checkpoints, or as many as there are; damaged ones are named and left out."""
    found: list[Path] = []
    for folder in regular(run):
        if len(found) == n:
            break
        wrong = faults(folder, resuming=False)
        for problem in wrong:
            warn(f"left out of the mean: {problem}")
        if not wrong:
            found.append(folder)
    return found


def _was_interrupted(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        return isinstance(facts, dict) and bool(facts.get("interrupted"))
    return False


def prune(run: Path, newest: int, keep: int, keep_weights: int) -> None:
    """Leave the newest `keep` checkpoints whole, of the next regular ones the weights so that there are `keep_weights`
    of those in all, and remove the rest; also what stands behind step `newest`, which a resume has passed over."""
    for folder in folders(run):
        if step_of(folder) > newest:
            shutil.rmtree(folder, ignore_errors=True)
    for_means = set(regular(run))
    whole = weights = 0
    for folder in folders(run):
        counts = folder in for_means
        if whole < keep:
            # One that is damaged does not count: there must be `keep` to fall back on. Sizes tell enough here.
            intact = _looks_whole(folder)
            whole += intact
            weights += intact and counts
        elif counts and weights < keep_weights:
            weights += 1
            _slim(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    sweep(run / TRAINING)


def _looks_whole(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return STATE in files and all((folder / name).stat().st_size == f["bytes"] for name, f in files.items())
    return False


def _slim(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        if STATE in files:
            # The manifest first: a kill between the two leaves a file too many, not a checkpoint that looks damaged.
            kept = {name: facts for name, facts in files.items() if name != STATE}
            write_file(folder / MANIFEST, _manifest(step_of(folder), kept).encode())
        (folder / STATE).unlink(missing_ok=True)


def _manifest(step: int, files: Mapping[str, Any]) -> str:
    return json.dumps({"format_version": FORMAT_VERSION, "step": step, "files": files}, indent=2) + "\n"


def _measure(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
