"""`dragoman train --dry-run`: what a run would be, from its config, its corpus and a few real updates."""

from __future__ import annotations

import contextlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.errors import TrainingError

if TYPE_CHECKING:
    from dragoman.run import RunConfig
    from dragoman.trainer import Run
    from dragoman.training.observer import Observer
    from dragoman.training.parallel import World

UPDATES = 5
"""Real updates that are timed, after one that is not."""
FOLDER = "dry-run"
"""Under this key the first rank tells the others where it prepares."""
PATIENCE = 10.0
"""Seconds that the first rank gives the others to leave its folder; a launcher that ends it gives it thirty."""


def report(config: RunConfig, start_from: Path | None, device: str, observer: Observer) -> int:
    """Prepare the run in a folder that is thrown away, make a few updates, and print what they tell to stdout."""
    from dragoman.trainer import Run
    from dragoman.training.parallel import arrive, connected

    world = arrive(device)
    with connected(world):
        with ending_in_order(), passing_folder(world) as folder:
            run = Run(config, folder, observer, world, start_from=start_from)
            world.barrier()  # all ranks have opened what is in it, and an open file outlives its name
        lines = describe(run)
        if run.world.is_first:
            sys.stdout.write("".join(f"{name:<28}{value}\n" for name, value in lines))
    return 0


@contextlib.contextmanager
def passing_folder(world: World) -> Iterator[Path]:
    """A folder that goes with the block: the first rank's on all ranks that see it, one of its own on any other."""
    start = world.start
    left = [f"{FOLDER}: rank {rank} has left" for rank in range(world.size)]
    if start is None:
        with own_folder() as own:
            yield own
    elif world.is_first:
        with own_folder() as own:
            start.say(FOLDER, str(own))
            try:
                yield own
            finally:
                # After an error of this rank another that finds nothing there would prepare everything anew.
                deadline = time.monotonic() + PATIENCE
                for other in left[1:]:
                    start.hear(other, max(0.0, deadline - time.monotonic()))
    elif (shared := Path(start.hear(FOLDER))).is_dir():
        try:
            yield shared
        finally:
            start.say(left[world.rank], "yes")
    else:
        start.say(left[world.rank], "yes")
        with own_folder() as own:
            yield own


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder that goes with the block."""
    with tempfile.TemporaryDirectory(prefix="dragoman-") as own:
        yield Path(own)


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Within the block SIGTERM, by which a launcher ends all ranks where one has failed, leaves time to clear up."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def describe(run: Run) -> list[tuple[str, str]]:
    """Names and values, in the order in which they are of interest. Every rank must call this."""
    import torch

    config, loop = run.config.training, run.loop
    shares = run.feed.shares(loop.position)
    loop.try_out(run.feed.largest())
    seconds, tokens, padded = [], [], []
    for number in range(UPDATES + 1):
        made = loop.update(next(shares))
        if made is not None and number:
            seconds.append(made.seconds)
            tokens.append(made.tokens)
            padded.append(1 - made.tokens / made.tgt_padded)
    if not seconds:
        raise TrainingError("no update could be made: their losses or gradients are not finite")
    batches = run.stream.expected_batches(1)
    per_update = statistics.median(seconds)
    weights = 4 * run.n_parameters
    ranks = run.world.size if config.parallel == "fsdp" else 1
    means = 1 if config.ema is not None else 0
    total = loop.total_steps or batches
    lines = [
        ("parameters", f"{run.n_parameters:,}"),
        ("vocabulary", f"{len(run.tokenizer):,}"),
        ("pairs", f"{run.data.n:,}"),
        ("precision", loop.precision),
        ("gradients by", loop.gradients.how),
        ("devices", f"{run.world.size} x {run.world.device.type}"),
        ("target tokens per update", f"{statistics.mean(tokens):,.0f} (budget {config.batch_tokens:,} a side)"),
        ("padding of the targets", f"{statistics.mean(padded):.1%}"),
        ("updates per epoch", f"{batches:,}"),
        ("epochs to max_steps", f"{total / batches:,.1f}"),
        ("seconds per update", f"{per_update:.3f} (median of {len(seconds)}, data included, validation not)"),
        ("target tokens per second", f"{statistics.mean(tokens) / per_update:,.0f}"),
        ("time per epoch", duration(batches * per_update)),
        ("time to max_steps", duration(total * per_update)),
        ("memory, weights and Adam", f"{size(weights * (4 + means) / ranks)} (weights, gradients, two means)"),
    ]
    if run.world.device.type == "cuda":
        lines.append(("memory, peak on the GPU", size(torch.cuda.max_memory_allocated())))
    else:
        import resource

        lines.append(("memory, peak of the process", size(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)))
    return lines


def size(n_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds for people: `3 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
