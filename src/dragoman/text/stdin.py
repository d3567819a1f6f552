"""Standard input by the same line rule as files, for programs that answer while the other side is still writing."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator

from dragoman.errors import DataError
from dragoman.text.lines import Faults, InvalidUtf8, lines_of

PATIENCE = 0.01
"""Seconds without a byte after which the other side counts as waiting for us."""


class StandardInput:
    """The lines of stdin, and whether more of them are at hand. Reads the descriptor itself: nothing is held back."""

    def __init__(self) -> None:
        try:
            self._descriptor = sys.stdin.fileno()
        except (AttributeError, OSError, ValueError):
            raise DataError("there is no standard input to read; name a file") from None
        self._arrived = 0  # line feeds read
        self._given = 0  # lines given

    def lines(self, invalid_utf8: InvalidUtf8 = "error") -> Iterator[str]:
        """Each line as soon as it is complete. Raises DataError as `read_lines` does."""
        faults = Faults()
        for line in lines_of(self, "<stdin>", faults, invalid_utf8, at_once=True):
            faults.raise_if_any()  # those of a block are known before its first line is given: none of it is answered
            self._given += 1
            yield line

    def is_idle(self) -> bool:
        """Whether asking for another line would have to wait for somebody to write it."""
        return self._given >= self._arrived and not select.select([self._descriptor], [], [], PATIENCE)[0]

    def read1(self, size: int = -1, /) -> bytes:
        """What is there, waiting only where there is nothing; b"" at the end."""
        chunk = os.read(self._descriptor, size if size > 0 else 1 << 16)
        self._arrived += chunk.count(b"\n")
        return chunk

    def close(self) -> None:
        """The descriptor stays open: it is not ours."""
