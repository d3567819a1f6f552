"""`dragoman train`: a TOML file in, a model folder out; the same command under `torchrun` uses many devices."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.errors import UsageError

if TYPE_CHECKING:
    import torch

    from dragoman.run import RunConfig
    from dragoman.training.loop import Loop, Report
    from dragoman.training.observer import Dev, Outcome
    from dragoman.training.parallel import World


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run as a TOML file.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="K=V", help="Override a key, such as training.max_steps=100.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="The model folder; else runs/ and CONFIG's name.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest intact checkpoint.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an earlier run in the folder.")] = False,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="MODEL", help="Start with the weights and tokenizer of a model.")
    ] = None,
    reset: Annotated[
        str | None, typer.Option(metavar="WHAT", help="With --resume, start afresh: step, optimizer, schedule, data.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Sizes, memory and time from a few real updates; writes nothing.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; errors and warnings only.")] = False,
) -> int:
    """Train a model as CONFIG says: tokenizer, binarised corpus, model folder.

    Talk and progress go to stderr. SIGINT and SIGTERM save at the end of the update and exit with 130 and 143; a second
    one ends at once.
    """
    resets = frozenset(word.strip() for word in reset.split(",") if word.strip()) if reset else frozenset()
    _check(resets, resume, force, from_, dry_run)
    from dragoman.run import load_run

    # All faults of the file are named before anything is written.
    run = load_run(config, set_ or [])
    _check_together(run)
    folder = out or Path("runs") / config.stem
    display: Display = Quiet() if quiet else (Bar() if sys.stderr.isatty() else Lines())
    if run.training.tensorboard and int(os.environ.get("RANK", "0")) == 0:
        display = Curves(display, folder)
    named = _names_a_model(config, set_ or [])
    if dry_run:
        from dragoman.cli import dry_run as dry

        return dry.report(run if named else _with_model_of(run, from_), from_, device, display)
    from dragoman.training.parallel import arrive

    world = arrive(device)
    earlier = world.start.earlier if world.start is not None else ""
    if earlier in ("begun", "saved"):
        # A job that the launcher starts again after a failure goes on where it was.
        resume, force = True, False
        if earlier == "saved":
            from_, resets = None, frozenset()
    elif world.start is not None and world.start.failures and earlier != "refused":
        force = False  # who knows what an earlier start has written
    if not named:
        # Where the file leaves the model open it is that of the folder whose weights are taken.
        run = _with_model_of(run, folder if resume and from_ is None else from_)
    return _train(run, folder, display, world, resume=resume, force=force, start_from=from_, reset=resets)


def _check(resets: frozenset[str], resume: bool, force: bool, start_from: Path | None, dry_run: bool) -> None:
    from dragoman.cli.main import nearest

    known = ("step", "optimizer", "schedule", "data")
    problems = [f"--reset: {word!r} is none of {', '.join(known)}{nearest(word, known)}" for word in resets - {*known}]
    if resets and not resume:
        problems.append("--reset goes with --resume: a new run starts all of it afresh anyway")
    if resume and force:
        problems.append("--resume goes on with what --force would delete: choose one")
    if resume and start_from is not None:
        problems.append("--resume and --from both say where the weights come from: choose one")
    if dry_run and (resume or force):
        problems.append("--dry-run writes nothing, so --resume and --force have no meaning with it")
    if problems:
        raise UsageError(problems)


def _check_together(run: RunConfig) -> None:
    """What only the whole file can tell."""
    from dragoman.errors import ConfigError

    training = run.training
    if run.data.dev_corpus is None and (training.patience is not None or training.metric != "loss"):
        raise ConfigError("training.patience and training.metric watch the dev set: name one as data.dev")
    if training.r_drop and getattr(run.model, "dropout", None) == 0.0:
        raise ConfigError("training.r_drop compares two draws of dropout, and model.dropout is 0: change one of them")


def _names_a_model(config: Path, overrides: list[str]) -> bool:
    from dragoman.config import read_toml, set_values

    tree = set_values(read_toml(config), overrides)
    return "model" in tree or "preset" in tree


def _with_model_of(run: RunConfig, folder: Path | None) -> RunConfig:
    from dataclasses import replace

    from dragoman.checkpoints.store import CONFIG, read_config

    if folder is None or not (folder / CONFIG).exists():
        return run
    return replace(run, model=read_config(folder).model)


def _train(
    config: RunConfig,
    folder: Path,
    display: Display,
    world: World,
    *,
    resume: bool,
    force: bool,
    start_from: Path | None,
    reset: frozenset[str],
) -> int:
    from dragoman.checkpoints import resuming
    from dragoman.checkpoints.store import CONFIG, TRAINING, read_config
    from dragoman.text.corpus import check_corpora
    from dragoman.trainer import Run
    from dragoman.training.parallel import connected

    def settled() -> RunConfig:
        """The config to go on with, where there is something to go on with."""
        if resume and (folder / CONFIG).exists():
            return resuming.continued(read_config(folder), config, reset)
        return config

    def claim() -> RunConfig:
        world.note("refused")  # until it is not
        if force or not (folder / TRAINING / "data" / "train" / "index.json").exists():
            # What is wrong with the corpora is said before the folder is touched. Once binarised they were right, and
            # counting the lines of a large one again would cost more than all else of a second start.
            dev = config.data.dev_corpus
            check_corpora([*config.data.train_corpora, *([dev] if dev is not None else [])])
        _check_start(config, folder, start_from, world.device)
        held.enter_context(resuming.alone(folder, display.say))
        resuming.claim(folder, resume=resume, force=force)
        found = settled()
        world.note("begun")
        return found

    with ExitStack() as held:
        agreed = world.lead("claim", claim) or settled()
        with display, connected(world):
            run = Run(agreed, folder, display, world, start_from=start_from, resume=resume)
            if resume:
                run.resume(reset)
            display.begin(run.loop, run.n_parameters)
            outcome = run.train()
    if world.is_first:
        display.end(outcome, folder)
    return 128 + outcome.stop if outcome.stop is not None else 0


def _check_start(config: RunConfig, folder: Path, start_from: Path | None, device: torch.device) -> None:
    """Say what would stop the run, before `folder` is touched or an earlier one in it cleared away."""
    from dragoman.checkpoints.store import WEIGHTS, empty_model
    from dragoman.checkpoints.weights import load_into, load_tensors
    from dragoman.errors import ModelError
    from dragoman.tokens.tokenizer import load_tokenizer
    from dragoman.training.precision import choose

    choose(config.training.precision, device)
    if start_from is None:
        return
    if start_from.resolve() == folder.resolve():
        raise ModelError(
            f"{folder} cannot be the model to start from and the folder of the new one: give another --out"
        )
    weights, _ = load_tensors(start_from / WEIGHTS)
    model = empty_model(config.model, load_tokenizer(start_from))
    load_into(model, weights, str(start_from / WEIGHTS), f"the tokenizer of {start_from}")


class Display:
    """What a person sees of a run, on stderr. This one shows only messages."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""

    def say(self, message: str) -> None:
        """A sentence for the user."""
        print(message, file=sys.stderr, flush=True)

    def warn(self, message: str) -> None:
        """A sentence that the user should see even where talk is not wanted."""
        self.say(f"warning: {message}")

    def begin(self, loop: Loop, n_parameters: int) -> None:
        """Training is about to start."""
        about = "" if loop.total_steps == loop.config.max_steps else "about "
        end = f"{about}{loop.total_steps:,} updates" if loop.total_steps is not None else "its end in time"
        where = f"{loop.world.size} x {loop.world.device.type}" if loop.world.size > 1 else str(loop.world.device)
        if loop.world.is_first:
            self.say(f"training {n_parameters:,} parameters in {loop.precision} on {where}, to {end}")

    def reported(self, report: Report, loop: Loop) -> None:
        """An update was made."""

    def validated(self, dev: Dev, is_best: bool) -> None:
        """The dev set was scored."""
        scores = "" if dev.bleu is None else f", BLEU {dev.bleu:.2f}, chrF {dev.chrf:.2f}"
        self.say(
            f"dev after step {dev.step:,}: loss {dev.loss:.4f}, perplexity {dev.perplexity:.3f}{scores}"
            f"{' (best so far)' if is_best else ''}"
        )

    def end(self, outcome: Outcome, folder: Path) -> None:
        """The run is over."""
        if outcome.stop is not None:
            self.say(f"stopped by {outcome.why} after step {outcome.step:,}, saved; --resume goes on")
        else:
            self.say(f"ended after step {outcome.step:,} ({outcome.why}); {folder} holds {outcome.kept}")


