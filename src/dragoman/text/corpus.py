"""Parallel lines: what `[data]` of a run says, and the pairs that it names, streamed.

A corpus is a TSV file with two columns or a pair of files; text is given as it stands there, normalised later. Nothing
here holds more than a few blocks of a file, so a corpus may be larger than the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

from dragoman.errors import ConfigError, DataError
from dragoman.text.lines import (
    Faults,
    InvalidUtf8,
    Reader,
    check_text,
    count_lines,
    is_pipe,
    lines_of,
    open_text,
    read_lines,
)

__all__ = [
    "BadRows",
    "CleanConfig",
    "Corpus",
    "Counts",
    "DataConfig",
    "InvalidUtf8",
    "Pair",
    "check_corpora",
    "count_lines",
    "open_text",
    "read_lines",
    "read_pairs",
]

BadRows = Literal["error", "skip"]
Script = Literal[
    "Arabic", "Cyrillic", "Devanagari", "Greek", "Han", "Hangul", "Hebrew", "Kana", "Latin", "Thai"
]  # ranges in clean.py


class Pair(NamedTuple):
    """A source, its target, and the line (from 1) where both stand in their file or files."""

    src: str
    tgt: str
    line: int


class Counts(Counter[str]):
    """How many pairs were read, kept, and left out by which cause. The keys, in the order of `describe`:

    `read`, `bad_row`, `both_sides_blank`, `one_side_blank`, `length`, `ratio`, `script`, `identical`, `duplicate`, and
    `kept`; stations further on add causes of their own.
    """

    def describe(self) -> str:
        """One line for a person: `25,583 pairs of 25,590 kept; left out: 5 one side blank, 2 duplicate`."""
        left = {cause: n for cause, n in self.items() if n and cause not in ("read", "kept")}
        told = ", ".join(f"{n:,} {cause.replace('_', ' ')}" for cause, n in left.items())
        return f"{self['kept']:,} pairs of {self['read']:,} kept" + (f"; left out: {told}" if told else "")


@dataclass(frozen=True)
class Corpus:
    """One parallel text: either `tsv`, or `src` and `tgt`."""

    tsv: str | None = None
    """A file with source TAB target on each line."""
    src: str | None = None
    """The source side, a sentence a line."""
    tgt: str | None = None
    """The target side, line for line with `src`."""
    weight: float = 1.0
    """How often its pairs are drawn, relative to those of the other corpora."""

    def __post_init__(self) -> None:
        problems = []
        if self.tsv is not None and (self.src is not None or self.tgt is not None):
            problems.append("a corpus is either tsv, or src and tgt: it cannot have both")
        elif self.tsv is None and (self.src is None or self.tgt is None):
            problems.append("a corpus needs tsv, or both src and tgt")
        if not 0 < self.weight < float("inf"):
            problems.append(f"the weight of a corpus is a number above 0, not {self.weight}")
        if problems:
            raise ConfigError(problems)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it is read from: one, or the source's and the target's."""
        return tuple(name for name in (self.tsv, self.src, self.tgt) if name is not None)

    @property
    def name(self) -> str:
        """What messages call it."""
        return " + ".join(self.files)


@dataclass(frozen=True)
class CleanConfig:
    """`[data.clean]`: what is left out of training. Lengths are in characters after normalisation. All off by default,
    but for pairs with a blank side, which are never trained on."""

    min_chars: int | None = None
    """Leave out pairs with a side shorter than this."""
    max_chars: int | None = None
    """Leave out pairs with a side longer than this."""
    max_ratio: float | None = None
    """Leave out pairs whose longer side has more than this many times the characters of the shorter (Chinese has about
    a third of English's)."""
    duplicates: bool = False
    """Leave out a pair that was there before, in any corpus of the list. Takes about 100 bytes a distinct pair."""
    identical: bool = False
    """Leave out pairs whose two sides are the same text."""
    src_script: Script | None = None
    """Leave out pairs whose source has no letter of this script."""
    tgt_script: Script | None = None
    """Leave out pairs whose target has no letter of this script, such as "Han" for Chinese."""

    def __post_init__(self) -> None:
        problems = []
        for key in ("min_chars", "max_chars"):
            value = getattr(self, key)
            if value is not None and value < 1:
                problems.append(f"data.clean.{key} counts characters: at least 1, not {value}")
        if self.min_chars is not None and self.max_chars is not None and self.min_chars > self.max_chars:
            problems.append(f"data.clean.min_chars ({self.min_chars}) is above data.clean.max_chars ({self.max_chars})")
        if self.max_ratio is not None and not self.max_ratio >= 1:
            problems.append(f"data.clean.max_ratio is longer over shorter: at least 1, not {self.max_ratio}")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class DataConfig:
    """`[data]`: what a run is trained and validated on."""

    train: str | Corpus | tuple[str | Corpus, ...] = ()
    """A TSV file, or a list of corpora `{ tsv = … }` and `{ src = …, tgt = … }` with weights."""
    dev: str | Corpus | None = None
    """What training is validated on; without it nothing is validated."""
    src_lang: str = ""
    """The source language, as a code such as "en"."""
    tgt_lang: str = ""
    """The target language, as a code such as "zh": it picks the tokenizer of the scores."""
    max_length: int = 512
    """Tokens a side; longer pairs are left out of training and counted, longer inputs are split or cut."""
    bad_rows: BadRows = "error"
    """What to do with a TSV row that has not two columns: stop and name them all, or skip and count them."""
    invalid_utf8: InvalidUtf8 = "error"
    """What to do with bytes that are not UTF-8: stop and name them all, or read each as U+FFFD."""
    clean: CleanConfig = field(default_factory=CleanConfig)
    """What else is left out of training."""

    def __post_init__(self) -> None:
        problems = []
        if self.max_length < 1:
            problems.append(f"data.max_length counts tokens: at least 1, not {self.max_length}")
        if self.bad_rows not in ("error", "skip"):
            problems.append(f'data.bad_rows is "error" or "skip", not {self.bad_rows!r}')
        if self.invalid_utf8 not in ("error", "replace"):
            problems.append(f'data.invalid_utf8 is "error" or "replace", not {self.invalid_utf8!r}')
        if problems:
            raise ConfigError(problems)

    @property
    def train_corpora(self) -> tuple[Corpus, ...]:
        """The corpora to train on, in the order given; raises ConfigError where there is none."""
        train = self.train if isinstance(self.train, (tuple, list)) else (self.train,)
        corpora = tuple(Corpus(tsv=c) if isinstance(c, str) else c for c in train if c)
        if not corpora:
            raise ConfigError('data.train is missing: name a TSV file, as in train = "train.tsv.gz"')
        return corpora

    @property
    def dev_corpus(self) -> Corpus | None:
        """The corpus to validate on, if there is one."""
        if isinstance(self.dev, str):
            return Corpus(tsv=self.dev) if self.dev else None
        return self.dev


