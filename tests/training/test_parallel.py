"""Several ranks on one machine: the curve of one process, and no hang whatever happens to one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dragoman.training import parallel
from dragoman.training.watchdog import Watchdog

JOB = Path(__file__).with_name("job.py")


def launch(ranks: int, *options: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The job of job.py on so many ranks (1: without a launcher)."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, str(JOB), *map(str, options)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def losses(out: Path) -> list[list[float]]:
    return json.loads((out / "losses.json").read_text())


def test_a_process_alone_is_a_world_of_one() -> None:
    world = parallel.World()
    assert world.is_first
    assert world.sum([1.5, 2.0]) == [1.5, 2.0]
    world.barrier()


@pytest.mark.slow
def test_two_and_four_ranks_have_the_curve_of_one(tmp_path: Path) -> None:
    """61 pairs in batches of 37 tokens: the ranks divide neither, and often some have nothing to do."""
    alone = launch(1, tmp_path / "1")
    assert alone.returncode == 0, alone.stderr
    expected = losses(tmp_path / "1")
    assert len(expected) == 6
    for ranks, options in ((2, ["--autograd"]), (4, []), (2, ["--parallel", "fsdp"])):
        out = tmp_path / f"{ranks}{''.join(options)}"
        done = launch(ranks, out, *options)
        assert done.returncode == 0, done.stderr
        for ours, theirs in zip(losses(out), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_muons_two_ranks_have_the_curve_of_one(tmp_path: Path) -> None:
    for ranks in (1, 2):
        done = launch(ranks, tmp_path / str(ranks), "--muon")
        assert done.returncode == 0, done.stderr
    for ours, theirs in zip(losses(tmp_path / "2"), losses(tmp_path / "1"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_ranks_with_other_numbers_of_passes_and_longer_tables_have_the_curve_of_one(tmp_path: Path) -> None:
    """Sharded weights are put together in every pass, by all ranks; tables are no rank's business but its own."""
    options = ["--batch-tokens", 300, "--uneven", "--autograd"]
    alone = launch(1, tmp_path / "1", *options)
    assert alone.returncode == 0, alone.stderr
    for how in ("ddp", "fsdp"):
        done = launch(2, tmp_path / how, *options, "--parallel", how, "--hang-seconds", 20)
        assert done.returncode == 0, done.stderr
        for ours, theirs in zip(losses(tmp_path / how), losses(tmp_path / "1"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_bfloat16_has_the_same_curve_to_a_hundredth(tmp_path: Path) -> None:
    for ranks in (1, 2):
        done = launch(ranks, tmp_path / str(ranks), "--precision", "bfloat16")
        assert done.returncode == 0, done.stderr
    for ours, theirs in zip(losses(tmp_path / "2"), losses(tmp_path / "1"), strict=True):
        assert ours[:3] == pytest.approx(theirs[:3], rel=1e-2)


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """FSDP2's state is saved whole, so it loads anywhere: 6 updates on one rank = 3 on two sharded + 3 on one."""
    for done in (
        launch(1, tmp_path / "whole", "--autograd"),
        launch(2, tmp_path / "half", "--parallel", "fsdp", "--steps", 3),
        launch(1, tmp_path / "rest", "--autograd", "--load", tmp_path / "half"),
        launch(2, tmp_path / "back", "--parallel", "fsdp", "--load", tmp_path / "half"),
    ):
        assert done.returncode == 0, done.stderr
    for name in ("rest", "back"):
        together = losses(tmp_path / "half") + losses(tmp_path / name)
        for ours, theirs in zip(together, losses(tmp_path / "whole"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "told"), [("raise", "RuntimeError: this rank has had enough"), ("exit", "exitcode")])
def test_a_rank_that_dies_ends_the_job(tmp_path: Path, fault: str, told: str) -> None:
    begun = time.monotonic()
    done = launch(2, tmp_path / "out", "--fault", fault, "--steps", 1000)
    assert done.returncode != 0
    assert told in done.stderr
    assert time.monotonic() - begun < 60  # most of it is starting; the 30 s begin at the fault


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("gradient", "gradients of rank 1 are not those of rank 0: embedding.weight has the norm"),
        (
            "weight",
            "weights of rank 1 are not those of rank 0: encoder.layers.1.feed_forward.outer.weight has the norm",
        ),
    ],
)
def test_ranks_that_drift_apart_are_told_which_when_and_where(tmp_path: Path, fault: str, told: str) -> None:
    done = launch(2, tmp_path / "out", "--fault", fault, "--steps", 5)
    assert done.returncode != 0
    assert told in done.stderr
    assert "The usual causes" in done.stderr


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job_with_every_stack(tmp_path: Path) -> None:
    done = launch(2, tmp_path / "out", "--fault", "hang", "--steps", 1000, "--hang-seconds", 4)
    assert done.returncode != 0
    assert "rank 1 of 2: no sign of life for 4 seconds" in done.stderr
    assert "rank 0 of 2: no sign of life for 4 seconds" in done.stderr
    assert done.stderr.count("in main") >= 2  # both ranks show where they stand
    assert "watchdog" in done.stderr


HANGS = """
import sys, time
from dragoman.training.watchdog import Watchdog
dog = Watchdog(float(sys.argv[1]))
dog.start()
for _ in range(5):
    time.sleep(0.2)
    dog.beat()
print("alive", flush=True)
def stuck():
    time.sleep(60)
stuck()
"""


def test_a_process_that_hangs_says_where_and_ends() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS, "0.8"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == "alive\n"  # beats kept it going
    assert "no sign of life for 0.8 seconds" in done.stderr
    assert "in stuck" in done.stderr


def test_a_watchdog_that_is_stopped_lets_go() -> None:
    dog = Watchdog(0.2)
    dog.start()
    dog.stop()
    time.sleep(0.5)
    assert not dog.thread.is_alive()


class Board:
    """A store, as the process group has one."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_the_beats_of_the_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one rank validates for long, those that wait for it are not thought to hang."""
    board, ended = Board(), []
    waiting = Watchdog(0.4, rank=1, size=2, store=board)
    monkeypatch.setattr(waiting, "_end", lambda: ended.append(1))
    waiting.start()
    for beats in range(12):
        board.set("beat-0", str(beats))
        time.sleep(0.1)
    assert not ended
    time.sleep(1.0)
    waiting.stop()
    assert ended


def test_signals_are_those_that_schedulers_send() -> None:
    from dragoman.training.loop import SIGNALS

    assert set(SIGNALS) == {signal.SIGINT, signal.SIGTERM}


@pytest.mark.slow
def test_a_job_that_is_refused_says_so_once(tmp_path: Path) -> None:
    """B53 under a launcher, which starts it twice: not resumed the second time, and nothing but the sentence."""
    (tmp_path / "train.tsv").write_text("a b\tb a\n" * 20)
    (tmp_path / "run.toml").write_text('[data]\ntrain = "train.tsv"\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.toml").write_text("[data]\n")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "dragoman", "train", tmp_path / "run.toml", "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    ours = done.stderr.split("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")[0]
    assert ours.count("error: ") == 2, ours
    assert ours.count("is not empty") == 2
    assert ours.count("Traceback") == 1  # the launcher's own
    assert (tmp_path / "out" / "config.toml").read_text() == "[data]\n"