class Quiet(Display):
    """Warnings and errors only."""

    def say(self, message: str) -> None:
        pass

    def warn(self, message: str) -> None:
        super().say(f"warning: {message}")


class Curves(Display):
    """Another display, and the curves for TensorBoard beside it."""

    def __init__(self, inner: Display, folder: Path) -> None:
        self.inner, self.folder = inner, folder
        self.writer: Any = None

    def close(self) -> None:
        self.inner.close()
        if self.writer is not None:
            self.writer.close()

    def say(self, message: str) -> None:
        self.inner.say(message)

    def warn(self, message: str) -> None:
        self.inner.warn(message)

    def begin(self, loop: Loop, n_parameters: int) -> None:
        # A package of an extra: where it is missing, that is said before training starts.
        from torch.utils.tensorboard import SummaryWriter

        logs = self.folder / "training" / "tensorboard"
        self.writer = SummaryWriter(str(logs), purge_step=loop.step + 1)
        self.inner.begin(loop, n_parameters)

    def reported(self, report: Report, loop: Loop) -> None:
        self.inner.reported(report, loop)
        if report.step % loop.config.log_every == 0:
            for name in ("loss", "nll", "lr", "grad_norm"):
                self.writer.add_scalar(f"train/{name}", getattr(report, name), report.step)
            self.writer.add_scalar("train/tokens_per_second", report.tokens / report.seconds, report.step)

    def validated(self, dev: Dev, is_best: bool) -> None:
        self.inner.validated(dev, is_best)
        for name in ("loss", "nll", "perplexity", "bleu", "chrf"):
            if (value := getattr(dev, name)) is not None:
                self.writer.add_scalar(f"dev/{name}", value, dev.step)

    def end(self, outcome: Outcome, folder: Path) -> None:
        self.inner.end(outcome, folder)


