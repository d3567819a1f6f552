"""Loops and empty outputs."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from dragoman.scores import empty_outputs, find_loop, looping_outputs


@pytest.mark.parametrize(
    ("text", "phrase", "times"),
    [
        ("salad salad salad salad", "salad", 4),
        ("I see the man and the man and the man and the man", "the man and", 3),
        ("我喜欢我喜欢我喜欢", "我喜欢", 3),
        ("他说他说他说他说。", "他说", 4),
        (". . . . . .", ".", 6),
        ("ein hahahahahahahaha lachen", "ha", 7),
        ("start a b c a b c a b c", "a b c", 3),
    ],
)
def test_loops_are_found(text: str, phrase: str, times: int) -> None:
    loop = find_loop(text)
    assert loop is not None
    # A cycle can be read from any of its words: the same words in turn, whichever comes first.
    assert sorted(loop.phrase) == sorted(phrase)
    assert loop.times >= times


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no no no",
        "very very good",
        "我看看，我看看。",
        "……！！！！",
        "Wait...",
        "1000000000000",
        "that that is is that that is not is not",
        "bye bye bye",
        "妈妈爸爸哥哥",
        "3.14159 = 3.14159",
        "Tom was my great-great-great-grandfather.",
        "15.000.000.000 Euro",
    ],
)
def test_ordinary_text_is_no_loop(text: str) -> None:
    assert find_loop(text) is None


def test_a_source_that_repeats_excuses_the_output() -> None:
    outputs = ["ja ja ja ja", "ja ja ja ja ja ja", "gut"]
    assert looping_outputs(outputs) == [1, 2]
    assert looping_outputs(outputs, ["yes yes yes yes", "yes", "good"]) == [2]


def test_empty_outputs_count_where_the_source_is_not() -> None:
    assert empty_outputs(["", " ", "a"]) == [1, 2]
    assert empty_outputs(["", " ", "a"], ["x", "  ", "b"]) == [1]


def test_what_people_write_does_not_loop(shared: Path) -> None:
    for name, size in (("tatoeba-en-zh/train.tsv.gz", 51_166), ("multi30k-en-de/train.de.gz", 29_000)):
        text = gzip.decompress((shared / "data" / name).read_bytes()).decode()
        sentences = [side for line in text.rstrip("\n").split("\n") for side in line.split("\t")]
        if name.startswith("tatoeba"):
            assert len(sentences) == size
        assert looping_outputs(sentences) == []
