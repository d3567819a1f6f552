"""Model folders: what goes in comes out, wherever they are, and what is wrong with one is said, all of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dragoman.checkpoints.store import load_model, save_model
from dragoman.checkpoints.weights import unique
from dragoman.errors import ModelError
from dragoman.model.choices import PaperSpec
from dragoman.model.transformer import Transformer
from dragoman.run import RunConfig
from dragoman.tokens.tokenizer import Tokenizer

MakeModel = Callable[..., Transformer]
MakeFolder = Callable[..., Path]


def test_a_model_comes_back_as_it_went(make_folder: MakeFolder, make_model: MakeModel, config: RunConfig) -> None:
    folder = make_folder(seed=3)
    loaded = load_model(folder)
    assert loaded.config == config
    assert not loaded.model.training
    for (name, a), b in zip(make_model(3).state_dict().items(), loaded.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the first number")) == "the first number"


def test_loading_leaves_the_callers_random_numbers_alone(make_folder: MakeFolder) -> None:
    folder = make_folder()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    load_model(folder)
    assert torch.equal(torch.rand(3), expected)


def test_tied_weights_are_saved_once_and_come_back_tied(make_folder: MakeFolder) -> None:
    folder = make_folder()
    with safe_open(folder / "weights.safetensors", "pt") as file:
        names, metadata = set(file.keys()), file.metadata()
    assert "embedding.weight" in names
    assert "generator.weight" not in names
    assert json.loads(metadata["tied"]) == {"generator.weight": "embedding.weight"}
    model = load_model(folder).model
    assert model.generator.weight is model.embedding.weight


def test_a_folder_can_be_moved_and_the_config_stands_at_its_top(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder()
    assert (folder / "config.toml").read_text().startswith("format_version = 1\n")
    moved = tmp_path / "elsewhere" / "häuser 房"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    assert load_model(moved).config.data.tgt_lang == "de"


def test_a_truncated_file_is_named(make_folder: MakeFolder) -> None:
    folder = make_folder()
    weights = folder / "weights.safetensors"
    for size in (weights.stat().st_size // 2, 5, 0):
        weights.write_bytes(weights.read_bytes()[:size])
        with pytest.raises(ModelError, match=r"weights\.safetensors is damaged or cut short"):
            load_model(folder)


def test_a_pickle_is_refused(make_folder: MakeFolder) -> None:
    folder = make_folder()
    torch.save({"embedding.weight": torch.zeros(2)}, folder / "weights.safetensors")
    with pytest.raises(ModelError, match="damaged"):
        load_model(folder)


def test_every_wrong_tensor_is_named_at_once(make_folder: MakeFolder) -> None:
    folder = make_folder()
    path = folder / "weights.safetensors"
    tensors = load_file(path)
    del tensors["encoder.layers.0.feed_forward.inner.bias"]
    tensors["decoder.layers.0.feed_forward.inner.bias"] = torch.zeros(7)
    tensors["embedding.weight"] = torch.zeros(299, 16)
    tensors["surprise"] = torch.zeros(1)
    save_file(tensors, path)
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    told = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    assert "lacks the tensor encoder.layers.0.feed_forward.inner.bias of shape [24]" in told
    assert "decoder.layers.0.feed_forward.inner.bias has the shape [7], and the model wants [24]" in told
    assert "a vocabulary of 299" in told
    assert f"the tokenizer in {folder} has 300" in told
    assert "surprise" in told


def test_tied_weights_that_differ_in_the_file_are_refused(make_folder: MakeFolder) -> None:
    folder = make_folder()
    path = folder / "weights.safetensors"
    tensors = load_file(path)
    tensors["generator.weight"] = tensors["embedding.weight"] + 1
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"generator\.weight and embedding\.weight are one matrix"):
        load_model(folder)


def test_a_newer_format_is_refused_plainly(make_folder: MakeFolder) -> None:
    folder = make_folder()
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("format_version = 1", "format_version = 2"))
    with pytest.raises(ModelError, match="format_version is 2"):
        load_model(folder)


@pytest.mark.parametrize(
    ("missing", "told"),
    [("config.toml", "has no config.toml"), ("weights.safetensors", "weights.safetensors is missing")],
)
def test_what_is_missing_is_named(make_folder: MakeFolder, missing: str, told: str) -> None:
    folder = make_folder()
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=told):
        load_model(folder)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is not a folder"):
        load_model(tmp_path / "file")


def test_saving_again_replaces_and_leaves_no_litter(
    make_folder: MakeFolder, make_model: MakeModel, tokenizer: Tokenizer, config: RunConfig
) -> None:
    folder = make_folder(seed=1)
    before = sorted(path.name for path in folder.iterdir())
    save_model(folder, make_model(2), tokenizer, config)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert torch.equal(load_model(folder).model.embedding.weight, make_model(2).embedding.weight)


def test_names_of_one_memory_are_told_apart_from_equal_copies() -> None:
    a = torch.ones(3)
    once, tied = unique({"x": a, "y": a, "z": a.clone(), "part": a[:2]})
    assert set(once) == {"x", "z", "part"}
    assert tied == {"y": "x"}


def test_another_model_in_the_config_does_not_load(
    make_folder: MakeFolder, tmp_path: Path, make_model: MakeModel, tokenizer: Tokenizer, config: RunConfig
) -> None:
    other = replace(config, model=PaperSpec(n_layers=2, d_model=16, d_ff=24, n_heads=2))
    save_model(tmp_path / "other", make_model(0), tokenizer, other)
    with pytest.raises(ModelError, match=r"lacks the tensor encoder\.layers\.1"):
        load_model(tmp_path / "other")
