"""Ten kills at random instants (tests/system/kill.py does two hundred), and a rank killed under a launcher."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import kill


@pytest.mark.slow
def test_ten_kills_change_no_loss(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "system" / "kill.py"), "--times", "10"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 kills" in done.stdout
    assert "0 records differ" in done.stdout


LAUNCHERS = {
    "one node": [["--standalone", "--nproc-per-node", "2"]],
    # Each launcher counts the failures of its own ranks alone.
    "two nodes": [["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)] for node in range(2)],
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks by /proc")
@pytest.mark.parametrize("nodes", LAUNCHERS)
def test_a_job_whose_rank_is_killed_starts_again_and_loses_nothing(tmp_path: Path, nodes: str) -> None:
    (tmp_path / "train.tsv").write_text(kill.corpus(0, 600))
    (tmp_path / "dev.tsv").write_text(kill.corpus(600, 640))
    (tmp_path / "run.toml").write_text(kill.CONFIG)
    train = ["-m", "dragoman", "train", str(tmp_path / "run.toml"), "--quiet"]
    train += ["--set", "training.max_steps=200", "--set", "training.lanes=1", "--out"]

    def start(out: Path) -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free.getsockname()[1]}"]
        if nodes == "one node":
            meeting = []
        return [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--max-restarts",
                    "1",
                    *meeting,
                    *node,
                    *train,
                    str(out),
                ],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for node in LAUNCHERS[nodes]
        ]

    for job in start(tmp_path / "peace"):
        told = job.communicate(timeout=240)[1]
        assert job.returncode == 0, told

    out = tmp_path / "killed"
    jobs = start(out)
    try:
        deadline = time.monotonic() + 120
        while not list((out / "training").glob("step-*")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(rank_of(out, 1), signal.SIGKILL)
        stderr = [job.communicate(timeout=120)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * len(jobs), stderr
    assert re.search(r"Signal 9|SIGKILL|exitcode *: *-9", "".join(stderr)), stderr
    ours, theirs = kill.records(out), kill.records(tmp_path / "peace")
    assert ours == theirs
    assert max(step for kind, step in ours if kind == "train") == 200


def rank_of(out: Path, rank: int) -> int:
    """The process that trains into `out` as this rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line, environment = ((folder / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:
            continue  # it has ended, or is not ours
        if str(out).encode() in line and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    raise AssertionError(f"no process trains into {out} as rank {rank}")
