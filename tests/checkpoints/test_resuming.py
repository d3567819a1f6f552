"""Where a run may write, and what may change when it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dragoman.checkpoints.metrics import Metrics
from dragoman.checkpoints.resuming import claim, continued
from dragoman.errors import ConfigError, ModelError
from dragoman.run import RunConfig
from dragoman.training.schedule import Linear


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path: Path) -> None:
    claim(tmp_path / "new", resume=False, force=False)
    claim(tmp_path, resume=False, force=False)
    (tmp_path / "config.toml").touch()
    with pytest.raises(ModelError, match=r"is not empty .*--resume .* --force"):
        claim(tmp_path, resume=False, force=False)
    claim(tmp_path, resume=True, force=False)
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"is a file"):
        claim(tmp_path / "file", resume=False, force=True)


def test_force_clears_a_run_away_and_nothing_else(tmp_path: Path) -> None:
    for name in ("config.toml", "weights.safetensors", "metrics.jsonl", "notes.txt"):
        (tmp_path / name).touch()
    for name in ("training/step-00000001", "training/data/train", "best/step-00000001"):
        (tmp_path / name).mkdir(parents=True)
    claim(tmp_path, resume=False, force=True)
    assert names(tmp_path) == ["notes.txt", "training"]
    assert names(tmp_path / "training") == ["data"]  # it knows what it was made from
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").touch()
    with pytest.raises(ModelError, match=r"something else than a run"):
        claim(tmp_path / "photos", resume=False, force=True)
    assert (tmp_path / "photos" / "one.jpg").exists()


def test_only_lengths_intervals_and_ways_may_change(config: RunConfig) -> None:
    def changed(**training: object) -> RunConfig:
        return replace(config, training=replace(config.training, **training))

    longer = changed(max_steps=7, save_every=3, patience=2)
    assert continued(config, longer) == longer
    smaller = changed(accumulation=4, activation_checkpointing=True, workers=2)  # what an error about memory advises
    assert continued(config, smaller) == smaller
    assert continued(config, config) == config
    with pytest.raises(ConfigError) as caught:
        continued(config, replace(changed(seed=9, clip_norm=1.0), model=replace(config.model, d_ff=32)))
    told = str(caught.value)
    for part in (
        "training.seed was 1 and is now 9",
        "training.clip_norm was not set and is now 1.0",
        "model.d_ff was 24",
    ):
        assert part in told
    assert "only lengths and intervals of training may change" in told


def test_what_was_left_to_us_stays_as_it_was_chosen(config: RunConfig) -> None:
    saved = replace(config, training=replace(config.training, precision="bfloat16", lanes=2))
    assert continued(saved, config) == saved
    with pytest.raises(ConfigError, match=r"training.precision was 'bfloat16' and is now 'float32'"):
        continued(saved, replace(config, training=replace(config.training, precision="float32")))


def test_a_reset_frees_what_depends_on_it(config: RunConfig) -> None:
    other = replace(config, training=replace(config.training, schedule=Linear(peak=1e-3)))
    with pytest.raises(ConfigError, match=r"training\.schedule\.kind"):
        continued(config, other)
    assert continued(config, other, frozenset({"schedule"})) == other
    moved = replace(config, data=replace(config.data, train="other.tsv"))
    with pytest.raises(ConfigError, match=r"data\.train"):
        continued(config, moved, frozenset({"schedule"}))
    assert continued(config, moved, frozenset({"data"})) == moved


def test_metrics_go_back_to_a_step_and_forget_a_torn_line(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        metrics.append({"kind": "train", "step": step, "loss": float("nan") if step == 1 else 0.5})
    metrics.append({"kind": "dev", "step": 1, "bleu": 2.0})
    metrics.append({"kind": "dev", "step": 2, "bleu": 3.0})
    with metrics.path.open("a") as file:
        file.write('{"kind": "train", "st')
    metrics.go_back_to(2, 1)
    records = list(metrics.records())
    assert [(record["kind"], record["step"]) for record in records] == [("train", 1), ("train", 2), ("dev", 1)]
    assert records[0]["loss"] is None
    assert metrics.path.read_text().count("\n") == 3
