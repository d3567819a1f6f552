"""All or nothing: full disks, folders that cannot be written to, and kills half-way."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dragoman.checkpoints.atomic import LITTER, replacing, sweep, write_file, write_folder
from dragoman.checkpoints.weights import load_tensors, save_tensors
from dragoman.errors import ModelError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"one")
    write_file(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two"
    assert names(tmp_path) == ["a"]


def test_a_full_disk_is_said_plainly_and_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def write() -> None:
        with replacing(tmp_path / "a") as temporary:
            temporary.write_bytes(b"ne")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelError, match=r"No space left on device; free some space\. What was there before is intact"):
        write()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


FILLS_THE_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from dragoman.checkpoints import snapshots
from dragoman.errors import ModelError
run = Path(sys.argv[1])
small, large = {"x": torch.ones(10)}, {"x": torch.ones(100_000)}
snapshots.save(run, 1, small, small, {})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    snapshots.save(run, 2, small, large, {})
except ModelError as error:
    print(error)
"""


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_and_no_litter(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILLS_THE_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "training/step-00000002/state.safetensors cannot be written: " in done.stdout
    assert "File too large" in done.stdout
    assert names(tmp_path / "training") == ["step-00000001"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "a").write_text("1")
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(ModelError, match=r"Read-only file system"):
        write_folder(tmp_path / "step", fill)
    assert names(tmp_path) == []
    write_folder(tmp_path / "step", lambda folder: (folder / "a").write_text("1") and None)
    write_folder(tmp_path / "step", lambda folder: (folder / "b").write_text("2") and None)
    assert names(tmp_path) == ["step"]
    assert names(tmp_path / "step") == ["b"]


def test_a_folder_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot be written"):
        write_folder(tmp_path / "file" / "step", lambda folder: None)


def test_what_a_kill_left_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / f"{LITTER}12-step-1").mkdir()
    (tmp_path / f"{LITTER}12-step-1" / "x").touch()
    (tmp_path / f"{LITTER}12-file").touch()
    (tmp_path / "kept").touch()
    sweep(tmp_path)
    assert names(tmp_path) == ["kept"]


def test_tensors_that_are_not_contiguous_come_back_as_they_are(tmp_path: Path) -> None:
    x = torch.arange(12.0).view(3, 4).t()
    save_tensors(tmp_path / "x.safetensors", {"x": x, "empty": torch.zeros(0, 2)}, {"note": "ä"})
    tensors, metadata = load_tensors(tmp_path / "x.safetensors")
    assert torch.equal(tensors["x"], x)
    assert tensors["empty"].shape == (0, 2)
    assert metadata["note"] == "ä"


def test_weights_have_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    save_tensors(tmp_path / "weights.safetensors", {"w": torch.zeros(3)}, {})
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "any").stat().st_mode
