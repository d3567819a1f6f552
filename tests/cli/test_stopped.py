"""`dragoman train` where it was stopped: what a run goes on from, what is made up for, and who must wait."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dragoman.checkpoints import resuming
from dragoman.checkpoints.metrics import Metrics
from dragoman.checkpoints.store import load_model
from dragoman.cli.main import exit_code
from dragoman.cli.train import Display
from dragoman.trainer import Run
from dragoman.training.loop import Loop, Report

Train = Callable[..., int]


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """Of metrics.jsonl, but for what a clock has told."""
    found = [record for record in Metrics(run / "metrics.jsonl").records() if record["kind"] == kind]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in found]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A signal comes in the update of that number."""
    run = Loop.run

    def stopped(self: Loop, shares: Any) -> Iterator[Report]:
        for report in run(self, shares):
            yield replace(report, stop=signal.SIGTERM) if report.step == step else report

    monkeypatch.setattr(Loop, "run", stopped)


def killed(*_: object) -> None:
    raise RuntimeError("killed")


@pytest.mark.parametrize("where", ["while it prepares", "after its first update"])
def test_a_run_from_a_model_that_is_killed_goes_on_from_its_weights(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    assert train("model", "training.max_steps=2") == 0
    options = ["training.seed=5", "training.max_steps=3"]
    assert train("whole", "--from", str(tmp_path / "model"), *options) == 0
    with monkeypatch.context() as patch:
        patch.setattr(*((Run, "train") if where == "while it prepares" else (Display, "reported")), killed)
        patch.setattr("dragoman.cli.train.Lines", Display)
        with pytest.raises(RuntimeError, match="killed"):
            train("parts", "--from", str(tmp_path / "model"), *options)
    assert train("parts", "--resume", *options) == 0
    assert records(tmp_path / "parts", "train") == records(tmp_path / "whole", "train")


def test_a_model_that_does_not_fit_is_said_before_there_is_a_folder(train: Train, tmp_path: Path) -> None:
    assert train("model", "training.max_steps=2") == 0
    assert train("run", "--from", str(tmp_path / "model"), "model.d_ff=32") == 1
    assert not (tmp_path / "run").exists()


def test_a_validation_that_a_signal_came_before_is_made_up_for(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("whole") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        assert train("parts") == 143
    assert not records(tmp_path / "parts", "dev")
    assert train("parts", "--resume") == 0
    for kind in ("train", "dev"):
        assert records(tmp_path / "parts", kind) == records(tmp_path / "whole", kind)
    # The last validation is as well, and stands there once however often the command is given again.
    with monkeypatch.context() as patch:
        stop_after(patch, 12)
        assert train("last") == 143
    for _ in range(2):
        assert train("last", "--resume") == 0
        assert records(tmp_path / "last", "dev") == records(tmp_path / "whole", "dev")


def test_the_mean_is_that_of_the_run_that_was_never_stopped(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["training.average_last=3", "training.keep_last=1"]
    assert train("whole", *options) == 0
    for step in (5, 9):
        with monkeypatch.context() as patch:
            stop_after(patch, step)
            assert train("parts", *options, *(["--resume"] if step > 5 else [])) == 143
    assert train("parts", *options, "--resume") == 0
    whole, parts = load_model(tmp_path / "whole"), load_model(tmp_path / "parts")
    assert parts.notes["kept"] == whole.notes["kept"] == "the mean of steps 4, 8, 12"
    assert all((a == b).all() for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True))


def test_patience_that_was_at_its_end_stays_there(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["training.validate_every=1", "training.patience=2", "training.max_steps=5"]
    assert train("run", *options, "training.schedule.peak=0.0") == 0
    for patience, steps in ((2, 3), (3, 4)):
        capfd.readouterr()
        more = [*options, f"training.patience={patience}"]
        assert train("run", *more, "training.schedule.peak=0.0", "--resume") == 0
        assert f"ended after step {steps} (no better loss in {patience} validations)" in capfd.readouterr().err
        assert [record["step"] for record in records(tmp_path / "run", "dev")] == list(range(1, steps + 1))


def test_a_folder_that_another_training_writes_to_is_waited_for_and_then_refused(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resuming, "PATIENCE", 0.3)
    with resuming.alone(tmp_path / "run", print):
        for option in ("--force", "--resume"):
            assert train("run", option) == 1
            told = capfd.readouterr().err
            assert "waiting up to 0 seconds for it to end" in told
            assert "let it end or stop it, or give another --out" in told
    assert list((tmp_path / "run").iterdir()) == []
    assert train("run", "training.max_steps=1") == 0


def test_an_average_that_cannot_be_made_leaves_what_was_there(train: Train, tmp_path: Path) -> None:
    assert train("run", "training.average_last=2") == 0
    line = ["average", str(tmp_path / "run"), "--last", "2", "--out", str(tmp_path / "mean")]
    assert exit_code(line) == 0
    assert exit_code(line) == 1
    before = (tmp_path / "mean" / "weights.safetensors").read_bytes()
    weights = tmp_path / "run" / "training" / "step-00000012" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    assert exit_code([*line, "--force"]) == 1
    assert (tmp_path / "mean" / "weights.safetensors").read_bytes() == before
