"""Placeholders, tags and whatever else must come through a translation unchanged: where they stand in a line."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence


def cut(line: str, patterns: Sequence[str]) -> list[str]:
    """The parts of a line in turns: what is to be translated, what a pattern matches, and so on; an odd number.

    Of matches that overlap the first counts, and of those that begin together the longest.
    """
    spans = [match.span() for pattern in patterns for match in re.finditer(pattern, line) if match.group()]
    places, end = [0], 0
    for start, stop in sorted(spans, key=lambda span: (span[0], -span[1])):
        if start >= end:
            places += [start, stop]
            end = stop
    return [line[a:b] for a, b in itertools.pairwise([*places, len(line)])]


def is_lost(parts: Sequence[str], translation: str) -> bool:
    """Whether something that `cut` kept stands less often in the translation. What is part of a longer one is lost."""
    kept = Counter(parts[1::2])
    for text in sorted(kept, key=len, reverse=True):
        if translation.count(text) < kept[text]:
            return True
        translation = translation.replace(text, "\n")  # which no line holds, so that nothing new comes together
    return False


def glue(parts: Sequence[str], translated: Sequence[str]) -> str:
    """The line again, with translations in place of every other part, and the white space around each as it was."""
    text = ""
    for k, part in enumerate(parts):
        if k % 2:
            text += part
            continue
        before = part[: len(part) - len(part.lstrip())]
        after = part[len(part.rstrip()) :] if part.strip() else ""
        text += before + translated[k // 2] + after
    return text
