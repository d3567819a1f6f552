"""A small tokenizer, and a small model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dragoman.checkpoints.store import save_model
from dragoman.model.choices import PaperSpec
from dragoman.model.transformer import Transformer
from dragoman.run import RunConfig
from dragoman.text.corpus import DataConfig
from dragoman.tokens.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

SPEC = PaperSpec(n_layers=1, d_model=16, d_ff=24, n_heads=2)
CONFIG = RunConfig(DataConfig("corpus.tsv", src_lang="en", tgt_lang="de"), model=SPEC)

MakeModel = Callable[..., Transformer]
MakeFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """300 pieces."""
    lines = [f"the {word} number {n} of {n * 7}" for n in range(60) for word in ("first", "second", "third")]
    return train_tokenizer(lines, TokenizerConfig(vocab_size=300), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make_model(tokenizer: Tokenizer) -> MakeModel:
    """`make_model(seed)`."""

    def make(seed: int = 0, spec: PaperSpec = SPEC) -> Transformer:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return spec.build(len(tokenizer), tokenizer.pad_id)

    return make


@pytest.fixture
def make_folder(tmp_path: Path, make_model: MakeModel, tokenizer: Tokenizer) -> MakeFolder:
    """`make_folder("name", seed)`: a model folder."""

    def make(name: str = "model", seed: int = 0) -> Path:
        save_model(tmp_path / name, make_model(seed), tokenizer, CONFIG)
        return tmp_path / name

    return make


@pytest.fixture
def config() -> RunConfig:
    """That of the folders."""
    return CONFIG
