"""`dragoman evaluate`: what it prints, in each of its ways to be asked, and what it refuses."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sacrebleu
import torch

from dragoman.cli.main import exit_code

SOURCES = ["Can I see that?", "I don't want anything to drink.", "They took our passports.", "Try it again."]
REFS = ["我能看看那个吗？", "我什么都不想喝。", "他们拿了我们的护照。", "再试一次。"]
HYPS = ["我能看那个吗？", "我什么也不想喝。", "他们拿走了我们的护照。", "再试一次。"]


@dataclass
class FakeTranslation:
    text: str


@dataclass
class FakeScore:
    log_prob: float
    length: int


class FakeTranslator:
    """Answers from a table; every token has probability 1/4, and a token is a character or EOS."""

    def __init__(self, table: dict[str, str], tgt_lang: str = "zh") -> None:
        self.table = table
        self.config = SimpleNamespace(data=SimpleNamespace(tgt_lang=tgt_lang))
        self.options: dict[str, Any] = {}
        self.scored: list[tuple[str, str]] = []

    def translate(self, texts: Sequence[str], **options: Any) -> list[FakeTranslation]:
        self.options = options
        return [FakeTranslation(self.table.get(text, "")) for text in texts]

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[FakeScore]:
        self.scored += pairs
        return [FakeScore(-(len(tgt) + 1) * math.log(4), len(tgt) + 1) for _, tgt in pairs]


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return value


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def run(*arguments: object) -> Answer:
        code = exit_code(["evaluate", *map(str, arguments)])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, FakeTranslator]:
    """Folders `good` and `bad`, which `load` answers with fakes."""
    table = dict(zip(SOURCES, HYPS, strict=True))
    known = {
        str(tmp_path / "good"): FakeTranslator(table),
        str(tmp_path / "bad"): FakeTranslator(dict.fromkeys(SOURCES[:3], "我我我我我")),
    }
    for folder in known:
        Path(folder).mkdir()
    loaded: dict[str, Any] = {}
    module = ModuleType("dragoman.translator")

    def load(folder: str, **how: Any) -> FakeTranslator:
        loaded[folder] = how
        return known[folder]

    module.load = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dragoman.translator", module)
    return known


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / name for name in ("t.tsv", "src", "ref", "ref2", "hyp", "refs.json")}
    write(paths["t.tsv"], [f"{src}\t{ref}" for src, ref in zip(SOURCES, REFS, strict=True)])
    write(paths["src"], SOURCES)
    write(paths["ref"], REFS)
    write(paths["ref2"], HYPS)
    write(paths["hyp"], HYPS)
    ragged = [[REFS[0], HYPS[0]], *([ref] for ref in REFS[1:])]
    paths["refs.json"].write_text(json.dumps(ragged, ensure_ascii=False), encoding="utf-8")
    return paths


def write(path: Path, lines: Sequence[str]) -> None:
    path.write_bytes("".join(line + "\n" for line in lines).encode())


def test_a_model_on_a_tsv(
    evaluate: Callable[..., Answer], models: dict[str, FakeTranslator], files: dict[str, Path], tmp_path: Path
) -> None:
    """B45: the library's number, its signature, the tokenizer of the language."""
    got = evaluate(tmp_path / "good", "--tsv", files["t.tsv"], "--json", "--quiet")
    assert (got.code, got.err) == (0, "")
    assert len(got.out.splitlines()) == 1
    report = got.json
    assert set(report) == {"bleu", "chrf", "ter", "perplexity", "n", "empty", "loops"}
    metric = sacrebleu.BLEU(tokenize="zh")
    assert report["bleu"]["score"] == metric.corpus_score(HYPS, [REFS]).score
    assert report["bleu"]["signature"] == str(metric.get_signature())
    assert report["chrf"]["score"] == sacrebleu.corpus_chrf(HYPS, [REFS]).score
    assert "asian:yes" in report["ter"]["signature"]
    assert report["n"] == 4
    assert report["perplexity"] == pytest.approx(4.0)


def test_text_for_people_has_signatures(
    evaluate: Callable[..., Answer], models: dict[str, FakeTranslator], files: dict[str, Path], tmp_path: Path
) -> None:
    got = evaluate(tmp_path / "good", "--tsv", files["t.tsv"])
    assert got.out.count("version:") == 3
    assert "tok:zh" in got.out
    assert "perplexity    4.00" in got.out
    assert "translating 4 lines" in got.err
    assert "translating" not in got.out


