"""`dragoman train` under torchrun: what the ranks find out together is what one process finds out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Train

from dragoman.checkpoints.weights import load_tensors


@pytest.fixture
def start(train: Train, tmp_path: Path) -> Path:
    """A model that has learnt enough for its translations to have words of the references."""
    assert train("start", "training.max_steps=300", "training.schedule.peak=5e-3", "data.dev=") == 0
    return tmp_path / "start"


def validated(folder: Path, start: Path, ranks: int, out: Path, *options: str) -> dict[str, float]:
    """The record of the one validation of a run that changes nothing of `start`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    settings = ["training.max_steps=1", "training.schedule.peak=1e-12", "training.validate_bleu=true", *options]
    line = [sys.executable, *launcher, "-m", "dragoman", "train", str(folder / "run.toml"), "--quiet"]
    line += ["--from", str(start), "--out", str(out), *(word for each in settings for word in ("--set", each))]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if record["kind"] == "dev"]
    assert len(found) == 1
    return found[0]


@pytest.mark.slow
def test_ranks_validate_as_one_process_does(folder: Path, start: Path, tmp_path: Path) -> None:
    """20 dev pairs, which three ranks do not divide, and two pairs for three ranks; with a mean, and sharded."""
    few = tmp_path / "few.tsv"
    few.write_text("".join((folder / "dev.tsv").read_text().splitlines(keepends=True)[:2]))
    for case, shared in (("all", []), ("few", [f"data.dev={few}"])):
        alone = validated(folder, start, 1, tmp_path / case, *shared)
        assert alone["bleu"] > 1  # something to compare
        for ranks, options in ((3, ["training.ema=0.5"]), (2, ["training.parallel=fsdp"])):
            name = f"{case}-{ranks}"
            together = validated(folder, start, ranks, tmp_path / name, *shared, *options)
            assert together["bleu"] == alone["bleu"]
            assert together["chrf"] == alone["chrf"]
            for what in ("loss", "nll", "perplexity"):
                assert together[what] == pytest.approx(alone[what], rel=1e-6)
            # Sharded or not, the folder is a whole model.
            ours, theirs = (load_tensors(tmp_path / run / "weights.safetensors")[0] for run in (name, case))
            assert ours.keys() == theirs.keys()
            assert all(torch.allclose(ours[key], theirs[key], atol=1e-6) for key in theirs)