def read_pairs(
    corpus: Corpus,
    *,
    bad_rows: BadRows = "error",
    invalid_utf8: InvalidUtf8 = "error",
    counts: Counts | None = None,
) -> Iterator[Pair]:
    """The pairs of a corpus in file order, text as it stands there, blank sides included.

    Checked at the call: the files are there, and those of a pair have as many lines as each other. Raised while
    reading: rows without two columns and bytes that are not UTF-8, after all of them are found; pairs before the first
    fault have been given by then. `counts` gets `read` and, when skipped, `bad_row`.
    """
    check_corpora([corpus])
    counts = Counts() if counts is None else counts
    if corpus.tsv is not None:
        return _rows(corpus.tsv, bad_rows, invalid_utf8, counts)
    src, tgt = corpus.files
    return _side_by_side(src, tgt, invalid_utf8, counts)


def check_corpora(corpora: Sequence[Corpus]) -> None:
    """Raise DataError, before any work is done, for files that are missing or not parallel: all of them at once."""
    problems: list[str] = []
    for corpus in corpora:
        try:
            if corpus.tsv is not None:
                check_text(corpus.tsv)
                continue
            problem = _not_parallel(corpus)
            if problem:
                problems.append(problem)
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(problems)


def _rows(tsv: str, bad_rows: BadRows, invalid_utf8: InvalidUtf8, counts: Counts) -> Iterator[Pair]:
    faults = Faults()
    reader = open_text(tsv)
    read = bad = 0
    try:
        for number, line in enumerate(lines_of(reader, tsv, faults, invalid_utf8), start=1):
            read += 1
            src, tab, tgt = line.partition("\t")
            if not tab or "\t" in tgt:
                bad += 1
                if bad_rows == "error":
                    faults.add(_bad_row(tsv, number, line))
            elif not faults.total:
                yield Pair(src, tgt, number)
    except DataError as error:
        for problem in error.problems:
            faults.add(problem)
    finally:
        reader.close()
        counts["read"] += read
        if bad:
            counts["bad_row"] += bad
    faults.raise_if_any()


def _bad_row(tsv: str, number: int, line: str) -> str:
    columns = line.count("\t") + 1
    found = "an empty line" if not line else f"{columns} column{'s' * (columns > 1)}"
    return f'{tsv}, line {number}: {found}, where source TAB target is wanted (bad_rows = "skip" leaves such rows out)'


def _side_by_side(src: str, tgt: str, invalid_utf8: InvalidUtf8, counts: Counts) -> Iterator[Pair]:
    faults = Faults()
    readers: list[Reader] = []
    number = 0
    try:
        readers.append(open_text(src))
        readers.append(open_text(tgt))
        left = lines_of(readers[0], src, faults, invalid_utf8)
        right = lines_of(readers[1], tgt, faults, invalid_utf8)
        for a, b in zip_longest(left, right):
            if a is None or b is None:
                short, long = (src, tgt) if a is None else (tgt, src)
                faults.add(f"{src} and {tgt} must be parallel: {short} ends after line {number:,}, and {long} goes on")
                break
            number += 1
            if not faults.total:
                yield Pair(a, b, number)
    except DataError as error:
        for problem in error.problems:
            faults.add(problem)
    finally:
        for reader in readers:
            reader.close()
        counts["read"] += number
    faults.raise_if_any()


def _not_parallel(corpus: Corpus) -> str | None:
    """The sentence that says so, with both counts and the first suspicious pair; None where the counts agree."""
    from dragoman.text.parallel import suspicious_pair

    src, tgt = corpus.files
    problems: list[str] = []
    found: list[int] = []
    if is_pipe(src) or is_pipe(tgt):
        return None  # it can be read once only; that reading will tell
    for path in (src, tgt):
        try:
            found.append(count_lines(path))
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(problems)
    if found[0] == found[1]:
        return None
    return (
        f"{src} has {found[0]:,} lines, {tgt} has {found[1]:,}; they must be parallel: "
        f"{suspicious_pair(src, tgt, found[0], found[1])}"
    )
