"""Kills a training run at random instants, resumes it each time, and compares with a run that was never killed.

    python tests/system/kill.py --times 200 [--seed 1]

Exits with 0 if every step has the losses, to the bit, of the run that was left in peace. `.ci/run` does this with 10
kills, through tests/system/test_kill.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = """
[data]
train = "train.tsv"
dev = "dev.tsv"
[tokenizer]
vocab_size = 300
[model]
n_layers = 1
d_model = 32
d_ff = 64
n_heads = 2
dropout = 0.2
[training]
batch_tokens = 600
accumulation = 2
workers = 1
lanes = 2
log_every = 1
validate_every = 25
validate_bleu = false
save_every = 5
keep_last = 2
precision = "bfloat16"
hang_seconds = 120
[training.schedule]
kind = "inverse_sqrt"
warmup_steps = 50
peak = 2e-3
"""


def corpus(start: int, end: int) -> str:
    """Lines of made-up pairs."""
    words = ["red", "green", "blue", "old", "new", "big", "small", "fast", "slow", "kind"]
    drawn = random.Random(start)
    rows = []
    for n in range(start, end):
        chosen = drawn.choices(words, k=drawn.randint(2, 9))
        rows.append(f"the {' '.join(chosen)} house {n}\tdas {' '.join(reversed(chosen))} Haus {n}\n")
    return "".join(rows)


def start(folder: Path, out: Path, steps: int, *, resume: bool) -> subprocess.Popen[bytes]:
    """A training process of `steps` updates in all."""
    line = [sys.executable, "-m", "dragoman", "train", str(folder / "run.toml"), "--out", str(out), "--quiet"]
    line += ["--set", f"training.max_steps={steps}", *(["--resume"] if resume else [])]
    return subprocess.Popen(line, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})


def records(out: Path) -> dict[tuple[str, int], dict[str, float]]:
    """The lines of metrics.jsonl by kind and step, without their times. Raises ValueError for one that comes twice."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        key = record.pop("kind"), record["step"]
        record.pop("seconds", None)
        if key in found:
            raise ValueError(f"{key} stands in metrics.jsonl twice")
        found[key] = record
    return found


def run(times: int, seed: int) -> int:
    """Kill `times` times; 0 if the losses are those of the run that was not killed."""
    drawn = random.Random(seed)
    kills = progress = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.tsv").write_text(corpus(0, 600))
        (folder / "dev.tsv").write_text(corpus(600, 640))
        (folder / "run.toml").write_text(CONFIG)
        # How long a process takes to start and to make its updates decides when to kill and how far to go.
        begun = time.monotonic()
        probe = start(folder, folder / "probe", 5, resume=False)
        if probe.wait(timeout=600):
            return fail("the first run failed", probe)
        start_up = time.monotonic() - begun
        target = 20 + 8 * times
        killed = folder / "killed"
        while kills < times:
            process = start(folder, killed, target, resume=True)
            # From the first import to well into the updates; some kills hit the preparation, some the saving.
            wait = drawn.uniform(0.2, 1.6) * start_up
            try:
                code = process.wait(timeout=wait)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
            else:
                if code:
                    return fail(f"a resume after {kills} kills failed", process)
                target += 8 * times
            finally:
                if process.stderr is not None:
                    process.stderr.close()
            reached = max((int(p.name[5:]) for p in (killed / "training").glob("step-*")), default=0)
            if reached != progress and kills % 10 == 0:
                print(f"{kills} kills, step {reached}", file=sys.stderr, flush=True)
            progress = reached
        last = start(folder, killed, progress + 10, resume=True)
        if last.wait(timeout=600):
            return fail("the last resume failed", last)
        whole = start(folder, folder / "whole", progress + 10, resume=False)
        if whole.wait(timeout=3600):
            return fail("the run in peace failed", whole)
        ours, theirs = records(killed), records(folder / "whole")
        wrong = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
        # The validation at the end of a shorter target is one that the run in peace never made.
        wrong = [key for key in wrong if not (key[0] == "dev" and key not in theirs)]
        litter = [path.name for path in (killed / "training").glob(".tmp-*")]
    print(f"{kills} kills, {progress + 10} updates: {len(wrong)} records differ, {len(litter)} leftovers")
    for key in wrong[:10]:
        print(f"  {key}: {ours.get(key)} after kills, {theirs.get(key)} in peace")
    return 1 if wrong or litter or not ours else 0


def fail(what: str, process: subprocess.Popen[bytes]) -> int:
    """Say what went wrong, with what the process said."""
    told = process.stderr.read().decode() if process.stderr is not None and not process.stderr.closed else ""
    print(f"{what}: exit code {process.returncode}\n{told}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200, help="how often to kill")
    parser.add_argument("--seed", type=int, default=1, help="of the instants")
    options = parser.parse_args()
    sys.exit(run(options.times, options.seed))
