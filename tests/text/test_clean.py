from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.errors import DataError
from dragoman.text.clean import clean, training_pairs
from dragoman.text.corpus import CleanConfig, Corpus, Counts, DataConfig, Pair


def cleaned(pairs: list[tuple[str, str]], config: CleanConfig) -> tuple[list[int], dict[str, int]]:
    counts = Counts()
    kept = [pair.line for pair in clean((Pair(s, t, i) for i, (s, t) in enumerate(pairs)), config, counts)]
    assert counts.pop("kept", 0) == len(kept)
    return kept, dict(counts)


def test_blank_sides_never_stay_and_are_told_apart() -> None:
    kept, counts = cleaned([("a", "b"), ("", "b"), ("a", " \t"), ("", ""), ("\u3000", "▁")], CleanConfig())
    assert kept == [0]
    assert counts == {"one_side_blank": 2, "both_sides_blank": 2}


def test_nothing_else_is_left_out_by_default() -> None:
    pairs = [("a", "a"), ("a", "a"), ("x" * 5000, "y"), ("你好", "hello")]
    assert cleaned(pairs, CleanConfig()) == ([0, 1, 2, 3], {})


def test_length_counts_characters_after_normalisation() -> None:
    pairs = [
        ("abc", "abc"),
        ("ab", "abc"),
        ("abcdef", "abc"),
        ("  a    b ", "abc"),
        ("e\u0301e\u0301e\u0301e\u0301e\u0301", "abc"),
    ]
    assert cleaned(pairs, CleanConfig(min_chars=3, max_chars=5)) == ([0, 3, 4], {"length": 2})


def test_ratio_works_both_ways() -> None:
    pairs = [("a" * 30, "b" * 10), ("a" * 31, "b" * 10), ("a" * 10, "b" * 31)]
    assert cleaned(pairs, CleanConfig(max_ratio=3.0)) == ([0], {"ratio": 2})


def test_duplicates_are_pairs_not_sides() -> None:
    pairs = [("a", "b"), ("a", "c"), ("a", "b"), (" a ", "b"), ("ab", ""), ("a\tb", "c"), ("a", "b\tc")]
    kept, counts = cleaned(pairs, CleanConfig(duplicates=True))
    assert kept == [0, 1, 5, 6]
    assert counts == {"duplicate": 2, "one_side_blank": 1}


def test_identical_sides() -> None:
    assert cleaned([("Tom", "Tom"), ("Tom", "tom")], CleanConfig(identical=True)) == ([1], {"identical": 1})


@pytest.mark.parametrize(
    ("script", "has", "lacks"),
    [
        ("Han", "我有 3 本书。", "I have 3 books，。"),
        ("Latin", "Ünïcode 3", "这是 3，。"),
        ("Cyrillic", "Привет", "Privet"),
        ("Greek", "καλημέρα", "kalimera"),
        ("Kana", "これは", "這是"),
        ("Hangul", "안녕", "你好"),
        ("Arabic", "مرحبا", "؟ 3"),
        ("Hebrew", "שלום", "shalom"),
        ("Devanagari", "नमस्ते", "namaste"),
        ("Thai", "สวัสดี", "sawasdee"),
    ],
)
def test_scripts(script: str, has: str, lacks: str) -> None:
    pairs = [("x", has), ("x", lacks)]
    assert cleaned(pairs, CleanConfig(tgt_script=script)) == ([0], {"script": 1})  # type: ignore[arg-type]
    assert cleaned([(b, a) for a, b in pairs], CleanConfig(src_script=script)) == ([0], {"script": 1})  # type: ignore[arg-type]


def test_a_pair_is_counted_once() -> None:
    config = CleanConfig(max_chars=3, max_ratio=1.5, identical=True, tgt_script="Han", duplicates=True)
    kept, counts = cleaned([("long text", "long text")] * 3, config)
    assert kept == []
    assert counts == {"length": 3}


def test_training_pairs_joins_corpora_and_counts(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\nc\td\n\te\n", "utf-8")
    (tmp_path / "b.src").write_text("a\nx\n", "utf-8")
    (tmp_path / "b.tgt").write_text("b\ny\n", "utf-8")
    config = DataConfig(
        train=(str(tmp_path / "a.tsv"), Corpus(src=str(tmp_path / "b.src"), tgt=str(tmp_path / "b.tgt"), weight=2.0)),
        clean=CleanConfig(duplicates=True),
    )
    counts = Counts()
    assert [pair[:2] for pair in training_pairs(config, counts)] == [("a", "b"), ("c", "d"), ("x", "y")]
    assert counts == Counts({"read": 5, "kept": 3, "one_side_blank": 1, "duplicate": 1})  # found across corpora


def test_training_pairs_checks_every_corpus_before_the_first_pair(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n", "utf-8")
    config = DataConfig(train=(str(tmp_path / "a.tsv"), "nowhere.tsv"))
    with pytest.raises(DataError, match=r"nowhere\.tsv"):
        training_pairs(config)
