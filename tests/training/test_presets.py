"""Presets and recipes: the paper's numbers, row by row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dragoman import config
from dragoman.run import load_run, presets
from dragoman.training.optimizer import Adam
from dragoman.training.schedule import Noam

ROWS = {
    "base": "table3-base",
    **{f"A h={h}": f"table3-A-h{h}" for h in (1, 4, 16, 32)},
    **{f"B d_k={d}": f"table3-B-dk{d}" for d in (16, 32)},
    **{f"C N={n}": f"table3-C-N{n}" for n in (2, 4, 8)},
    **{f"C d_model={d}": f"table3-C-dmodel{d}" for d in (256, 1024)},
    **{f"C d_ff={d}": f"table3-C-dff{d}" for d in (1024, 4096)},
    **{f"D p_drop={p}": f"table3-D-pdrop{p}" for p in (0.0, 0.2)},
    **{f"D eps_ls={e}": f"table3-D-epsls{e}" for e in (0.0, 0.2)},
    "big": "table3-big",
}


def load(tmp_path: Path, preset: str):
    (tmp_path / "run.toml").write_text(f'preset = "{preset}"\n[data]\ntrain = "x.tsv"\n')
    return load_run(tmp_path / "run.toml")


def test_every_row_of_table_3_is_a_preset(shared: Path, tmp_path: Path) -> None:
    rows = {row["row"]: row for row in json.loads((shared / "golden.json").read_text())["paper"]["table3_newstest2013"]}
    assert {*ROWS} == {*rows} - {"E"}  # row E, learned positions, is not of the closed family
    for name, preset in ROWS.items():
        row, run = rows[name], load(tmp_path, preset)
        model = run.model
        sizes = (model.n_layers, model.d_model, model.d_ff, model.n_heads, model.dropout)
        assert sizes == (row["N"], row["d_model"], row["d_ff"], row["h"], row["p_drop"]), preset
        assert (model.d_k or model.d_model // model.n_heads) == row["d_k"], preset
        assert (model.d_v or model.d_model // model.n_heads) == row["d_v"], preset
        assert run.training.label_smoothing == row["eps_ls"], preset
        assert run.training.max_steps == row["steps"], preset
        assert run.training.average_last == 1, preset  # §6.2: "without checkpoint averaging"
        with torch.device("meta"):
            built = model.build(37_000, 0)
        assert sum(p.numel() for p in built.parameters()) == row["computed_params_V37000"], preset


@pytest.mark.parametrize(("preset", "steps", "last"), [("base", 100_000, 5), ("big", 300_000, 20)])
def test_base_and_big_are_trained_as_the_paper_says(tmp_path: Path, preset: str, steps: int, last: int) -> None:
    run = load(tmp_path, preset)
    training = run.training
    assert (training.max_steps, training.batch_tokens, training.average_last) == (steps, 25_000, last)
    assert training.optimizer == Adam(betas=(0.9, 0.98), epsilon=1e-9)
    assert training.schedule == Noam(warmup_steps=4000, factor=1.0)
    assert training.clip_norm is None
    assert (run.decoding.beam_size, run.decoding.alpha, run.decoding.max_extra) == (4, 0.6, 50)
    assert run.tokenizer.vocab_size == 37_000
    assert run.model == load(tmp_path, f"table3-{preset}").model


def test_all_presets_load_and_there_is_no_other(tmp_path: Path) -> None:
    assert {*presets()} == {"base", "big", "tiny", *ROWS.values()}
    for preset in presets():
        assert config.tree_of(load(tmp_path, preset))["preset"] == preset


@pytest.mark.parametrize(
    ("recipe", "dropout", "steps", "last", "words"),
    [
        ("wmt14-en-de-base", 0.1, 100_000, 5, 37_000),
        ("wmt14-en-de-big", 0.3, 300_000, 20, 37_000),
        ("wmt14-en-fr-big", 0.1, 300_000, 20, 32_000),
    ],
)
def test_the_recipes_of_table_2(root: Path, recipe: str, dropout: float, steps: int, last: int, words: int) -> None:
    run = load_run(root / "recipes" / f"{recipe}.toml")
    assert run.model.dropout == dropout
    assert (run.training.max_steps, run.training.average_last) == (steps, last)
    assert run.training.batch_tokens == 25_000
    assert run.tokenizer.vocab_size == words
    assert run.data.train == str(root / "data" / recipe.rsplit("-", 1)[0] / "train.tsv.gz")


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "wmt14-en-de-base",
        pytest.param("wmt14-en-de-big", marks=pytest.mark.long),
        pytest.param("wmt14-en-fr-big", marks=pytest.mark.long),
    ],
)
def test_the_recipes_run_on_a_cpu_with_a_small_batch(
    root: Path, shared: Path, tmp_path: Path, recipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """20 real updates of the paper's own sizes on a stand-in corpus; the vocabulary is lowered with a message."""
    from dragoman.cli.main import exit_code

    pair = "en-fr" if "en-fr" in recipe else "en-de"
    folder = shared / "data" / f"multi30k-{pair}"
    source, target = (json.dumps(str(folder / f"val.{language}")) for language in pair.split("-"))
    corpus = f"{{ src = {source}, tgt = {target} }}"
    keys = [
        f"data.train=[{corpus}]",
        f"data.dev={corpus}",
        "training.batch_tokens=256",
        "training.max_steps=20",
        "training.validate_bleu=false",
        "training.save_every=1000",
        "training.log_every=1",
    ]
    line = ["train", str(root / "recipes" / f"{recipe}.toml"), "--out", str(tmp_path / "run")]
    line += [word for key in keys for word in ("--set", key)]
    assert exit_code([*line, "--dry-run"]) == 0
    assert "updates per epoch" in capfd.readouterr().out
    assert exit_code(line) == 0
    assert "vocab_size lowered from" in capfd.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
