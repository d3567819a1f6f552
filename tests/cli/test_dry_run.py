"""The folder of `dragoman train --dry-run`: made once on a machine, and gone whatever happens."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from dragoman.cli.dry_run import FOLDER, ending_in_order, passing_folder
from dragoman.training.parallel import World
from dragoman.training.rendezvous import Start


@pytest.fixture
def start() -> Start:
    store = HashStore()
    return Start("dry", store, store)


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_ranks_of_a_machine_share_the_folder_of_the_first(start: Start, tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def prepared(rank: int) -> Path:
        with passing_folder(World(rank, 3, start=start)) as folder:
            if rank == 0:
                (folder / "ids").touch()
            together.wait(30)
            assert (folder / "ids").exists()
        return folder

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(prepared, range(3)))) == 1
    assert not [*tmp_path.iterdir()]


def test_a_first_rank_that_fails_leaves_the_others_time_to_see_it(start: Start, tmp_path: Path) -> None:
    together = threading.Barrier(2)

    def prepared(rank: int) -> None:
        with passing_folder(World(rank, 2, start=start)) as folder:
            together.wait(30)
            if rank == 0:
                raise ValueError("no pair")
            time.sleep(0.3)
            (folder / "data").mkdir(parents=True)  # anew, were it gone

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(prepared, rank) for rank in range(2))
    assert isinstance(first.exception(), ValueError)
    assert second.exception() is None
    assert not [*tmp_path.iterdir()]


def test_a_rank_of_another_machine_has_its_own(start: Start, tmp_path: Path) -> None:
    start.say(FOLDER, str(tmp_path / "elsewhere"))
    with passing_folder(World(1, 2, start=start)) as folder:
        assert folder.is_dir()
    assert not [*tmp_path.iterdir()]


def test_a_rank_that_does_not_own_it_leaves_it_where_it_is(start: Start, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    start.say(FOLDER, str(tmp_path / "shared"))
    with pytest.raises(RuntimeError), passing_folder(World(1, 2, start=start)):
        raise RuntimeError
    assert (tmp_path / "shared").is_dir()


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_is_left_after_a_signal(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("dragoman.cli.dry_run.PATIENCE", 0.2)  # the other rank never comes
    before = signal.getsignal(signal.SIGTERM)

    def prepare() -> None:
        with ending_in_order(), passing_folder(World(0, size, start=start)) as folder:
            (folder / "ids").touch()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(SystemExit) as ended:
        prepare()
    assert ended.value.code == 143
    assert not [*tmp_path.iterdir()]
    assert signal.getsignal(signal.SIGTERM) == before
