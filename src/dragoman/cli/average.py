"""`dragoman average`: the mean of checkpoints, as one model (§6.1)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dragoman.errors import ModelError


def command(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL…", help="A run, with --last; or several models.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder of the mean.")],
    last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Average the last N checkpoints of the one run.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a model in the folder.")] = False,
) -> None:
    """Average the weights of checkpoints or models; tied weights stay tied.

    The result translates, but cannot be resumed: there is no optimiser that belongs to it.
    """
    from dragoman.checkpoints.average import average_folders, inputs
    from dragoman.checkpoints.resuming import claim

    if out.resolve() in {model.resolve() for model in models}:
        raise ModelError(f"{out} is one of the models to average: give another --out")
    files = inputs(models, last)
    if not force:
        claim(out, resume=False, force=False)  # before the work
    count = average_folders(models[0], files, out, lambda: claim(out, resume=False, force=force))
    print(
        f"{out} is the mean of {count} checkpoint{'s' if count != 1 else ''}; it is for translating and cannot be "
        "resumed (train --from starts a new run from it)",
        file=sys.stderr,
    )
