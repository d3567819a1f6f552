"""`dragoman inspect`: a summary on stdout, a page or numbers in a file, and plain refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import dragoman
from dragoman.cli.main import exit_code


@dataclass
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def inspect(*arguments: object) -> Answer:
        code = exit_code(["inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return inspect


SENTENCES = ["The cat sees.", "A dog and a cat.", "Die Katze sieht.", "Ein Hund und eine Katze."]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as training leaves it, with random weights."""
    from dragoman.checkpoints.store import save_model
    from dragoman.model.choices import PaperSpec
    from dragoman.run import RunConfig
    from dragoman.text.corpus import DataConfig
    from dragoman.tokens.tokenizer import TokenizerConfig, train_tokenizer

    folder = tmp_path_factory.mktemp("models") / "en-de"
    tokenizer = train_tokenizer(SENTENCES, TokenizerConfig(vocab_size=300), folder)
    torch.manual_seed(0)
    spec = PaperSpec(n_layers=1, d_model=8, d_ff=8, n_heads=2)
    config = RunConfig(data=DataConfig(src_lang="en", tgt_lang="de"), model=spec)
    save_model(folder, spec.build(len(tokenizer), tokenizer.pad_id), tokenizer, config)
    return folder


@pytest.fixture
def model(trained: Path) -> Path:
    (trained / "metrics.jsonl").write_text('{"kind": "train", "step": 7, "loss": 2.5, "lr": 1e-4}\n', encoding="utf-8")
    return trained


def test_without_text_a_summary_on_stdout(run: Callable[..., Answer], model: Path) -> None:
    got = run(model)
    assert (got.code, got.err) == (0, "")
    assert got.out.startswith("en-de\n")
    for fact in (
        "en → de",
        "2.500",
        "total",
        "generator.weight is embedding.weight",
        "format_version = 1",
        "byte_fallback = True",
    ):
        assert fact in got.out


def test_the_summary_as_json_is_one_line(run: Callable[..., Answer], model: Path) -> None:
    got = run(model, "--json")
    assert len(got.out.splitlines()) == 1
    summary = json.loads(got.out)
    assert summary["parameters"]["total"] > 0
    assert summary["training"] == {"steps": 7, "last_loss": 2.5, "last_lr": 1e-4}
    assert "positions" not in summary


def test_a_page_of_a_translation(run: Callable[..., Answer], model: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    got = run(model, "--text", "The cat sees.", "--out", page)
    assert (got.code, got.out) == (0, "")
    assert str(page) in got.err
    html = page.read_text(encoding="utf-8")
    assert html.count('class="head"') == 3 * 2
    assert "<span>translation</span>" in html
    again = run(model, "--text", "abc", "--out", page)
    assert again.code == 1
    assert "--force overwrites it" in again.err
    forced = run(model, "--text", "abc", "--target", "xyz", "--out", page, "--force", "--quiet")
    assert (forced.code, forced.err) == (0, "")
    assert "given target" in page.read_text(encoding="utf-8")


def test_numbers_and_a_page_without_text(run: Callable[..., Answer], model: Path, tmp_path: Path) -> None:
    assert run(model, "--text", "The cat.", "--target", "Die Katze.", "-o", tmp_path / "x.json").code == 0
    numbers = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    sentence = numbers["sentence"]
    assert sentence["target"] == "Die Katze."
    assert "".join(sentence["target_tokens"]) == "▁Die▁Katze.</s>"
    translator = dragoman.load(str(model))
    scored = translator.score([("The cat.", "Die Katze.")])[0]
    assert sentence["log_prob"] == pytest.approx(scored.log_prob, abs=1e-4)
    assert sentence["token_log_probs"] == pytest.approx(scored.token_log_probs, abs=1e-5)
    assert sentence["length"] == scored.length
    assert len(numbers["positions"]) == 96
    assert run(model, "-o", tmp_path / "plain.html").code == 0
    assert 'class="head"' not in (tmp_path / "plain.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "abc"], "--text needs --out FILE.html"),
        (["--target", "abc"], "--target goes with --text"),
        (["--out", "page.pdf"], "must end in .html or .json"),
        (["--out", "page.html", "--json"], "for a file use --out FILE.json"),
        (["--texts", "abc"], "did you mean --text"),
    ],
)
def test_usage(run: Callable[..., Answer], model: Path, arguments: list[str], message: str) -> None:
    got = run(model, *arguments)
    assert got.code == 2
    assert message in got.err
    assert got.out == ""


def test_blank_text_is_refused_and_nothing_written(run: Callable[..., Answer], model: Path, tmp_path: Path) -> None:
    got = run(model, "--text", " ", "--out", tmp_path / "page.html")
    assert got.code == 1
    assert "blank" in got.err
    assert not (tmp_path / "page.html").exists()


def test_what_is_looked_at_is_what_was_translated(run: Callable[..., Answer], model: Path, tmp_path: Path) -> None:
    translation = dragoman.load(str(model)).translate("A dog.")
    assert run(model, "--text", "A dog.", "-o", tmp_path / "x.json").code == 0
    sentence = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["sentence"]
    assert sentence["target"] == translation.text
    n = translation.length if translation.finished else translation.length + 1  # EOS is looked at in any case
    assert len(sentence["target_tokens"]) == n
    assert sentence["target_tokens"][: n - 1] == translation.tokens[: n - 1]
    assert sentence["token_log_probs"][: n - 1] == pytest.approx(translation.token_log_probs[: n - 1], abs=1e-4)


def test_no_such_model(run: Callable[..., Answer]) -> None:
    got = run("nowhere/at-all")
    assert got.code == 1
    assert "nowhere/at-all" in got.err