def test_hypotheses_of_a_file_need_no_model_and_no_source(
    evaluate: Callable[..., Answer], files: dict[str, Path]
) -> None:
    got = evaluate("--hyp", files["hyp"], "--ref", files["ref"], "--json")
    assert got.code == 0
    assert got.json["perplexity"] is None
    assert "tok:zh" in got.json["bleu"]["signature"]
    assert "taken for zh by their script" in got.err
    named = evaluate("--hyp", files["hyp"], "--ref", files["ref"], "--json", "--tgt-lang", "de")
    assert named.err == ""
    assert "tok:13a" in named.json["bleu"]["signature"]


def test_more_references(evaluate: Callable[..., Answer], files: dict[str, Path]) -> None:
    one = evaluate("--hyp", files["hyp"], "--ref", files["ref"], "--json").json
    two = evaluate("--hyp", files["hyp"], "--ref", files["ref"], "--ref", files["ref2"], "--json").json
    ragged = evaluate("--hyp", files["hyp"], "--refs-json", files["refs.json"], "--json").json
    assert two["bleu"]["score"] == pytest.approx(100.0)
    assert "nrefs:2" in two["bleu"]["signature"]
    assert "nrefs:var" in ragged["bleu"]["signature"]
    assert one["bleu"]["score"] < ragged["bleu"]["score"] < two["bleu"]["score"]


def test_source_and_references_by_file_or_json(
    evaluate: Callable[..., Answer], models: dict[str, FakeTranslator], files: dict[str, Path], tmp_path: Path
) -> None:
    by_file = evaluate(tmp_path / "good", "--src", files["src"], "--ref", files["ref"], "--json")
    by_tsv = evaluate(tmp_path / "good", "--tsv", files["t.tsv"], "--json")
    assert by_file.json == by_tsv.json
    for given in (["--src", files["src"]], ["--tsv", files["t.tsv"]]):
        got = evaluate(tmp_path / "good", *given, "--refs-json", files["refs.json"], "--json")
        assert "nrefs:var" in got.json["bleu"]["signature"]


def test_options_reach_the_translator_and_others_keep_the_models_defaults(
    evaluate: Callable[..., Answer], models: dict[str, FakeTranslator], files: dict[str, Path], tmp_path: Path
) -> None:
    evaluate(tmp_path / "good", "--tsv", files["t.tsv"], "--beam-size", 2, "--alpha", 1.0, "--batch-tokens", 99)
    assert models[str(tmp_path / "good")].options == {"beam_size": 2, "alpha": 1.0, "batch_tokens": 99}
    evaluate(tmp_path / "good", "--tsv", files["t.tsv"])
    assert models[str(tmp_path / "good")].options == {}


def test_hypotheses_are_saved_once(
    evaluate: Callable[..., Answer], models: dict[str, FakeTranslator], files: dict[str, Path], tmp_path: Path
) -> None:
    saved = tmp_path / "new" / "out.txt"
    assert evaluate(tmp_path / "good", "--tsv", files["t.tsv"], "-o", saved).code == 0
    assert saved.read_bytes() == files["hyp"].read_bytes()
    again = evaluate(tmp_path / "good", "--tsv", files["t.tsv"], "-o", saved)
    assert again.code == 1
    assert "--force overwrites it" in again.err
    assert evaluate(tmp_path / "good", "--tsv", files["t.tsv"], "-o", saved, "--force").code == 0


def test_two_models_are_compared(
    evaluate: Callable[..., Answer], models: dict[str, FakeTranslator], files: dict[str, Path], tmp_path: Path
) -> None:
    got = evaluate(tmp_path / "good", "--tsv", files["t.tsv"], "--against", tmp_path / "bad", "--json")
    other = got.json["against"]
    assert other["name"] == str(tmp_path / "bad")
    assert other["empty"] == 1
    assert other["loops"] == 3
    assert other["perplexity"] == pytest.approx(4.0)
    for name in ("bleu", "chrf", "ter"):
        assert 0 < other[name]["p_value"] <= 1
        assert other[name]["difference"] == pytest.approx(got.json[name]["score"] - other[name]["score"])
        assert "seed:12345" in other[name]["signature"]
    assert other["chrf"]["p_value"] < 0.05
    assert "1 of 4 outputs are empty (line 4)" in got.err
    assert "3 of 4 outputs repeat themselves (lines 1, 2, 3)" in got.err


