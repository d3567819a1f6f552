"""Cleaning: which pairs are worth training on, and how many were left out by which cause.

Filters look at the normalised text and pass the pair on as it stands in the file. The order is that of `CleanConfig`;
a pair is counted once, under the first cause that takes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from dragoman.text.corpus import (
    BadRows,
    CleanConfig,
    Corpus,
    Counts,
    DataConfig,
    InvalidUtf8,
    Pair,
    Script,
    check_corpora,
    read_pairs,
)
from dragoman.text.normalise import is_blank, normalise

__all__ = ["CleanConfig", "Seen", "clean", "cleaned_pairs", "training_pairs"]

# Letters only: a full stop, a digit or a full-width comma is of no script. Blocks of the Unicode standard.
_SCRIPTS: dict[Script, re.Pattern[str]] = {
    "Arabic": re.compile(
        "[\u0620-\u064a\u066e-\u06d3\u06fa-\u06ff\u0750-\u077f\u08a0-\u08c9\ufb50-\ufdfb\ufe70-\ufefc]"
    ),
    "Cyrillic": re.compile("[\u0400-\u0481\u048a-\u052f\u1c80-\u1c8a\ua640-\ua66e\ua680-\ua69b]"),
    "Devanagari": re.compile("[\u0904-\u0939\u0958-\u0961\u0971-\u097f]"),
    "Greek": re.compile("[\u0370-\u0373\u0376-\u037d\u0386\u0388-\u03ff\u1f00-\u1fbc\u1fc2-\u1ffc]"),
    "Han": re.compile("[\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af]"),
    "Hangul": re.compile("[\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3]"),
    "Hebrew": re.compile("[\u05d0-\u05ea\ufb1d-\ufb4f]"),
    "Kana": re.compile("[\u3041-\u3096\u30a1-\u30fa\u31f0-\u31ff\uff66-\uff9d]"),
    "Latin": re.compile(
        "[A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02b8\u1e00-\u1eff\uff21-\uff3a\uff41-\uff5a]"
    ),
    "Thai": re.compile("[\u0e01-\u0e30\u0e32-\u0e33\u0e40-\u0e46]"),
}


class Seen:
    """The pairs met so far, as 64-bit digests: two different pairs among 40 million meet by chance once in 20,000
    corpora. About 100 bytes a distinct pair, whatever its length."""

    def __init__(self) -> None:
        self._digests: set[int] = set()

    def before(self, src: str, tgt: str) -> bool:
        """Whether this pair was asked about before."""
        text = f"{src}\n{tgt}".encode("utf-8", "surrogatepass")  # normalised text holds no LF, so it divides safely
        digest = int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
        if digest in self._digests:
            return True
        self._digests.add(digest)
        return False


def clean(
    pairs: Iterable[Pair], config: CleanConfig, counts: Counts | None = None, seen: Seen | None = None
) -> Iterator[Pair]:
    """The pairs that pass every filter, in order. `counts` gets one cause a pair left out, and `kept`.

    Duplicates are looked for among the pairs given here; a `seen` of one's own joins several corpora.
    """
    counts = Counts() if counts is None else counts
    seen = Seen() if seen is None else seen
    for pair in pairs:
        cause = _cause(pair, config, seen)
        if cause is None:
            counts["kept"] += 1
            yield pair
        else:
            counts[cause] += 1


def cleaned_pairs(
    corpus: Corpus, config: DataConfig, counts: Counts | None = None, seen: Seen | None = None
) -> Iterator[Pair]:
    """The pairs of one corpus as `config` reads and cleans them; see `read_pairs` for what it raises."""
    bad_rows: BadRows = config.bad_rows
    invalid_utf8: InvalidUtf8 = config.invalid_utf8
    pairs = read_pairs(corpus, bad_rows=bad_rows, invalid_utf8=invalid_utf8, counts=counts)
    return clean(pairs, config.clean, counts, seen)


def training_pairs(config: DataConfig, counts: Counts | None = None) -> Iterator[Pair]:
    """The pairs to train on: those of every corpus of `config.train`, one corpus after the other, each pair once.

    Weights say how often a pair is drawn, which is the business of the order of batches, not of the text. Every file
    is checked at the call, before the first pair is given.
    """
    corpora = config.train_corpora
    check_corpora(corpora)
    seen = Seen()
    return (pair for corpus in corpora for pair in cleaned_pairs(corpus, config, counts, seen))


def _cause(pair: Pair, config: CleanConfig, seen: Seen) -> str | None:
    """Why a pair is left out; None where it stays."""
    src, tgt = normalise(pair.src), normalise(pair.tgt)
    blanks = is_blank(src) + is_blank(tgt)
    if blanks:
        return "both_sides_blank" if blanks == 2 else "one_side_blank"
    shorter, longer = sorted((len(src), len(tgt)))
    if config.min_chars is not None and shorter < config.min_chars:
        return "length"
    if config.max_chars is not None and longer > config.max_chars:
        return "length"
    if config.max_ratio is not None and longer > config.max_ratio * shorter:
        return "ratio"
    if config.src_script is not None and not _SCRIPTS[config.src_script].search(src):
        return "script"
    if config.tgt_script is not None and not _SCRIPTS[config.tgt_script].search(tgt):
        return "script"
    if config.identical and src == tgt:
        return "identical"
    if config.duplicates and seen.before(src, tgt):
        return "duplicate"
    return None
