"""Checkpoints: the newest that is intact is taken, what is damaged is named, and old ones go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dragoman.checkpoints import snapshots
from dragoman.errors import ModelError

STATE = {"optimizer.x.exp_avg": torch.ones(5)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save(run: Path, *steps: int) -> None:
    for step in steps:
        snapshots.save(run, step, {"x": torch.full((5,), float(step))}, STATE, {"note": step})


def test_the_newest_comes_back(tmp_path: Path) -> None:
    save(tmp_path, 9, 10, 100_000_000)
    said: list[str] = []
    snapshot = snapshots.newest_intact(tmp_path, said.append)
    assert snapshot is not None
    assert snapshot.step == 100_000_000
    assert snapshot.facts == {"note": 100_000_000}
    assert torch.equal(snapshot.weights["x"], torch.full((5,), 1e8))
    assert torch.equal(snapshot.state["optimizer.x.exp_avg"], torch.ones(5))
    assert not said


@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["half", "flip", "gone"])
def test_a_damaged_one_is_named_and_the_one_before_is_taken(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1, 2)
    path = tmp_path / "training" / "step-00000002" / name
    data = bytearray(path.read_bytes())
    if damage == "half":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "gone":
        path.unlink()
    else:
        data[len(data) // 2] ^= 0x40
        path.write_bytes(data)
    said: list[str] = []
    snapshot = snapshots.newest_intact(tmp_path, said.append)
    assert snapshot is not None
    assert snapshot.step == 1
    assert name in said[0] if damage != "flip" or name != "manifest.json" else "step-00000002" in said[0]
    assert "step-00000002 is passed over; the one before is taken" in said[-1]


def test_where_none_is_intact_it_does_not_start_over_in_silence(tmp_path: Path) -> None:
    assert snapshots.newest_intact(tmp_path, print) is None
    save(tmp_path, 1)
    (tmp_path / "training" / "step-00000001" / "state.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no checkpoint under .* is intact"):
        snapshots.newest_intact(tmp_path, lambda message: None)


def test_the_older_ones_keep_their_weights_and_then_go(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / "training" / ".tmp-77-step-00000006").mkdir()
    snapshots.prune(tmp_path, newest=5, keep=2, keep_weights=4)
    assert names(tmp_path / "training") == [f"step-0000000{n}" for n in (2, 3, 4, 5)]
    for folder, whole in zip(snapshots.folders(tmp_path), (True, True, False, False), strict=True):
        assert (folder / "state.safetensors").exists() == whole
        assert bool(snapshots.faults(folder)) != whole
        assert not snapshots.faults(folder, resuming=False)
    snapshots.prune(tmp_path, newest=5, keep=1, keep_weights=1)
    assert [snapshots.step_of(folder) for folder in snapshots.folders(tmp_path)] == [5]


def test_a_damaged_one_does_not_count_among_those_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    path = tmp_path / "training" / "step-00000003" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    snapshots.prune(tmp_path, newest=3, keep=2, keep_weights=1)
    assert [snapshots.step_of(folder) for folder in snapshots.folders(tmp_path)] == [3, 2, 1]


def test_what_a_resume_has_passed_over_goes_when_there_is_a_new_one(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 7)
    path = tmp_path / "training" / "step-00000007" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")  # of the right size
    snapshots.prune(tmp_path, newest=2, keep=2, keep_weights=1)
    assert [snapshots.step_of(folder) for folder in snapshots.folders(tmp_path)] == [2, 1]


def test_a_mean_is_of_regular_checkpoints_that_are_whole(tmp_path: Path) -> None:
    save(tmp_path, 0, 2, 4, 6)
    for step in (3, 7):
        snapshots.save(tmp_path, step, {"x": torch.ones(5)}, STATE, {"interrupted": True})
    path = tmp_path / "training" / "step-00000004" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    said: list[str] = []

    def steps(n: int) -> list[int]:
        return [snapshots.step_of(folder) for folder in snapshots.for_mean(tmp_path, n, said.append)]

    assert steps(2) == [7, 6]
    assert not said
    assert steps(5) == [7, 6, 2]
    assert "left out of the mean" in said[0]
    assert "step-00000004" in said[0]
    snapshots.prune(tmp_path, newest=7, keep=1, keep_weights=3)
    assert [snapshots.step_of(folder) for folder in snapshots.folders(tmp_path)] == [7, 6, 4]


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = tmp_path / "training" / "step-00000001" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 9'))
    assert "format_version 9" in snapshots.faults(manifest.parent)[0]


def test_whatever_byte_of_a_manifest_is_wrong_the_one_before_is_taken(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    path = tmp_path / "training" / "step-00000002" / "manifest.json"
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x04]) + data[place + 1 :])
        snapshot = snapshots.newest_intact(tmp_path, lambda message: None)
        assert snapshot is not None
        if snapshot.step != 1:
            assert snapshots.faults(path.parent) == []  # a byte that says nothing: a space, or a name nobody reads