def test_a_model_against_a_file_and_a_file_against_itself(
    evaluate: Callable[..., Answer], models: dict[str, FakeTranslator], files: dict[str, Path], tmp_path: Path
) -> None:
    got = evaluate(tmp_path / "bad", "--tsv", files["t.tsv"], "--against", files["hyp"])
    assert "paired bootstrap, bs:1000|seed:12345" in got.out
    assert got.out.count("±") == 7
    same = evaluate("--hyp", files["hyp"], "--ref", files["ref"], "--against", files["hyp"], "--json")
    assert same.json["against"]["bleu"]["p_value"] == 1.0


def test_lines_as_tsv_and_as_json(evaluate: Callable[..., Answer], files: dict[str, Path], tmp_path: Path) -> None:
    write(files["hyp"], [*HYPS[:3], "再\t试\\"])
    got = evaluate("--hyp", files["hyp"], "--ref", files["ref"], "--per-line")
    rows = [row.split("\t") for row in got.out.splitlines()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert all(len(row) == 5 for row in rows)
    assert rows[3][3:] == ["再\\t试\\\\", REFS[3]]
    assert "BLEU" in got.err
    got = evaluate(
        "--hyp", files["hyp"], "--refs-json", files["refs.json"], "--src", files["src"], "--per-line", "--json"
    )
    lines = [json.loads(line) for line in got.out.splitlines()]
    assert len(lines) == 5
    assert lines[0]["bleu"] == pytest.approx(100.0)
    assert lines[0]["references"] == [REFS[0], HYPS[0]]
    assert lines[1]["source"] == SOURCES[1]
    assert (
        lines[1]["bleu"] == sacrebleu.BLEU(tokenize="zh", effective_order=True).sentence_score(HYPS[1], [REFS[1]]).score
    )
    assert lines[4]["n"] == 4


def test_blank_lines_are_scored_and_left_out_of_perplexity(
    evaluate: Callable[..., Answer], models: dict[str, FakeTranslator], files: dict[str, Path], tmp_path: Path
) -> None:
    write(files["t.tsv"], [f"{SOURCES[0]}\t{REFS[0]}", "\t", f" \t{REFS[1]}"])
    got = evaluate(tmp_path / "good", "--tsv", files["t.tsv"], "--json")
    assert got.json["n"] == 3
    assert got.json["empty"] == 0
    assert got.json["perplexity"] == pytest.approx(4.0)
    assert models[str(tmp_path / "good")].scored == [(SOURCES[0], REFS[0])]
    assert "without 2 lines that have a blank side" in got.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either a MODEL or --hyp FILE"),
        (["{good}", "--hyp", "{hyp}", "--tsv", "{t.tsv}"], "not both"),
        (["{good}"], "there are no references"),
        (["{good}", "--ref", "{ref}"], "has to translate something"),
        (["--hyp", "{hyp}", "--ref", "{ref}", "--against", "{good}"], "has to translate something"),
        (["--hyp", "{hyp}", "--tsv", "{t.tsv}", "--ref", "{ref}"], "--tsv has sources and references"),
        (["--hyp", "{hyp}", "--ref", "{ref}", "--refs-json", "{refs.json}"], "not by both"),
        (["--hyp", "{hyp}", "--ref", "{ref}", "--against", "nowhere"], "no such model folder or file"),
        (["--hyp", "-", "--ref", "{ref}", "--against", "-"], "cannot both be stdin"),
        (["--hyp", "{hyp}", "--ref", "{ref}", "-o", "x"], "in a file already"),
        (["--hyp", "{hyp}", "--ref", "{ref}", "--invalid-utf8", "skip"], "is not one of"),
        (["--hyp", "{hyp}", "--reff", "{ref}"], "did you mean --ref"),
    ],
)
def test_usage(
    evaluate: Callable[..., Answer],
    models: dict[str, FakeTranslator],
    files: dict[str, Path],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    names = {f"{{{name}}}": str(path) for name, path in {**files, "good": tmp_path / "good"}.items()}
    got = evaluate(*(names.get(argument, argument) for argument in arguments))
    assert got.code == 2
    assert message in got.err
    assert got.out == ""


def test_counts_that_differ_name_both(
    evaluate: Callable[..., Answer], models: dict[str, FakeTranslator], files: dict[str, Path], tmp_path: Path
) -> None:
    write(files["hyp"], HYPS[:3])
    got = evaluate("--hyp", files["hyp"], "--ref", files["ref"])
    assert got.code == 1
    assert f"{files['hyp']} has 3 lines, {files['ref']} has 4" in got.err
    for given in (["--ref", files["ref"], "--ref", files["hyp"]], ["--src", files["src"], "--ref", files["hyp"]]):
        got = evaluate("--hyp", files["ref"], *given)
        assert got.code == 1
        assert "3" in got.err
        assert "4" in got.err
        assert "Traceback" not in got.err
    write(files["src"], SOURCES[:2])
    got = evaluate(tmp_path / "good", "--src", files["src"], "--refs-json", files["refs.json"])
    assert f"{files['src']} has 2 lines, {files['refs.json']} has 4 entries" in got.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[["a"], []]', "line 2 has no reference"),
        (b'["a", "b"]', "line 1 must be a list of references, not a string"),
        (b'[["a"], [{}]]', "line 2 has a reference that is not text but an object"),
        (b'{"a": 1}', "must be a list"),
        (b'[["a"],', "line 1, column 8: not valid JSON"),
        (b'[["\xc3\x28"]]', "byte 3 (from 0): 0xC3 is not valid UTF-8"),
        (b"[]", "is empty: there is nothing to score"),
    ],
)
def test_faults_of_the_json(
    evaluate: Callable[..., Answer], files: dict[str, Path], content: bytes, message: str
) -> None:
    files["refs.json"].write_bytes(content)
    got = evaluate("--hyp", files["hyp"], "--refs-json", files["refs.json"])
    assert got.code == 1
    assert message in got.err
    assert str(files["refs.json"]) in got.err


