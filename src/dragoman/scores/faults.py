"""Two faults of translation that a corpus score hides: nothing came out, or the same words came out again and again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dragoman.text.normalise import is_blank

# A unit is one ideograph or kana, one word with the hyphens, points and apostrophes inside it, or one run of the same
# mark, so that "great-great-great-aunt", "15.000.000.000", "……" and "!!!" are no loops while ". . . ." is one.
_UNIT = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
    r"|[^\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+(?:[-.,'’]\w+)*"
    r"|([^\w\s])\1*"
)
# "hahahaha…" or a script without spaces: the same letters at least six times in a row inside one word.
_INSIDE = re.compile(r"([^\W\d]{2,}?)\1{5,}")

LONGEST = 40
"""Units of the longest phrase that is looked for."""


@dataclass(frozen=True)
class Loop:
    """A phrase said several times in a row."""

    phrase: str
    times: int


def find_loop(text: str) -> Loop | None:
    """The repetition that takes up most of the text, or None.

    One unit (a word, an ideograph) must stand at least four times in a row, a longer phrase at least three times.
    """
    units = [match.group() for match in _UNIT.finditer(text)]
    best: tuple[int, int, int, int] | None = None  # units covered, -size, start, times
    for size in range(1, min(LONGEST, len(units) // 3) + 1):
        equal = 0  # so many units in a row equal the ones `size` before them
        for i in range(size, len(units)):
            equal = equal + 1 if units[i] == units[i - size] else 0
            times = equal // size + 1
            if times >= (4 if size == 1 else 3):
                found = (times * size, -size, i - equal - size + 1, times)
                if best is None or found[:2] > best[:2]:
                    best = found
    if best is not None:
        _, size, start, times = best
        phrase = units[start : start - size]
        glue = " " if all(len(unit) > 1 or unit.isascii() for unit in phrase) else ""
        return Loop(glue.join(phrase), times)
    inside = _INSIDE.search(text)
    if inside:
        return Loop(inside.group(1), len(inside.group()) // len(inside.group(1)))
    return None


def looping_outputs(hypotheses: Sequence[str], sources: Sequence[str] | None = None) -> list[int]:
    """Line numbers, from 1, of the hypotheses that loop; those whose source repeats itself as well are let pass."""
    lines = []
    for number, hypothesis in enumerate(hypotheses, start=1):
        loop = find_loop(hypothesis)
        if loop is None:
            continue
        source = find_loop(sources[number - 1]) if sources is not None else None
        if source is None or source.times < loop.times:
            lines.append(number)
    return lines


def empty_outputs(hypotheses: Sequence[str], sources: Sequence[str] | None = None) -> list[int]:
    """Line numbers, from 1, of the hypotheses without a visible character, where the source, if known, has one."""
    return [
        number
        for number, hypothesis in enumerate(hypotheses, start=1)
        if is_blank(hypothesis) and (sources is None or not is_blank(sources[number - 1]))
    ]
