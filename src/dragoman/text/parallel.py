"""Where two files that should be parallel first go apart: a guess by lengths, for the message that names it."""

from __future__ import annotations

from array import array
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dragoman.text.lines import Faults, lines_of, open_text

_LIMIT = 1_000_000
"""Lines of either side that are looked at: 4 MB of lengths."""

_SHOWN = 60
"""Characters of a line that a message shows."""


def suspicious_pair(src: str, tgt: str, n_src: int, n_tgt: int) -> str:
    """`the first suspicious pair is line 57 ("…" / "…")` for two files of `n_src` and `n_tgt` lines."""
    line = break_line(_lengths(src), _lengths(tgt), n_src - n_tgt)
    return f"the first suspicious pair is line {line + 1} ({_shown(src, line)} / {_shown(tgt, line)})"


def break_line(src: NDArray[np.int32], tgt: NDArray[np.int32], surplus: int) -> int:
    """The index of the line from which `src` is `surplus` lines ahead of `tgt`, guessed from the characters of each.

    Sentences and their translations have lengths in about one proportion. Up to the break line i belongs to line i,
    from there on line i + surplus to line i: the break that makes lengths agree best is taken, the earliest of equals.
    """
    if surplus < 0:
        return break_line(tgt, src, -surplus)
    n = min(len(src), len(tgt))
    if n == 0:
        return 0
    # In units of each side's mean; a fifth of it is added so that short lines, which vary more, weigh less.
    source = np.log(src / max(src.mean(), 1.0) + 0.2)
    target = np.log(tgt / max(tgt.mean(), 1.0) + 0.2)
    straight = np.minimum(np.abs(source[:n] - target[:n]), 1.5)
    shifted = np.full(n, 1.5)
    m = min(n, len(src) - surplus)
    if m > 0:
        shifted[:m] = np.minimum(np.abs(source[surplus : surplus + m] - target[:m]), 1.5)
    before = np.concatenate([[0.0], np.cumsum(straight)])
    after = np.concatenate([np.cumsum(shifted[::-1])[::-1], [0.0]])
    return int(np.argmin(before + after))


def _lengths(path: str) -> NDArray[np.int32]:
    reader = open_text(path)
    try:
        lines = islice(lines_of(reader, path, Faults(), "replace"), _LIMIT)
        return np.array(array("i", (len(line.strip()) for line in lines)), dtype=np.int32)
    finally:
        reader.close()


def _shown(path: str, line: int) -> str:
    reader = open_text(path)
    try:
        text = next(islice(lines_of(reader, path, Faults(), "replace"), line, None), None)
    finally:
        reader.close()
    if text is None:
        return "no line"
    return f'"{text if len(text) <= _SHOWN else text[:_SHOWN] + "…"}"'
