"""A small corpus of random ids, a small model, and a loop over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from dragoman.batches.stream import Stream
from dragoman.model.transformer import Transformer, TransformerConfig
from dragoman.tokens.paired import PairedIds
from dragoman.training.feed import Feed, Ids
from dragoman.training.loop import Loop
from dragoman.training.options import TrainingConfig
from dragoman.training.schedule import Constant

IDS = Ids(pad_id=0, bos_id=2, eos_id=3)
VOCABULARY = 23

MakeLoop = Callable[..., Loop]
MakeFeed = Callable[..., Feed]


@pytest.fixture(scope="session")
def corpus() -> PairedIds:
    """150 pairs of unequal lengths; ids 4 to 22."""
    random = np.random.default_rng(5)
    lengths = random.integers(1, 14, size=(150, 2))
    return PairedIds.from_lists(
        [random.integers(4, VOCABULARY, size=n).tolist() for n, _ in lengths],
        [random.integers(4, VOCABULARY, size=m).tolist() for _, m in lengths],
    )


@pytest.fixture
def make_feed(corpus: PairedIds) -> MakeFeed:
    """`make_feed(accumulation=2, rank=0, size=1, workers=0, batch_tokens=150)`."""

    def make(batch_tokens: int = 150, seed: int = 1, **options: int) -> Feed:
        return Feed(corpus, Stream(corpus.src_lengths, corpus.tgt_lengths, batch_tokens, seed), IDS, **options)

    return make


def small_model(dropout: float = 0.0) -> Transformer:
    """The same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Transformer(TransformerConfig(VOCABULARY, n_layers=2, d_model=12, d_ff=20, n_heads=3, dropout=dropout))


@pytest.fixture
def ids() -> Ids:
    """The special ids of the corpus."""
    return IDS


@pytest.fixture
def make_loop() -> MakeLoop:
    """`make_loop(dropout=0.1, model=None, total_steps=None, warn=…, max_steps=5, …)`: what is not the loop's goes into
    the config."""

    def make(
        dropout: float = 0.0,
        model: torch.nn.Module | None = None,
        total_steps: int | None = None,
        warn: Callable[[str], None] = print,
        **config: object,
    ) -> Loop:
        options = TrainingConfig(
            max_steps=10, batch_tokens=150, precision="float32", lanes=1, schedule=Constant(peak=1e-3)
        )
        return Loop(
            small_model(dropout) if model is None else model,
            replace(options, **config),
            d_model=12,
            pad_id=IDS.pad_id,
            total_steps=total_steps,
            warn=warn,
        )

    return make
