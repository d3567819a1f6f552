"""Lines too long for a model: cut into pieces that fit, and put together again. No character but spaces is lost.

Sentences first, by a library that knows the abbreviations of some three hundred languages; within a sentence that is
still too long after punctuation, from the strongest down; then at spaces; and where there is none, between characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence

Count = Callable[[Sequence[str]], Sequence[int]]
"""How many tokens each of some texts has."""

# Where a sentence may be cut, the best place first: each pattern matches what stays at the end of a part.
_CUTS = (
    re.compile(r"[.!?…。！？]+[\"'”’»)\]）」』]*\s+|[。！？]+[\"'”’»)\]）」』]*"),
    re.compile(r"[;:]\s+|[；：]"),
    re.compile(r"[,،–—]\s+|[，、]"),
    re.compile(r"\s+"),
)
# Letters and marks of scripts that put no space between sentences: CJK punctuation and full-width forms, kana, Han.
_NO_SPACE = re.compile(
    "[\u2e80-\u2fff\u3000-\u30ff\u31c0-\u31ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]"
)
_JOINER = "\u200d"


def sentences(text: str, lang: str = "") -> list[str]:
    """The sentences of a text; joined, they are the text."""
    import sentencex

    # The library cuts texts at line feeds, which a line of ours has none of. It takes two-letter codes; for one that it
    # does not know it has rules that do for most.
    return list(sentencex.segment(lang.replace("_", "-").split("-")[0].lower() or "en", text))


def split(text: str, limit: int, count: Count, lang: str = "") -> list[str]:
    """Pieces of at most `limit` tokens by `count`, a sentence each where it fits. No piece is blank.

    A single character of more than `limit` tokens is a piece all the same.
    """
    whole = sentences(text, lang)
    pieces: list[str] = []
    for sentence, n in zip(whole, count(whole), strict=True):
        pieces += [sentence] if n <= limit else _cut(sentence, limit, count, 0)
    return [piece.strip(" ") for piece in pieces if piece.strip()]


def join(pieces: Sequence[str]) -> str:
    """Translated pieces as one line: a space between them, but none beside Chinese or Japanese."""
    text = ""
    for piece in pieces:
        if text and piece and not (_NO_SPACE.match(text[-1]) or _NO_SPACE.match(piece[0])):
            text += " "
        text += piece
    return text


def _cut(text: str, limit: int, count: Count, level: int) -> list[str]:
    """`text`, which is too long, in parts that are not: as few cuts as the places of this `level` allow."""
    if level == len(_CUTS):
        return _between_characters(text, limit, count)
    parts = _parts(text, _CUTS[level])
    if len(parts) == 1:
        return _cut(text, limit, count, level + 1)
    pieces: list[str] = []
    packed, size = "", 0
    for part, n in zip(parts, count(parts), strict=True):
        if packed and size + n > limit:
            pieces += _checked(packed, limit, count, level)
            packed, size = "", 0
        packed, size = packed + part, size + n
    return pieces + _checked(packed, limit, count, level)


def _checked(packed: str, limit: int, count: Count, level: int) -> list[str]:
    """Parts that stand together, once more counted: together they may have more tokens than one by one."""
    return [packed] if count([packed])[0] <= limit else _cut(packed, limit, count, level + 1)


def _parts(text: str, place: re.Pattern[str]) -> list[str]:
    """The text cut after each match."""
    ends = [match.end() for match in place.finditer(text)]
    if not ends or ends[-1] != len(text):
        ends.append(len(text))
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False) if start < end]


def _between_characters(text: str, limit: int, count: Count) -> list[str]:
    """Parts of as many characters as fit, but none that tears a character from its accents."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        low, high = 1, min(len(text) - start, 8 * limit)  # low always fits, or is the least there is
        while low < high:
            middle = (low + high + 1) // 2
            if count([text[start : start + middle]])[0] <= limit:
                low = middle
            else:
                high = middle - 1
        end = start + low
        while end > start and _clings(text, end):
            end -= 1
        if end == start:  # one character with more marks than fit: torn after all
            end = start + low
        pieces.append(text[start:end])
        start = end
    return pieces


def _clings(text: str, at: int) -> bool:
    """Whether the character at `at` belongs to the one before it."""
    return at < len(text) and (unicodedata.category(text[at]) in ("Mn", "Mc", "Me", "Cf") or text[at - 1] == _JOINER)
