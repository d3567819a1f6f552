"""Long lines in pieces: each fits, none is lost, and cuts come at the best places."""

from __future__ import annotations

import random

import pytest

from dragoman.text.split import join, sentences, split


def characters(texts):
    return [len(text) for text in texts]


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    ("lang", "text", "expected"),
    [
        ("en", "Dr. Smith came. He said: no!  Why?", ["Dr. Smith came. ", "He said: no!  ", "Why?"]),
        ("de", "Das ist z. B. gut. Am 3. Mai kam er.", ["Das ist z. B. gut. ", "Am 3. Mai kam er."]),
        ("zh", "你好。我是史密斯！“好的。”他说。", ["你好。", "我是史密斯！", "“好的。”", "他说。"]),
        ("", "One. Two.", ["One. ", "Two."]),
        ("zh_Hant", "你好。再見。", ["你好。", "再見。"]),
    ],
)
def test_sentences(lang, text, expected) -> None:
    assert sentences(text, lang) == expected


def test_the_strongest_mark_is_cut_at_first() -> None:
    text = "He came, and he saw it; then he went, as one does, to the sea."
    assert split(text, 40, characters, "en") == ["He came, and he saw it;", "then he went, as one does, to the sea."]
    assert split(text, 24, characters, "en") == [
        "He came, and he saw it;",
        "then he went,",
        "as one does, to the sea.",
    ]
    assert split("one two three four", 9, characters, "en") == ["one two", "three", "four"]
    assert split("这是一个很长的句子，没有空格。好", 10, characters, "zh") == [
        "这是一个很长的句子，",
        "没有空格。",
        "好",
    ]


def test_nothing_is_lost_and_everything_fits() -> None:
    draw = random.Random(4)
    alphabet = [
        "a",
        "bc",
        "def. ",
        " ",
        ", ",
        "; ",
        "。",
        "，",
        "字",
        "e\u0301",
        "👨\u200d👩\u200d👧",
        "3.14",
        "\u2028",
        "\t",
    ]
    for _ in range(150):
        text = "".join(draw.choices(alphabet, k=draw.randint(1, 120)))
        limit = draw.randint(9, 30)
        pieces = split(text, limit, characters, draw.choice(["en", "zh", "xx"]))
        assert squeezed("".join(pieces)) == squeezed(text)
        assert all(piece.strip() and len(piece) <= limit for piece in pieces)


def test_a_character_keeps_its_accents() -> None:
    pieces = split("e\u0301" * 50, 7, characters, "fr")
    assert "".join(pieces) == "e\u0301" * 50
    assert not any(piece.startswith("\u0301") for piece in pieces)
    assert split("👍", 0, characters) == ["👍"]


def test_a_token_count_that_is_not_additive() -> None:
    """Tokens of a whole may be more than those of its parts."""
    pieces = split("a b c d e f g h", 6, lambda texts: [len(text) ** 2 // 4 for text in texts], "en")
    assert squeezed("".join(pieces)) == "abcdefgh"
    assert all(len(piece) ** 2 // 4 <= 6 for piece in pieces)


def test_a_megabyte_is_no_trouble() -> None:
    counted = 0

    def count(texts):
        nonlocal counted
        counted += sum(map(len, texts))
        return characters(texts)

    text = "word " * 100_000 + "x" * 200_000
    pieces = split(text, 200, count, "en")
    assert squeezed("".join(pieces)) == squeezed(text)
    assert counted < 20 * len(text)


def test_joining() -> None:
    assert join(["Ja.", "Nein."]) == "Ja. Nein."
    assert join(["你好。", "世界！"]) == "你好。世界！"
    assert join(["", "a", ""]) == "a"
    assert join([]) == ""
