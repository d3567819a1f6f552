"""`dragoman train` and `average`: runs that end, stop, resume, are refused, and start from others."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.checkpoints.store import load_model
from dragoman.cli.main import exit_code

Train = Callable[..., int]


def metrics(out: Path, kind: str = "train") -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def losses(out: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in metrics(out)]


def test_a_run_leaves_a_folder_that_is_a_model(train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train("run", "training.validate_bleu=true") == 0
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} == {
        *("config.toml", "tokenizer.json", "tokenizer.model", "weights.safetensors", "metrics.jsonl", "training")
    }
    model = load_model(run)
    assert model.config.training.max_steps == 12
    told = capfd.readouterr()
    assert told.out == ""
    assert "ended after step 12 (max_steps = 12)" in told.err
    assert "the best by loss on the dev set, of step 12" in told.err
    assert [record["step"] for record in metrics(run)] == list(range(1, 13))
    keys = ["kind", "step", "loss", "nll", "lr", "grad_norm", "tokens", "src_padded", "tgt_padded", "seconds"]
    assert all(list(record) == keys for record in metrics(run))
    assert all(max(record["src_padded"], record["tgt_padded"]) <= 400 for record in metrics(run))
    dev = metrics(run, "dev")
    assert [record["step"] for record in dev] == [6, 12]
    assert all(list(record) == ["kind", "step", "loss", "nll", "perplexity", "bleu", "chrf"] for record in dev)
    assert dev[0]["perplexity"] == pytest.approx(math.exp(dev[0]["nll"]))
    assert sorted(path.name for path in (run / "training").glob("step-*")) == ["step-00000008", "step-00000012"]
    (entry,) = json.loads((run / "training" / "run.json").read_text())
    assert entry["packages"]["torch"]
    assert entry["ranks"] == 1
    assert entry["gradients_by"].startswith("1 lanes")
    assert len(entry["data"]) >= 32


RESUMED = [
    pytest.param(["training.precision=float32", "training.lanes=2"], id="float32"),
    pytest.param(["training.precision=bfloat16", "training.ema=0.9"], id="bfloat16"),
    pytest.param(["training.optimizer.kind=muon", "training.lanes=2"], id="muon"),
    pytest.param(["training.r_drop=5", "training.lanes=2"], id="r_drop"),
    pytest.param(["training.r_drop=5", "training.activation_checkpointing=true"], id="r_drop by autograd"),
]


@pytest.mark.parametrize("options", RESUMED)
def test_stopped_mid_epoch_and_resumed_is_uninterrupted(train: Train, tmp_path: Path, options: list[str]) -> None:
    """B25: with dropout, accumulation and workers; each step stands in metrics.jsonl once."""
    options = [*options, "training.accumulation=2", "training.workers=2"]
    assert train("whole", *options) == 0
    assert train("parts", *options, "training.max_steps=5") == 0
    assert train("parts", *options, "training.max_steps=9", "--resume") == 0
    assert train("parts", *options, "--resume") == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = (load_model(tmp_path / name).model.state_dict() for name in ("whole", "parts"))
    assert all((whole[name] == parts[name]).all() for name in whole)
    assert len(json.loads((tmp_path / "parts" / "training" / "run.json").read_text())) == 3


def test_a_truncated_newest_checkpoint_is_named_and_the_one_before_is_taken(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """B27."""
    assert train("run") == 0
    expected = losses(tmp_path / "run")
    state = tmp_path / "run" / "training" / "step-00000012" / "state.safetensors"
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    capfd.readouterr()
    assert train("run", "--resume") == 0
    told = capfd.readouterr().err
    assert "step-00000012/state.safetensors has" in told
    assert "cut short" in told
    assert "resumed from step-00000008: restored weights, optimizer, step, schedule, data" in told
    assert losses(tmp_path / "run") == expected
    assert [record["step"] for record in metrics(tmp_path / "run", "dev")] == [6, 12]


def test_what_may_not_change_is_refused_and_what_resets_is_said(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "training.max_steps=4") == 0
    capfd.readouterr()
    assert train("run", "--resume", "training.batch_tokens=300", "model.d_ff=32") == 1
    told = capfd.readouterr().err
    assert "training.batch_tokens was 400 and is now 300" in told
    assert "model.d_ff was 24 and is now 32" in told
    assert train("run", "--resume", "training.batch_tokens=300", "--reset", "data,optimizer") == 0
    told = capfd.readouterr().err
    assert "restored weights, step, schedule; reset data, optimizer; going on after step 4 at epoch 0, batch 0" in told
    assert metrics(tmp_path / "run")[-1]["step"] == 12
    assert metrics(tmp_path / "run")[-1]["tgt_padded"] <= 300


def test_a_folder_in_use_is_refused_unless_forced(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "training.max_steps=2") == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    capfd.readouterr()
    assert train("run") == 1
    assert "is not empty" in capfd.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert train("run", "training.max_steps=3", "--force") == 0
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["training.max_stps=3"], 1, "unknown key 'training.max_stps'; did you mean 'max_steps'?"),
        (["data.train=nowhere.tsv"], 1, "nowhere.tsv"),
        (["--reset", "optimiser", "--resume"], 2, "--reset: 'optimiser' is none of"),
        (["--reset", "step"], 2, "--reset goes with --resume"),
        (["--resume", "--force"], 2, "choose one"),
        (["--resum"], 2, "did you mean --resume"),
        (["training.r_drop=5", "model.dropout=0.0"], 1, "training.r_drop compares two draws of dropout"),
        (["--device", "gpu"], 1, "device 'gpu' cannot be used here"),
        (["training.precision=float16", "--device", "cpu"], 1, "float16 training needs a GPU"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, told: str
) -> None:
    """B53."""
    assert train("run", *arguments) == code
    captured = capfd.readouterr()
    assert told in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "run").exists()


def test_a_run_starts_from_a_model_with_its_tokenizer(
    train: Train, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train("first") == 0
    assert train("second", "--from", str(tmp_path / "first"), "training.seed=5", "training.max_steps=2") == 0
    assert (tmp_path / "first" / "tokenizer.model").read_bytes() == (
        tmp_path / "second" / "tokenizer.model"
    ).read_bytes()
    assert losses(tmp_path / "second")[0][1] < losses(tmp_path / "first")[0][1] - 0.1
    told = capfd.readouterr().err
    assert "step, optimizer, schedule and data start afresh" in told
    # A file that leaves the model open takes that of the folder, and goes on with it.
    open_ = tmp_path / "open.toml"
    text = (folder / "run.toml").read_text().replace('"train.tsv"', f'"{folder / "train.tsv"}"')
    before, rest = text.replace('"dev.tsv"', f'"{folder / "dev.tsv"}"').split("[model]")
    open_.write_text(before + "[training]" + rest.split("[training]", 1)[1])
    line = ["train", str(open_), "--out", str(tmp_path / "open"), "--set", "training.max_steps=2"]
    assert exit_code([*line, "--from", str(tmp_path / "first")]) == 0
    assert exit_code([*line, "--resume", "--set", "training.max_steps=3"]) == 0
    assert load_model(tmp_path / "open").config.model == load_model(tmp_path / "first").config.model
    capfd.readouterr()
    assert train("third", "--from", str(tmp_path / "first"), "model.d_ff=32") == 1
    assert "has the shape [24], and the model wants [32]" in capfd.readouterr().err


def test_pairs_that_fit_into_no_batch_are_counted(
    train: Train, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """B34: a budget of 512 and a pair of 700 tokens; and pairs over data.max_length."""
    long = " ".join(f"w{n}" for n in range(350))
    (tmp_path / "long.tsv").write_text((folder / "train.tsv").read_text() + f"{long}\t{long}\n")
    corpus = f"data.train={tmp_path / 'long.tsv'}"
    options = ["training.batch_tokens=512", "data.max_length=5000", "training.max_steps=8", "--quiet"]
    assert train("run", corpus, *options) == 0
    told = capfd.readouterr().err
    assert told.startswith("warning: 1 pairs are longer than training.batch_tokens = 512")
    assert told.count("\n") == 1
    assert all(max(r["src_padded"], r["tgt_padded"]) <= 512 for r in metrics(tmp_path / "run"))
    assert train("again", corpus, "training.max_steps=2") == 0
    assert "1 too long" in capfd.readouterr().err


def test_without_a_dev_set_nothing_is_validated_and_that_is_said(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "plain.toml").write_text((folder / "run.toml").read_text().replace('dev = "dev.tsv"\n', ""))
    assert exit_code(["train", str(folder / "plain.toml"), "--out", str(tmp_path / "run")]) == 0
    told = capfd.readouterr().err
    assert "nothing is validated" in told
    assert "holds the last model" in told
    assert not metrics(tmp_path / "run", "dev")
    line = ["train", str(folder / "plain.toml"), "--out", str(tmp_path / "none"), "--set", "training.patience=2"]
    assert exit_code(line) == 1
    assert "name one as data.dev" in capfd.readouterr().err
    assert not (tmp_path / "none").exists()
    load_model(tmp_path / "run")


def test_it_stops_when_the_metric_no_longer_gets_better(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["training.validate_every=1", "training.patience=2", "training.max_steps=50"]
    # With a rate of 0 every validation is a tie, and a tie is not better.
    assert train("run", *options, "training.schedule.peak=0.0") == 0
    assert "ended after step 3 (no better loss in 2 validations)" in capfd.readouterr().err
    assert [record["step"] for record in metrics(tmp_path / "run", "dev")] == [1, 2, 3]


def test_the_k_best_are_kept_and_the_folder_has_the_best(train: Train, tmp_path: Path) -> None:
    assert train("run", "training.validate_every=3", "training.keep_best=2", "training.schedule.peak=3e-3") == 0
    dev = sorted((record["loss"], record["step"]) for record in metrics(tmp_path / "run", "dev"))
    kept = sorted(path.name for path in (tmp_path / "run" / "best").iterdir())
    assert kept == sorted(f"step-{step:08d}" for _, step in dev[:2])
    best = load_model(tmp_path / "run" / "best" / f"step-{dev[0][1]:08d}")
    top = load_model(tmp_path / "run")
    assert top.notes["step"] == str(dev[0][1])
    assert all((a == b).all() for a, b in zip(best.model.parameters(), top.model.parameters(), strict=True))


def test_the_last_checkpoints_are_averaged_at_the_end_and_by_the_verb(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "training.average_last=3", "training.keep_last=1") == 0
    assert "holds the mean of the last 3 checkpoints (steps 4, 8, 12)" in capfd.readouterr().err
    (record,) = metrics(tmp_path / "run", "average")
    assert record["of"] == 3
    assert exit_code(["average", str(tmp_path / "run"), "--last", "3", "--out", str(tmp_path / "mean")]) == 0
    assert exit_code(["average", str(tmp_path / "run"), "--last", "3", "--out", str(tmp_path / "run"), "--force"]) == 1
    assert "cannot be resumed" in capfd.readouterr().err
    own, verb = load_model(tmp_path / "run").model, load_model(tmp_path / "mean").model
    assert all((a == b).all() for a, b in zip(own.parameters(), verb.parameters(), strict=True))
    assert verb.generator.weight is verb.embedding.weight
    assert train("mean", "--resume") == 1
    assert "is an average of checkpoints" in capfd.readouterr().err
    assert exit_code(["average", str(tmp_path / "run"), str(tmp_path / "run"), "--out", str(tmp_path / "x")]) == 1
    assert "is given twice" in capfd.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_dry_run_tells_and_writes_nothing(train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--dry-run") == 0
    told = capfd.readouterr().out
    for line in ("parameters", "target tokens per update", "updates per epoch", "time per epoch", "memory"):
        assert line in told
    assert "parameters                  9,840\n" in told
    assert "lanes, PyTorch's kernels (a C compiler and widths" in told  # its heads are eight wide
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_the_curves(train: Train, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train("run", "training.tensorboard=true", "training.max_steps=6") == 0
    events = EventAccumulator(str(tmp_path / "run" / "training" / "tensorboard")).Reload()
    curve = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert curve == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses(tmp_path / "run")]
    assert [event.step for event in events.Scalars("dev/perplexity")] == [6]


def start(folder: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "dragoman", "train", str(folder / "run.toml"), "--out", str(out)]
    for option in options:
        line += ["--set", option]
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def wait_for_steps(out: Path, steps: int) -> None:
    for _ in range(2400):
        if (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") >= steps:
            return
        time.sleep(0.05)
    raise AssertionError("training did not start")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_at_the_end_of_the_update(folder: Path, tmp_path: Path, number: int, code: int) -> None:
    """B32, once."""
    endless = ["training.max_steps=1000000", "training.save_every=1000000", "training.validate_every=1000000"]
    process = start(folder, tmp_path / "run", *endless)
    wait_for_steps(tmp_path / "run", 3)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code
    assert "--resume goes on" in told
    assert "Traceback" not in told
    (saved,) = (tmp_path / "run" / "training").glob("step-*")
    assert metrics(tmp_path / "run")[-1]["step"] == int(saved.name.removeprefix("step-"))
    load_model(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("path", [[], ["training.activation_checkpointing=true"]], ids=["lanes", "autograd"])
def test_a_second_signal_leaves_at_once(folder: Path, tmp_path: Path, path: list[str]) -> None:
    """B32, twice: here the update under way takes far longer than the test waits, most of it in one call."""
    process = start(
        folder,
        tmp_path / "run",
        *("model.d_model=1024", "model.d_ff=4096", "model.n_layers=6", "training.batch_tokens=60000"),
        *("training.save_every=1000000", "training.validate_every=1000000", *path),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if " parameters in " in line:
            break
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - sent < 5
    assert not list((tmp_path / "run" / "training").glob("step-*"))


def test_a_dev_set_can_be_taken_away_on_the_command_line(train: Train, tmp_path: Path) -> None:
    assert train("run", "data.dev=", "training.max_steps=2") == 0
    assert metrics(tmp_path / "run", "dev") == []


def test_another_corpus_under_a_run_is_noticed(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("train.tsv", "dev.tsv", "run.toml"):
        (tmp_path / name).write_text((folder / name).read_text())
    line = ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"), "--set", "training.max_steps=4"]
    assert exit_code(line) == 0
    with (tmp_path / "train.tsv").open("a") as file:
        file.write("another house\tnoch ein Haus\n" * 30)
    longer = [*line[:-1], "training.max_steps=6", "--resume"]
    assert exit_code(longer) == 1
    assert "the training corpus is not what it was when" in capfd.readouterr().err
    assert exit_code([*longer, "--reset", "data"]) == 0
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_the_step_can_be_reset_and_a_kill_after_that_finds_a_checkpoint(train: Train, tmp_path: Path) -> None:
    assert train("run", "training.max_steps=8") == 0
    assert train("run", "training.max_steps=1", "--resume", "--reset", "step,schedule") == 0
    assert [step for step, _ in losses(tmp_path / "run")] == [1]
    names = {path.name for path in (tmp_path / "run" / "training").glob("step-*")}
    assert "step-00000008" not in names
    assert {"step-00000000", "step-00000001"} & names


def test_an_earlier_run_is_not_cleared_away_for_one_that_cannot_start(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "training.max_steps=2") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for arguments, told in [
        (("--from", str(tmp_path / "typo")), "typo"),
        (("--from", str(tmp_path / "run")), "cannot be the model to start from and the folder of the new one"),
        (("training.precision=float16",), "float16"),
        ((f"data.train={tmp_path / 'typo.tsv'}",), "typo.tsv"),
    ]:
        assert train("run", "--force", *arguments) == 1
        assert told in capfd.readouterr().err
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_weights_that_are_not_finite_are_not_saved(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "training.schedule.peak=1e39", "training.save_every=1", "training.clip_norm=1.0") == 1
    assert "the weights are not finite" in capfd.readouterr().err
    assert not list((tmp_path / "run" / "training").glob("step-*"))


def test_a_dry_run_from_a_model_takes_its_sizes(train: Train, folder: Path, tmp_path: Path) -> None:
    assert train("run", "training.max_steps=1") == 0
    open_model = folder / "open.toml"
    open_model.write_text(
        (folder / "run.toml").read_text().replace("[model]\nn_layers = 1\nd_model = 16\nd_ff = 24\nn_heads = 2\n", "")
    )
    assert exit_code(["train", str(open_model), "--from", str(tmp_path / "run"), "--dry-run"]) == 0


def test_a_dry_run_without_a_finite_update_says_so(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--dry-run", "training.schedule.peak=1e38") == 1
    assert "no update could be made" in capfd.readouterr().err
