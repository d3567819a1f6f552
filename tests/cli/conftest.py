"""A corpus of short sentences, and the command that trains on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.cli.main import exit_code

CONFIG = """
[data]
train = "train.tsv"
dev = "dev.tsv"
src_lang = "en"
tgt_lang = "de"
[tokenizer]
vocab_size = 300
[model]
n_layers = 1
d_model = 16
d_ff = 24
n_heads = 2
[training]
max_steps = 12
batch_tokens = 400
log_every = 1
validate_every = 6
validate_bleu = false
save_every = 4
precision = "float32"
lanes = 1
[training.schedule]
kind = "constant"
peak = 1e-3
"""

Train = Callable[..., int]


def pairs(start: int, end: int) -> str:
    words = ["red", "green", "blue", "old", "new", "big", "small", "fast", "slow", "kind"]
    rows = []
    for n in range(start, end):
        chosen = [words[(n * k + k) % 10] for k in range(2, 3 + n % 6)]
        rows.append(f"the {' '.join(chosen)} house {n}\tdas {' '.join(reversed(chosen))} Haus {n}\n")
    return "".join(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus and its TOML file."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.tsv").write_text(pairs(0, 200))
    (folder / "dev.tsv").write_text(pairs(200, 220))
    (folder / "run.toml").write_text(CONFIG)
    return folder


@pytest.fixture
def train(folder: Path, tmp_path: Path) -> Train:
    """`train("name", "training.max_steps=5", "--resume")`: keys are set, options passed on."""

    def run(out: str, *arguments: str) -> int:
        line = ["train", str(folder / "run.toml"), "--out", str(tmp_path / out)]
        for argument in arguments:
            line += ["--set", argument] if "=" in argument else [argument]
        return exit_code(line)

    return run
