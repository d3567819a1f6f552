"""Lengths as real corpora have them, and corpora made of them."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dragoman.tokens.tokenizer import TokenizerConfig, train_tokenizer

Lengths = tuple[NDArray[np.int64], NDArray[np.int64]]


def likely(n: int, seed: int = 0, longest: int = 120) -> Lengths:
    """Lengths of n made-up pairs: long tails, targets that follow their sources."""
    draw = np.random.default_rng(seed)
    src = np.clip(draw.gamma(3.0, 5.0, n).astype(np.int64), 1, longest)
    tgt = np.clip((src * draw.normal(1.1, 0.2, n) + draw.normal(0, 1.5, n)).astype(np.int64), 1, longest)
    return src, tgt


@pytest.fixture(scope="session")
def corpora(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lengths]:
    """Token lengths of the real training sets under a joint BPE of 8,000."""
    data = shared / "data"
    pairs = {
        "multi30k": list(
            zip(
                *(
                    gzip.decompress((data / "multi30k-en-de" / f"train.{lang}.gz").read_bytes()).decode().split("\n")
                    for lang in ("en", "de")
                ),
                strict=True,
            )
        )
    }
    tsv = gzip.decompress((data / "tatoeba-en-zh" / "train.tsv.gz").read_bytes()).decode()
    pairs["tatoeba"] = [tuple(line.split("\t")[:2]) for line in tsv.split("\n") if line]  # type: ignore[misc]
    lengths = {}
    for name, rows in pairs.items():
        sides = list(zip(*(row for row in rows if row[0]), strict=True))
        folder = tmp_path_factory.mktemp(name)
        tokenizer = train_tokenizer((text for side in sides for text in side), TokenizerConfig(), folder)
        src, tgt = (np.array([len(ids) for ids in tokenizer.encode_batch(side)], dtype=np.int64) for side in sides)
        lengths[name] = (src, tgt)
    return lengths
