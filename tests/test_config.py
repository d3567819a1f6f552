"""A run's TOML: precedence, paths, and every fault named at once with its key and the nearest known one."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dragoman import config
from dragoman.errors import ConfigError
from dragoman.model.choices import EncoderDecoderSpec, PaperSpec
from dragoman.run import RunConfig, load_run, presets, read_run
from dragoman.tokens.tokenizer import TokenizerConfig
from dragoman.training.options import TrainingConfig
from dragoman.training.schedule import Linear


def faults(tree: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.build(RunConfig, tree, where="run.toml")
    return list(caught.value.problems)


def test_a_misspelt_key_names_the_nearest() -> None:
    assert faults({"data": {"train": "a.tsv"}, "training": {"max_stepz": 3}}) == [
        "run.toml: unknown key 'training.max_stepz'; did you mean 'max_steps'?"
    ]
    assert "did you mean 'training'?" in faults({"data": {}, "trainig": {}})[0]


def test_all_faults_come_at_once_each_with_its_key() -> None:
    problems = faults(
        {
            "data": {"train": [{"src": "a", "tgtt": "b"}], "max_length": 0},
            "model": {"d_model": 7, "dropout": 3.0},
            "training": {"batch_tokens": "many", "schedule": {"kind": "noam", "warmup": 5}},
        }
    )
    text = "\n".join(problems)
    assert "unknown key 'data.train.0.tgtt'; did you mean 'tgt'?" in text
    assert "training.batch_tokens" in text
    assert "unknown key 'training.schedule.warmup'; did you mean 'warmup_steps'?" in text
    assert "d_model must be even" in text
    assert "dropout must be at least 0 and below 1" in text


def test_an_unknown_kind_names_the_known_ones() -> None:
    (problem,) = faults({"data": {}, "training": {"optimizer": {"kind": "adamz"}}})
    assert "training.optimizer.kind: 'adamz' is not known" in problem
    assert "did you mean 'adam'?" in problem


def test_a_kind_of_model_brings_its_own_fields() -> None:
    assert config.build(RunConfig, {"data": {}}).model == PaperSpec()
    open_family = config.build(RunConfig, {"data": {}, "model": {"kind": "encoder_decoder", "output_bias": True}}).model
    assert open_family == EncoderDecoderSpec(output_bias=True)
    assert "unknown key" in faults({"data": {}, "model": {"kind": "paper", "output_bias": True}})[0]


def test_a_table_without_a_kind_alters_the_default_one() -> None:
    run = config.build(RunConfig, {"data": {}, "training": {"schedule": {"warmup_steps": 7}}})
    assert (run.training.schedule.kind, run.training.schedule.warmup_steps) == ("noam", 7)


def test_what_is_written_reads_back_equal() -> None:
    run = config.build(
        RunConfig,
        {
            "data": {"train": [{"tsv": "a.tsv", "weight": 2.0}, {"src": "b.en", "tgt": "b.zh"}], "tgt_lang": "no"},
            "model": {"kind": "paper", "d_k": 16},
            "training": {"optimizer": {"kind": "adamw"}, "schedule": {"kind": "cosine", "peak": 1e-4}},
        },
    )
    assert config.build(RunConfig, tomllib.loads(config.dump_toml(run))) == run


def test_values_are_toml_literals_or_else_bare_strings() -> None:
    tree = config.set_values({}, ["a.b=3", "a.c=1e-4", "a.d=true", "a.e=[1, 2]", "a.f=no", 'a.g="3"', "a.h=x=y"])
    assert tree == {"a": {"b": 3, "c": 1e-4, "d": True, "e": [1, 2], "f": "no", "g": "3", "h": "x=y"}}
    with pytest.raises(ConfigError, match="expected key=value"):
        config.set_values({}, ["training.max_steps"])


def test_another_kind_replaces_the_whole_table_below() -> None:
    below = {"schedule": {"kind": "noam", "warmup_steps": 5, "factor": 2.0}}
    cosine = {"schedule": {"kind": "cosine"}}
    assert config.merge(TrainingConfig, below, cosine) == cosine
    assert config.merge(TrainingConfig, below, {"schedule": {"factor": 1.0}})["schedule"]["warmup_steps"] == 5
    deep = config.merge(RunConfig, {"model": {"residual": {"kind": "post_norm", "x": 1}}}, {"model": {"n_layers": 2}})
    deep = config.merge(RunConfig, deep, {"model": {"residual": {"kind": "pre_norm"}}})
    assert deep == {"model": {"residual": {"kind": "pre_norm"}, "n_layers": 2}}


def test_a_kind_that_tells_no_classes_apart_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "base"\n[data]\ntrain = "a.tsv"\n[tokenizer]\nkind = "unigram"\n', encoding="utf-8")
    assert load_run(path).tokenizer == TokenizerConfig("unigram", vocab_size=37_000)
    path.write_text('[data]\ntrain = "a.tsv"\n[tokenizer]\nvocab_size = 500\n', encoding="utf-8")
    assert load_run(path, ["tokenizer.kind=unigram"]).tokenizer == TokenizerConfig("unigram", vocab_size=500)


def test_assignments_say_the_same_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "base"\n[data]\ntrain = "a.tsv"\n', encoding="utf-8")
    assignments = ["training.schedule.peak=1e-3", "training.schedule.kind=linear"]
    for each in (assignments, assignments[::-1], [assignments[0], 'training.schedule={kind="linear"}']):
        assert load_run(path, each).training.schedule == Linear(peak=1e-3)


def test_a_table_without_a_kind_keeps_its_keys_where_one_is_named_above(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[data]\ntrain = "a.tsv"\n[model]\nn_layers = 3\nd_model = 256\n', encoding="utf-8")
    assert load_run(path, ["model.kind=paper"]).model == PaperSpec(n_layers=3, d_model=256)
    opened = load_run(path, ["model.kind=encoder_decoder"]).model
    assert opened == EncoderDecoderSpec(n_layers=3, d_model=256)


def test_broken_files_are_named_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[data]\ntrain = \n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML.*line 2"):
        load_run(tmp_path / "broken.toml")
    with pytest.raises(ConfigError, match="there is no such file"):
        load_run(tmp_path / "missing.toml")
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    with pytest.raises(ConfigError, match="not valid UTF-8 at byte 5"):
        load_run(tmp_path / "latin.toml")


def test_preset_then_file_then_set(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "big"\n[data]\ntrain = "a.tsv"\n[model]\nn_heads = 8\n', encoding="utf-8")
    run = load_run(path, ["model.dropout=0.2", "training.schedule.warmup_steps=9"])
    assert isinstance(run.model, PaperSpec)
    assert (run.model.d_model, run.model.n_heads, run.model.dropout) == (1024, 8, 0.2)
    assert run.training.schedule.warmup_steps == 9
    path.write_text('preset = "bigg"\n[data]\ntrain = "a.tsv"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="did you mean 'big'"):
        load_run(path)


def test_every_preset_loads_and_keeps_its_meaning(tmp_path: Path) -> None:
    assert {"base", "big", "tiny"} <= set(presets())
    sizes = {"base": (6, 512, 2048, 8, 0.1), "big": (6, 1024, 4096, 16, 0.3)}
    for name in presets():
        path = tmp_path / f"{name}.toml"
        path.write_text(f'preset = "{name}"\n[data]\ntrain = "a.tsv"\n', encoding="utf-8")
        model = load_run(path).model
        assert isinstance(model, PaperSpec)
        if name in sizes:
            assert (model.n_layers, model.d_model, model.d_ff, model.n_heads, model.dropout) == sizes[name]


def test_paths_are_relative_to_the_file_and_overrides_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "here.tsv").touch()
    path = tmp_path / "recipes" / "run.toml"
    path.write_text('[data]\ntrain = "../data/a.tsv"\ndev = { src = "d.en", tgt = "d.zh" }\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run = load_run(path)
    assert run.data.train == str(tmp_path / "data" / "a.tsv")
    assert run.data.dev_corpus is not None
    assert run.data.dev_corpus.src == str(tmp_path / "recipes" / "d.en")
    assert load_run(path, ["data.train=here.tsv"]).data.train == str(tmp_path / "here.tsv")
    assert load_run(path, ["data.train=there.tsv"]).data.train == str(tmp_path / "recipes" / "there.tsv")


def test_a_newer_model_folder_is_refused_plainly(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("format_version = 2\n[data]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="format_version is 2, and this dragoman reads up to 1"):
        read_run(tmp_path / "config.toml")
    (tmp_path / "config.toml").write_text("format_version = 1\n[data]\n", encoding="utf-8")
    assert read_run(tmp_path / "config.toml").format_version == 1


def test_the_schema_for_editors_knows_the_kinds() -> None:
    schema = str(config.json_schema(RunConfig))
    assert "warmup_steps" in schema
    assert "encoder_decoder" in schema
