"""Small random models, with sizes that differ from one another so that a swapped axis cannot hide."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dragoman.model.transformer import Transformer, TransformerConfig

MakeModel = Callable[..., Transformer]


@pytest.fixture
def make_model() -> MakeModel:
    """`make_model(vocab_size, seed, sharpness)`: sharper models have likelier favourites, and end at odd places."""

    def make(vocab_size: int = 11, seed: int = 0, sharpness: float = 3.0, pad_id: int = 0) -> Transformer:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = TransformerConfig(vocab_size, n_layers=2, d_model=12, d_ff=20, n_heads=3, d_v=5, pad_id=pad_id)
            model = Transformer(config).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "bias" in name:
                        parameter.normal_(std=0.3)
                model.embedding.weight.mul_(sharpness)
        return model

    return make


@pytest.fixture
def pad_batch() -> Callable[[list[list[int]]], tuple[torch.Tensor, torch.Tensor]]:
    """Sources of several lengths -> src and src_mask [B, S]."""

    def pad(sources: list[list[int]], filler: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, sources))
        src = torch.tensor([source + [filler] * (longest - len(source)) for source in sources])
        mask = torch.tensor([[True] * len(source) + [False] * (longest - len(source)) for source in sources])
        return src, mask

    return pad


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The searches of reference.py, which is no test itself."""
    spec = importlib.util.spec_from_file_location("decoding_reference", Path(__file__).with_name("reference.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
