"""The mean of several checkpoints (§6.1: "we used a single model obtained by averaging the last 5 checkpoints")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dragoman.checkpoints import snapshots
from dragoman.checkpoints.store import TRAINING, WEIGHTS, empty_model, read_config, save_model
from dragoman.checkpoints.weights import load_into, load_tensors, unique
from dragoman.errors import ModelError
from dragoman.tokens.tokenizer import load_tokenizer


def average_weights(models: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each tensor, summed in float64; names that share memory share it in the result too.

    Raises ModelError where names or shapes differ. `models` are taken one at a time, so that they need not all be in
    memory.
    """
    sums: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for number, model in enumerate(models, start=1):
        once, aliases = unique(model)
        if not sums:
            sums = {name: tensor.detach().to("cpu", torch.float64) for name, tensor in once.items()}
            dtypes, tied = {name: tensor.dtype for name, tensor in once.items()}, aliases
        else:
            problems = [
                f"model {number} {'lacks' if name in sums else 'has'} the tensor {name}, unlike the first"
                for name in sorted(sums.keys() ^ once.keys())
            ]
            problems += [
                f"{name} has the shape {list(once[name].shape)} in model {number} and {list(total.shape)} in the first"
                for name, total in sums.items()
                if name in once and once[name].shape != total.shape
            ]
            if problems:
                raise ModelError(problems)
            for name, total in sums.items():
                total += once[name].detach().to("cpu", torch.float64)
        count = number
    if not count:
        raise ModelError("there is no model to average")
    means = {name: (total / count).to(dtypes[name]) for name, total in sums.items()}
    return means | {name: means[first] for name, first in tied.items()}


def last_of(run: Path, last: int) -> list[Path]:
    """The weights of the newest `last` regular checkpoints of a run. ModelError where it has fewer, or damaged ones."""
    found = snapshots.regular(run)
    if len(found) < last:
        kept = f"has {len(found)}" if found else f"has none (no {TRAINING}/step-…)"
        raise ModelError(
            f"{run} {kept} of the {last} checkpoints asked for; --last takes at most those that a run keeps "
            "(training.keep_last and training.average_last)"
        )
    problems = [problem for folder in found[:last] for problem in snapshots.faults(folder, resuming=False)]
    if problems:
        raise ModelError(problems)
    return [folder / WEIGHTS for folder in found[:last]]


def inputs(folders: Sequence[Path], last: int | None = None) -> list[Path]:
    """The weight files that are to be averaged: the last ones of one run, or those of several models.

    Raises ModelError for a folder given twice, and for models that are not of one kind.
    """
    seen: dict[Path, Path] = {}
    problems = []
    for folder in folders:
        if (real := folder.resolve()) in seen:
            problems.append(f"{folder} is given twice{'' if folder == seen[real] else f' (also as {seen[real]})'}")
        seen.setdefault(real, folder)
    if last is None and len(folders) == 1:
        problems.append(f"{folders[0]} is one model; name more, or say how many of its checkpoints with --last N")
    if last is not None and len(folders) > 1:
        problems.append("--last takes checkpoints of one run: name one folder with it, or several without")
    if problems:
        raise ModelError(problems)
    first = folders[0]
    config, tokenizer = read_config(first), load_tokenizer(first)
    for folder in folders[1:]:
        if read_config(folder).model != config.model:
            problems.append(f"{folder} and {first} are different models: their [model] tables differ")
        if load_tokenizer(folder).fingerprint != tokenizer.fingerprint:
            problems.append(f"{folder} and {first} have different tokenizers")
    if problems:
        raise ModelError(problems)
    return last_of(first, last) if last is not None else [folder / WEIGHTS for folder in folders]


def average_folders(first: Path, files: Sequence[Path], out: Path, claim: Callable[[], None] = lambda: None) -> int:
    """Write to `out` a model like that of `first` with the mean of the weights in `files`; give how many there were.

    The result is for translating: it has no state to resume from, and its weights say so. `claim` is called when the
    mean is there and before anything is written.
    """
    config, tokenizer = read_config(first), load_tokenizer(first)
    model = empty_model(config.model, tokenizer)
    load_into(model, average_weights(load_tensors(file)[0] for file in files), "the average")
    notes = {"average_of": str(len(files)), "averaged": ", ".join(file.parent.name for file in files)}
    claim()
    save_model(out, model, tokenizer, config, notes)
    return len(files)
