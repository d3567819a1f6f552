"""Train, dev and test without leaks, the same for the same input.

Two sentences count as one where they agree without case, punctuation and spaces: no source and no target, so compared,
stands in two splits. Which sources are tested is drawn by the hash of the source, never by length or quality.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from dragoman.errors import DataError

Key = Callable[[str], str]


def tidy(text: str) -> str:
    """A sentence as corpora are written: NFC, no U+200B, every run of white space one space, none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).replace("\u200b", "").split())


def leak_key(text: str) -> str:
    """What two sentences are compared by: their letters and digits, folded, and nothing else.

    Coarser than it need be (it drops combining vowel signs too), so that it finds what any gentler comparison finds.
    """
    return "".join(character for character in unicodedata.normalize("NFC", text.casefold()) if character.isalnum())


@dataclass(frozen=True)
class Split:
    """Row numbers of each split. A row of dev or test is a source with all its references, so a list of rows."""

    train: list[int]
    dev: list[list[int]]
    test: list[list[int]]


def split(
    rows: Sequence[tuple[str, str]],
    *,
    n_test: int = 1000,
    n_dev: int = 1000,
    src_key: Key = leak_key,
    tgt_key: Key = leak_key,
) -> Split:
    """Draw test, then dev, from `rows` (source, target), each row once; train is what leaks into neither.

    Sources are taken in the order of the SHA-256 of their key. One is passed over where a target of it is already in
    the other set. Its references are the targets of its first spelling, in the order of the rows. Raises DataError
    where the corpus has too few distinct sources to leave any for training.
    """
    src_keys = [src_key(src) for src, _ in rows]
    tgt_keys = [tgt_key(tgt) for _, tgt in rows]
    of_source: dict[str, list[int]] = {}
    for row, key in enumerate(src_keys):
        of_source.setdefault(key, []).append(row)
    if len(of_source) <= n_test + n_dev:
        raise DataError(
            f"the corpus has {len(of_source):,} distinct sources, too few to draw {n_test:,} for test and {n_dev:,} "
            "for dev and train on the rest"
        )
    drawn = iter(sorted(of_source, key=lambda key: sha256(key.encode("utf-8")).hexdigest()))
    taken: set[str] = set()
    targets: set[str] = set()

    def draw(n: int) -> list[list[int]]:
        before = frozenset(targets)
        chosen: list[list[int]] = []
        for key in drawn:
            here = of_source[key]
            if before and any(tgt_keys[row] in before for row in here):
                continue
            taken.add(key)
            targets.update(tgt_keys[row] for row in here)
            first = rows[here[0]][0]
            chosen.append([row for row in here if rows[row][0] == first])
            if len(chosen) == n:
                break
        return chosen

    test = draw(n_test)
    dev = draw(n_dev)
    train = [row for row in range(len(rows)) if src_keys[row] not in taken and tgt_keys[row] not in targets]
    return Split(train, dev, test)
