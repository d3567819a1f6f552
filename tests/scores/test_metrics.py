"""BLEU, chrF and TER against sacreBLEU itself, golden values and the guards around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from dragoman.errors import DataError
from dragoman.scores import bleu, chrf, line_scores, streams_of, ter, tokenizer_for
from dragoman.scores.metrics import bleu_metric

ZH_HYP = ["我能看那个吗？", "我什么也不想喝。", "他们拿走了我们的护照。"]
ZH_REF = ["我能看看那个吗？", "我什么都不想喝。", "他们拿了我们的护照。"]


@pytest.fixture(scope="module")
def golden(shared: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((shared / "golden.json").read_text(encoding="utf-8"))["bleu"]
    return values


@pytest.mark.parametrize("example", ["ex1", "ex2"])
def test_golden_bleu(golden: dict[str, Any], example: str) -> None:
    values = golden[example]
    got = bleu(values["hyp"], values["ref"], "en")
    assert got.score == pytest.approx(values["13a"]["score"], abs=1e-9)
    assert "tok:13a" in got.signature
    assert f"BP = {values['13a']['bp']:.3f}" in got.detail
    assert f"hyp_len = {values['13a']['sys_len']} ref_len = {values['13a']['ref_len']}" in got.detail


@pytest.mark.parametrize(("example", "tokenizer"), [("ex1", "none"), ("ex2", "none"), ("ex2", "intl")])
def test_golden_tokenizers_differ_as_the_library_says(golden: dict[str, Any], example: str, tokenizer: str) -> None:
    # The golden values of other tokenizers tie the numbers above to the library that is installed here.
    values = golden[example]
    got = sacrebleu.BLEU(tokenize=tokenizer).corpus_score(values["hyp"], [values["ref"]])
    assert got.score == pytest.approx(values[tokenizer]["score"], abs=1e-9)


def test_golden_compound_split_is_higher_than_what_we_report(golden: dict[str, Any]) -> None:
    values = golden["ex1"]

    def split(line: str) -> str:
        return line.replace("-", " ##AT##-##AT## ")

    released = sacrebleu.BLEU(tokenize="none").corpus_score(
        [split(line) for line in values["hyp"]], [[split(line) for line in values["ref"]]]
    )
    assert released.score == pytest.approx(values["compound_split_then_none"]["score"], abs=1e-9)
    assert bleu(values["hyp"], values["ref"]).score < released.score - 10


def test_chinese_is_scored_by_the_zh_tokenizer_as_the_library_does() -> None:
    """B45: equal to the library, signature shown, and not the near zero of 13a."""
    got = bleu(ZH_HYP, ZH_REF, "zh")
    assert got.score == sacrebleu.corpus_bleu(ZH_HYP, [ZH_REF], tokenize="zh").score
    assert got.score > 40
    assert "tok:zh" in got.signature
    assert "version:" in got.signature
    assert "nrefs:1" in got.signature
    assert bleu(ZH_HYP, ZH_REF, "de").score < 5


def test_real_references_agree_with_the_library(shared: Path) -> None:
    path = shared / "data" / "tatoeba-en-zh" / "test.refs.json"
    per_line = json.loads(path.read_text(encoding="utf-8"))
    streams = streams_of(per_line)
    hyps = [refs[-1][:-2] + "。" for refs in per_line]
    got = bleu(hyps, streams, "zh")
    expected = sacrebleu.BLEU(tokenize="zh")
    assert got.score == expected.corpus_score(hyps, streams).score  # type: ignore[arg-type]
    assert got.signature == str(expected.get_signature())
    assert "nrefs:var" in got.signature
    assert sum(ref is not None for stream in streams for ref in stream) == 1056


def test_chrf_and_ter_are_the_librarys() -> None:
    hyps, refs = ["the cat sat on the mat", "a dog"], ["the cat sat on a mat", "one dog barks"]
    assert chrf(hyps, refs).score == sacrebleu.corpus_chrf(hyps, [refs]).score
    assert ter(hyps, refs).score == sacrebleu.corpus_ter(hyps, [refs]).score
    assert "nc:6|nw:0" in chrf(hyps, refs).signature
    assert "asian:no" in ter(hyps, refs, "de").signature


@pytest.mark.parametrize("language", ["zh", "ja", "zh-TW", "cmn"])
def test_ter_splits_asian_text(language: str) -> None:
    got = ter(ZH_HYP, ZH_REF, language)
    assert "norm:yes" in got.signature
    assert "asian:yes" in got.signature
    assert got.score < 25  # by characters three edits of 27; without the support every line is one wrong word
    assert ter(ZH_HYP, ZH_REF).score == 100.0


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_missing_mecab_is_said_and_signed(language: str) -> None:
    name, remark = tokenizer_for(language)
    if remark is None:
        assert name == f"{language}-mecab"
    else:
        assert name == "char"
        assert "MeCab is not installed" in remark
        assert f"sacrebleu[{language}]" in remark
    assert f"tok:{name}" in bleu(["猫が好き"], ["猫が好き"], language).signature


def test_lines_are_scored_as_the_library_scores_sentences() -> None:
    hyps, refs = ["the cat sat", "no", ""], [["the cat sat", "yes", "x"], ["a cat", None, None]]
    got = line_scores(hyps, refs, "en")
    assert [round(line.bleu, 6) for line in got] == [
        round(sacrebleu.sentence_bleu(hyps[0], ["the cat sat", "a cat"]).score, 6),
        0.0,
        0.0,
    ]
    assert got[0].chrf == sacrebleu.sentence_chrf(hyps[0], ["the cat sat", "a cat"]).score
    assert got[0].bleu == pytest.approx(100.0)


def test_a_second_reference_can_only_help() -> None:
    one = bleu(["a b c d e"], [["a b c x y"]]).score
    two = bleu(["a b c d e"], [["a b c x y"], ["z b c d e"]]).score
    assert two > one


def test_ragged_references_skip_what_is_missing() -> None:
    per_line = [["a b c d", "a b c e"], ["e f g h"], ["i j k l", None]]
    streams = streams_of(per_line)
    assert streams == [["a b c d", "e f g h", "i j k l"], ["a b c e", None, None]]
    got = bleu(["a b c e", "e f g h", "i j k l"], streams)
    assert got.score == pytest.approx(100.0)
    assert "nrefs:var" in got.signature


def test_flat_references_are_one_stream() -> None:
    assert bleu(["a b c d", "e"], ["a b c d", "e"]) == bleu(["a b c d", "e"], [["a b c d", "e"]])


@pytest.mark.parametrize("metric", [bleu, chrf, ter, line_scores])
def test_counts_that_differ_are_named(metric: Any) -> None:
    with pytest.raises(DataError, match=r"3 hypotheses but 2 lines in the references; they must be parallel"):
        metric(["a", "b", "c"], ["a", "b"])
    with pytest.raises(DataError, match=r"2 hypotheses but 3 lines in reference 2 of 2"):
        metric(["a", "b"], [["a", "b"], ["a", "b", "c"]])


def test_references_per_line_instead_of_streams_are_refused() -> None:
    with pytest.raises(DataError, match=r"3 hypotheses but 1 lines in reference 1 of 3; .*streams_of") as error:
        bleu(["a", "b", "c"], [["a"], ["b"], ["c"]])
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("hyps", "refs", "message"),
    [
        ([], [], "nothing to score"),
        (["a"], [], "1 hypotheses and no references"),
        ("abc", ["a", "b", "c"], "hypotheses are one string"),
        (["a", "b", "c"], "abc", "references are one string"),
        (["a", None], ["a", "b"], "hypothesis 2 is not text but null"),
        (["a", "b"], [["a", 3]], "line 2 is not text but a number"),
        (["a", "b"], [["a", None]], "line 2 has no reference"),
        (["a", "b"], [["a", "b"], "cd"], "reference 2 of 2 must be a list of strings, not a string"),
    ],
)
def test_strange_input_is_named(hyps: Any, refs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        bleu(hyps, refs)


def test_references_per_line_collect_all_faults() -> None:
    with pytest.raises(DataError) as error:
        streams_of([["a"], [], "b", [None], [1]], "refs.json")  # type: ignore[list-item]
    assert error.value.problems == (
        "refs.json: line 2 has no reference",
        "refs.json: line 3 must be a list of references, not a string",
        "refs.json: line 4 has no reference",
        "refs.json: line 5 has a reference that is not text but a number",
    )
    with pytest.raises(DataError) as error:
        streams_of([[]] * 50)
    assert len(error.value.problems) == 21
    assert error.value.problems[-1] == "and 30 more, 50 in all"


def test_empty_outputs_score_zero_and_do_not_crash() -> None:
    assert bleu(["", ""], ["a b", "c d"]).score == 0.0
    assert ter(["", ""], ["a b", "c d"]).score == 100.0
    assert bleu_metric("zh").tokenizer.signature() == "zh"
