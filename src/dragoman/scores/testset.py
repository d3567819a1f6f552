"""A test set as its files say it: sources, and the references of each line, checked against each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.errors import DataError
from dragoman.scores.references import Streams, streams_of
from dragoman.text.corpus import Corpus, InvalidUtf8, check_corpora, open_text, read_lines, read_pairs
from dragoman.text.lines import read_chunks


@dataclass(frozen=True)
class TestSet:
    """Lines to translate, and what they should read."""

    sources: list[str] | None
    """None where only references were given, which is enough to score text that one has."""
    references: Streams
    """One stream for each reference; None where a line has fewer."""
    first: list[str]
    """The first reference of each line, of which perplexity is taken."""
    name: str
    """The file of the references, for messages."""

    __test__ = False  # pytest takes every class called Test… for a test

    def __len__(self) -> int:
        return len(self.first)

    def all_of(self, index: int) -> list[str]:
        """The references of one line."""
        return [ref for stream in self.references if (ref := stream[index]) is not None]


def read_test_set(
    tsv: str | None = None,
    src: str | None = None,
    refs: Sequence[str] = (),
    refs_json: str | None = None,
    invalid_utf8: InvalidUtf8 = "error",
) -> TestSet:
    """The test set of a TSV (source TAB reference), or of a source file and references; `refs_json` outdoes the
    references of a TSV.

    refs: files of one reference for each line. refs_json: a JSON list with, for each line, the list of all of its
    references. Raises DataError where files differ in their numbers of lines, naming both.
    """
    sources: list[str] | None = None
    columns: list[list[str]] = []
    if tsv is not None:
        pairs = list(read_pairs(Corpus(tsv=tsv), invalid_utf8=invalid_utf8))
        sources, columns = [pair.src for pair in pairs], [[pair.tgt for pair in pairs]]
    elif src is not None:
        check_corpora([Corpus(src=src, tgt=ref) for ref in refs])
        sources = list(read_lines(src, invalid_utf8))
    elif len(refs) > 1:
        check_corpora([Corpus(src=refs[0], tgt=ref) for ref in refs[1:]])
    columns += [list(read_lines(ref, invalid_utf8)) for ref in refs]
    name = refs_json or tsv or " and ".join(refs)
    if refs_json is not None:
        per_line = read_refs_json(refs_json)
        other = tsv or src
        if sources is not None and len(per_line) != len(sources):
            raise DataError(
                f"{other} has {len(sources)} lines, {refs_json} has {len(per_line)} entries: each line needs one"
            )
        streams = streams_of(per_line, refs_json)
    else:
        streams = [list(column) for column in columns]
    first = [next(ref for ref in line if ref is not None) for line in zip(*streams, strict=True)]
    if not first:
        raise DataError(f"{name} is empty: there is nothing to score")
    return TestSet(sources, streams, columns[0] if tsv is not None else first, name)


def read_refs_json(path: str) -> list[list[str]]:
    """The list in a JSON file (compressed ones by suffix), one entry for each line; its entries are checked later."""
    reader = open_text(path)
    try:
        raw = b"".join(read_chunks(reader, path))
    finally:
        reader.close()
    try:
        value: Any = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, byte {error.start} (from 0): 0x{raw[error.start]:02X} is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None
    if not isinstance(value, list):
        raise DataError(f"{path} must be a list with one entry for each line: the list of all its references")
    return value


def read_hypotheses(path: str, test: TestSet, invalid_utf8: InvalidUtf8 = "error") -> list[str]:
    """Translations that one has, a line each. Raises DataError where they are not as many as the references."""
    lines = list(read_lines(path, invalid_utf8))
    if len(lines) != len(test):
        raise DataError(
            f"{'<stdin>' if path == '-' else path} has {len(lines)} lines, {test.name} has {len(test)}: "
            "a hypothesis is needed for each"
        )
    return lines
