"""`dragoman inspect`: a summary on stdout, a page or numbers in a file, and plain refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

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


class Letters:
    """A tokenizer of small letters."""

    kind, normalization = "letters", "nfc"
    pad_id, unk_id, bos_id, eos_id = 0, 1, 2, 3

    def encode(self, text: str) -> list[int]:
        return [4 + ord(letter) - ord("a") for letter in text if letter.islower()]

    encode_target = encode

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(index - 4 + ord("a")) for index in ids)

    def id_to_piece(self, index: int) -> str:
        return ["<pad>", "<unk>", "<s>", "</s>"][index] if index < 4 else self.decode([index])

    def piece_to_id(self, piece: str) -> int:
        return 3 if piece == "</s>" else self.encode(piece)[0]

    def __len__(self) -> int:
        return 30


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that `load` answers with a small random model."""
    from dragoman.model.transformer import Transformer, TransformerConfig

    folder = tmp_path / "abc"
    folder.mkdir()
    (folder / "config.toml").write_text("format_version = 1\n", encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 7, "loss": 2.5, "lr": 1e-4}\n', encoding="utf-8")
    torch.manual_seed(0)
    translator: Any = SimpleNamespace(
        model=Transformer(TransformerConfig(30, n_layers=1, d_model=8, d_ff=8, n_heads=2)),
        tokenizer=Letters(),
        config=SimpleNamespace(model=SimpleNamespace(kind="paper"), data=SimpleNamespace(src_lang="aa", tgt_lang="bb")),
        translate=lambda texts: [SimpleNamespace(text="cba", tokens=["c", "b", "a", "</s>"])],
    )
    module = ModuleType("dragoman.translator")
    module.load = lambda path, device="cpu": translator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dragoman.translator", module)
    return folder


def test_without_text_a_summary_on_stdout(run: Callable[..., Answer], model: Path) -> None:
    got = run(model)
    assert (got.code, got.err) == (0, "")
    assert got.out.startswith("abc\n")
    for fact in ("aa → bb", "2.500", "total", "generator.weight is embedding.weight", "format_version = 1"):
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
    got = run(model, "--text", "abc", "--out", page)
    assert (got.code, got.out) == (0, "")
    assert str(page) in got.err
    html = page.read_text(encoding="utf-8")
    assert html.count('class="head"') == 3 * 2
    assert "cba" in html
    assert "translation" in html
    again = run(model, "--text", "abc", "--out", page)
    assert again.code == 1
    assert "--force overwrites it" in again.err
    forced = run(model, "--text", "abc", "--target", "xyz", "--out", page, "--force", "--quiet")
    assert (forced.code, forced.err) == (0, "")
    assert "given target" in page.read_text(encoding="utf-8")


def test_numbers_and_a_page_without_text(run: Callable[..., Answer], model: Path, tmp_path: Path) -> None:
    assert run(model, "--text", "abc", "--target", "ab", "-o", tmp_path / "x.json").code == 0
    numbers = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert numbers["sentence"]["target_tokens"] == ["a", "b", "</s>"]
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