class Pace:
    """Tokens a second and the time that is left, from the last updates."""

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        self.seconds_per_step = 0.0
        self.started = time.monotonic()
        self.minutes = 0.0

    def take(self, report: Report) -> None:
        """Learn from an update."""
        share = 0.05 if self.tokens_per_second else 1.0
        self.tokens_per_second += share * (report.tokens / max(report.seconds, 1e-9) - self.tokens_per_second)
        self.seconds_per_step += share * (report.seconds - self.seconds_per_step)

    def left(self, report: Report, loop: Loop) -> str:
        """The time to the end, as h:mm:ss, or as much of it as is known."""
        ends = []
        if loop.total_steps is not None:
            # Validations count: the mean of the whole run knows them, the last updates know the present speed.
            mean = max(self.seconds_per_step, report.minutes * 60 / report.step)
            ends.append((loop.total_steps - report.step) * mean)
        if loop.config.max_minutes is not None:
            ends.append((loop.config.max_minutes - report.minutes) * 60)
        if not ends:
            return "?"
        seconds = max(0, math.ceil(min(ends)))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class Lines(Display):
    """A line every `log_every` updates, at most one in two seconds: for logs and pipes."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.told = -math.inf

    def reported(self, report: Report, loop: Loop) -> None:
        self.pace.take(report)
        last = loop.is_done()
        if not last and (report.step % loop.config.log_every or time.monotonic() - self.told < 2.0):
            return
        self.told = time.monotonic()
        self.say(
            f"step {report.step:,}  loss {report.loss:.4f}  nll {report.nll:.4f}  lr {report.lr:.3g}  "
            f"{self.pace.tokens_per_second:,.0f} tokens/s  left {self.pace.left(report, loop)}"
            + (f"  skipped {report.skipped}" if report.skipped else "")
            + (f"  empty {report.empty}" if report.empty else "")
        )


class Bar(Display):
    """A progress bar: step, loss, tokens/s, time left, and BLEU on the dev set as it goes."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.progress: Any = None
        self.task: Any = None
        self.bleu = ""

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def say(self, message: str) -> None:
        if self.progress is not None:
            self.progress.console.print(message, markup=False, highlight=False)
        else:
            super().say(message)

    def begin(self, loop: Loop, n_parameters: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().begin(loop, n_parameters)
        if not loop.world.is_first:
            return
        self.progress = Progress(
            TextColumn("step {task.fields[step]}"),
            BarColumn(bar_width=20),
            TextColumn(
                "loss {task.fields[loss]}  {task.fields[speed]} tokens/s  {task.fields[left]} left{task.fields[bleu]}"
            ),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        fields = {"step": loop.step, "loss": "…", "speed": "…", "left": "?", "bleu": ""}
        self.task = self.progress.add_task("training", total=1.0, **fields)
        self.progress.start()

    def reported(self, report: Report, loop: Loop) -> None:
        self.pace.take(report)
        if self.progress is None:
            return
        shares = [report.step / loop.total_steps] if loop.total_steps is not None else []
        if loop.config.max_minutes is not None:
            shares.append(report.minutes / loop.config.max_minutes)
        self.progress.update(
            self.task,
            completed=max(shares, default=0.0),
            step=f"{report.step:,}",
            loss=f"{report.loss:.3f}",
            speed=f"{self.pace.tokens_per_second:,.0f}",
            left=self.pace.left(report, loop),
            bleu=self.bleu,
        )

    def validated(self, dev: Dev, is_best: bool) -> None:
        super().validated(dev, is_best)
        if dev.bleu is not None:
            self.bleu = f"  dev BLEU {dev.bleu:.1f}"