def test_mixed_files_are_read_by_the_line_rule(evaluate: Callable[..., Answer], files: dict[str, Path]) -> None:
    files["hyp"].write_bytes("\ufeff".encode() + "a b c d\u2028e\r\nf g h i\r\n".encode())
    write(files["ref"], ["a b c d\u2028e", "f g h i"])
    got = evaluate("--hyp", files["hyp"], "--ref", files["ref"], "--json")
    assert got.json["n"] == 2
    assert got.json["bleu"]["score"] == pytest.approx(100.0)


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as training leaves it, with random weights."""
    from dragoman.checkpoints.store import save_model
    from dragoman.model.choices import PaperSpec
    from dragoman.run import RunConfig
    from dragoman.text.corpus import DataConfig
    from dragoman.tokens.tokenizer import TokenizerConfig, train_tokenizer

    folder = tmp_path_factory.mktemp("models") / "random"
    tokenizer = train_tokenizer([*SOURCES, *REFS], TokenizerConfig(vocab_size=400), folder)
    torch.manual_seed(5)
    spec = PaperSpec(n_layers=1, d_model=16, d_ff=16, n_heads=2)
    config = RunConfig(data=DataConfig(src_lang="en", tgt_lang="zh"), model=spec)
    save_model(folder, spec.build(len(tokenizer), tokenizer.pad_id), tokenizer, config)
    return folder


def test_the_real_translator(
    evaluate: Callable[..., Answer], real_model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    import dragoman

    saved = tmp_path / "out"
    got = evaluate(
        real_model,
        "--tsv",
        files["t.tsv"],
        "--json",
        "-o",
        saved,
        "--beam-size",
        2,
        "--batch-tokens",
        64,
        "--threads",
        1,
    )
    assert got.code == 0, got.err
    translator = dragoman.load(str(real_model))
    texts = [t.text for t in translator.translate(SOURCES, beam_size=2)]
    assert saved.read_text(encoding="utf-8").split("\n")[:-1] == texts
    assert got.json["bleu"]["score"] == sacrebleu.corpus_bleu(texts, [REFS], tokenize="zh").score
    scored = translator.score(list(zip(SOURCES, REFS, strict=True)))
    nll = -sum(pair.log_prob for pair in scored) / sum(pair.length for pair in scored)
    assert got.json["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)
    again = evaluate("--hyp", saved, "--tsv", files["t.tsv"], "--json", "--against", real_model)
    assert again.json["bleu"] == got.json["bleu"]
    assert again.json["against"]["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)


def test_no_such_model(evaluate: Callable[..., Answer], files: dict[str, Path]) -> None:
    got = evaluate("nowhere/at-all", "--tsv", files["t.tsv"])
    assert got.code == 1
    assert "nowhere/at-all" in got.err
    assert got.out == ""
