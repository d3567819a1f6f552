"""Averaging (§6.1): right numbers, ties kept, and no mean of what does not belong together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dragoman.checkpoints import snapshots
from dragoman.checkpoints.average import average_folders, average_weights, inputs
from dragoman.checkpoints.resuming import claim
from dragoman.checkpoints.store import load_model, save_model
from dragoman.errors import ModelError
from dragoman.model.choices import PaperSpec
from dragoman.model.transformer import Transformer
from dragoman.run import RunConfig
from dragoman.tokens.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

MakeModel = Callable[..., Transformer]
MakeFolder = Callable[..., Path]


def test_the_mean_is_the_mean(make_model: MakeModel) -> None:
    models = [make_model(seed) for seed in (1, 2, 3)]
    mean = average_weights(model.state_dict() for model in models)
    for name, tensor in mean.items():
        expected = sum(model.state_dict()[name].double() for model in models) / 3
        assert torch.equal(tensor, expected.float()), name
    assert mean["generator.weight"] is mean["embedding.weight"]


def test_copies_of_one_model_average_to_it_tied_and_saved_once(make_folder: MakeFolder, tmp_path: Path) -> None:
    folders = [make_folder(name, seed=4) for name in ("a", "b", "c")]
    assert average_folders(folders[0], inputs(folders), tmp_path / "mean") == 3
    one, mean = load_model(folders[0]), load_model(tmp_path / "mean")
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, mean.model.state_dict()[name]), name
    assert mean.model.generator.weight is mean.model.embedding.weight
    assert mean.notes["average_of"] == "3"
    with safe_open(tmp_path / "mean" / "weights.safetensors", "pt") as file:
        assert "generator.weight" not in set(file.keys())


def test_the_last_checkpoints_of_a_run(make_folder: MakeFolder, make_model: MakeModel, tmp_path: Path) -> None:
    run = make_folder("run")
    for step in (1, 2, 3):
        snapshots.save(run, step, make_model(step).state_dict(), {}, {})
    average_folders(run, inputs([run], last=2), tmp_path / "mean")
    expected = (make_model(2).embedding.weight.double() + make_model(3).embedding.weight.double()) / 2
    assert torch.equal(load_model(tmp_path / "mean").model.embedding.weight, expected.float())
    with pytest.raises(ModelError, match="has 3 of the 4 checkpoints asked for"):
        inputs([run], last=4)
    damaged = run / "training" / "step-00000002" / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ModelError, match="cut short"):
        inputs([run], last=2)


def test_the_same_folder_twice_is_refused_under_any_name(make_folder: MakeFolder, tmp_path: Path) -> None:
    a = make_folder("a")
    (tmp_path / "link").symlink_to(a)
    with pytest.raises(ModelError, match="is given twice"):
        inputs([a, a])
    with pytest.raises(ModelError, match=r"link is given twice \(also as .*a\)"):
        inputs([a, tmp_path / "link"])


def test_what_does_not_belong_together_is_named(
    make_folder: MakeFolder, make_model: MakeModel, tokenizer: Tokenizer, config: RunConfig, tmp_path: Path
) -> None:
    a = make_folder("a")
    spec = PaperSpec(n_layers=2, d_model=16, d_ff=24, n_heads=2)
    save_model(tmp_path / "deep", make_model(0, spec), tokenizer, replace(config, model=spec))
    other = train_tokenizer(["some other text altogether"] * 40, TokenizerConfig(vocab_size=280), tmp_path / "t")
    save_model(tmp_path / "words", config.model.build(len(other), other.pad_id), other, config)
    with pytest.raises(ModelError) as caught:
        inputs([a, tmp_path / "deep", tmp_path / "words"])
    assert len(caught.value.problems) == 2
    assert "different models" in str(caught.value)
    assert "different tokenizers" in str(caught.value)
    with pytest.raises(ModelError, match="is one model"):
        inputs([a])
    with pytest.raises(ModelError, match="has the shape"):
        average_weights([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}])


def test_an_average_cannot_be_resumed_and_says_so(make_folder: MakeFolder, tmp_path: Path) -> None:
    folders = [make_folder("a", 1), make_folder("b", 2)]
    average_folders(folders[0], inputs(folders), tmp_path / "mean")
    with pytest.raises(ModelError, match=r"is an average of checkpoints.*cannot be resumed.*--from"):
        claim(tmp_path / "mean", resume=True, force=False)
