from __future__ import annotations

import gzip
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import DataError
from dragoman.text.splits import leak_key, split, tidy


def key(text: str, spaces: bool) -> str:
    """The rule that the corpora beside the repository were split by, written from its description."""
    bare = "".join(character for character in text.lower() if unicodedata.category(character)[0] not in "PS")
    return (" " if spaces else "").join(bare.split())


def test_a_corpus_split_elsewhere_comes_out_byte_for_byte(shared: Path) -> None:
    folder = shared / "data" / "tatoeba-en-zh"
    if not folder.is_dir():
        pytest.skip("needs the corpus tatoeba-en-zh beside the repository")
    table = gzip.decompress((folder / "cmn.tsv.gz").read_bytes()).decode().splitlines()
    rows = list(dict.fromkeys((tidy(line.split("\t")[0]), tidy(line.split("\t")[1])) for line in table))
    parts = split(rows, src_key=lambda text: key(text, True), tgt_key=lambda text: key(text, False))

    def lines(numbers: list[int]) -> bytes:
        return "".join(f"{rows[row][0]}\t{rows[row][1]}\n" for row in numbers).encode()

    assert lines(parts.train) == gzip.decompress((folder / "train.tsv.gz").read_bytes())
    for name, items in {"dev": parts.dev, "test": parts.test}.items():
        assert lines([item[0] for item in items]) == (folder / f"{name}.tsv").read_bytes()
        references = json.loads((folder / f"{name}.refs.json").read_text("utf-8"))
        assert [[rows[row][1] for row in item] for item in items] == references


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("Hello, world!", "hello world"),
        ("any one", "Anyone."),
        ("他说：“好。”", "他说好"),
        ("Straße", "STRASSE"),
        ("it's", "its"),
        ("don_t", "dont"),
        ("a\u200bb", "ab"),
        ("cafe\u0301", "café"),
        ("3 + 4", "34"),
    ],
)
def test_sentences_that_count_as_one(a: str, b: str) -> None:
    assert leak_key(a) == leak_key(b)


def test_sentences_that_do_not() -> None:
    assert len({leak_key(text) for text in ("I go.", "I got.", "我去", "我走", "7", "8")}) == 6


def test_tidy() -> None:
    assert tidy(" a\u3000\u00a0b\t\u200bc\n e\u0301 ") == "a b c é"


# Few letters, so that sources and targets meet often.
SIDE = st.text("abAB .", min_size=1, max_size=3).filter(lambda text: bool(leak_key(text)))


@given(st.lists(st.tuples(SIDE, SIDE), min_size=1, max_size=60, unique=True))
def test_nothing_leaks_whatever_the_corpus(rows: list[tuple[str, str]]) -> None:
    try:
        parts = split(rows, n_test=3, n_dev=2)
    except DataError:
        assert len({leak_key(src) for src, _ in rows}) <= 5
        return
    groups = [parts.train, [row for item in parts.dev for row in item], [row for item in parts.test for row in item]]
    for side in (0, 1):
        keys = [{leak_key(rows[row][side]) for row in group} for group in groups]
        assert not keys[0] & keys[1]
        assert not keys[0] & keys[2]
        assert not keys[1] & keys[2]
    assert len(parts.test) == 3
    used = [row for group in groups for row in group]
    assert len(used) == len(set(used))
    for item in (*parts.dev, *parts.test):  # all the references of one spelling, in the order of the rows
        assert item == sorted(item)
        assert len({rows[row][0] for row in item}) == 1
        source = rows[item[0]][0]
        assert item == [row for row in range(len(rows)) if rows[row][0] == source]
    assert split(rows, n_test=3, n_dev=2) == parts


def test_which_sources_are_drawn_does_not_depend_on_the_order_of_the_rows() -> None:
    rows = [(f"source {i}", f"target {i}") for i in range(500)]
    one, two = split(rows, n_test=50, n_dev=50), split(rows[::-1], n_test=50, n_dev=50)
    assert [rows[item[0]] for item in one.test] == [rows[::-1][item[0]] for item in two.test]


def test_a_corpus_too_small_says_so() -> None:
    with pytest.raises(DataError, match=r"10 distinct sources, too few to draw 1,000 for test"):
        split([(f"s{i}", f"t{i}") for i in range(10)])
