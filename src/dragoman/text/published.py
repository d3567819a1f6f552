"""Corpora with splits of their own: their texts as TSV, and out of dev and train what stands in a test set.

Test sets are left as published, so that scores can be compared; markup of the workshops' formats is taken off.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path

from dragoman.errors import DataError
from dragoman.text.archive import unpack
from dragoman.text.catalogue import Address, Part, Published
from dragoman.text.lines import open_text, read_chunks, read_lines
from dragoman.text.splits import leak_key
from dragoman.text.workshop import Workshop

_SEGMENT = re.compile(r"<seg[^>]*>(.*?)</seg>", re.IGNORECASE)
_TED_TAG = re.compile(r"\s*</?(doc|url|keywords|speaker|talkid|title|description|reviewer|translator)\b", re.IGNORECASE)


def published_files(entry: Published, shop: Workshop) -> None:
    """Make the corpus in the workshop: test sets first, for dev must not leak into them, nor train into either."""
    files = _Files(entry, shop)
    seen: tuple[set[str], set[str]] = (set(), set())
    names = dict.fromkeys(part.split for part in entry.parts if part.split not in ("train", "dev"))
    for name in [*names, "dev"]:
        pairs = [pair for part in entry.parts if part.split == name for pair in files.pairs(part)]
        if name == "dev":
            pairs = list(_leak_free(pairs, seen, shop, "dev"))
        shop.write_test(name, [(src, [tgt]) for src, tgt in pairs])
        for side in (0, 1):
            seen[side].update(leak_key(pair[side]) for pair in pairs)
    train = (pair for part in entry.parts if part.split == "train" for pair in files.pairs(part))
    shop.pairs["train"] = shop.write_pairs("train.tsv.gz", _leak_free(train, seen, shop, "train"))
    shop.notes += [
        f"{entry.src_lang} TAB {entry.tgt_lang}; as published, but for white space at the ends, TABs (made spaces) and",
        "the pairs of dev and train that would leak from a test set.",
    ]


def _leak_free(
    pairs: Iterator[tuple[str, str]] | list[tuple[str, str]], seen: tuple[set[str], set[str]], shop: Workshop, name: str
) -> Iterator[tuple[str, str]]:
    for src, tgt in pairs:
        if not src or not tgt:
            shop.left_out[f"{name}: one side blank" if src or tgt else f"{name}: both sides blank"] += 1
        elif leak_key(src) in seen[0] or leak_key(tgt) in seen[1]:
            shop.left_out[f"{name}: in a set tested on"] += 1
        else:
            yield src, tgt


class _Files:
    """The texts of a corpus, downloaded and unpacked when they are asked for."""

    def __init__(self, entry: Published, shop: Workshop) -> None:
        self._shop = shop
        self._unpacked: dict[str, dict[str, Path]] = {}
        self._members: dict[str, dict[str, None]] = {}  # of each archive, all that will be wanted: one pass over it
        for part in entry.parts:
            for address in (*part.src, *part.tgt):
                if address.member is not None:
                    self._members.setdefault(address.url, {})[address.member] = None

    def pairs(self, part: Part) -> Iterator[tuple[str, str]]:
        """The pairs of a part. Raises DataError where the two texts have not as many sentences as each other."""
        (src_name, src), (tgt_name, tgt) = self._text(part.src), self._text(part.tgt)
        sides = zip_longest(_sentences(src_name, src), _sentences(tgt_name, tgt), fillvalue=0)
        for number, (a, b) in enumerate(sides, start=1):
            if isinstance(a, int) or isinstance(b, int):
                raise DataError(f"{src_name} and {tgt_name} are not parallel: one ends after {number - 1:,} lines")
            if (a is None) != (b is None):
                raise DataError(f"{src_name} and {tgt_name} are not parallel: markup on one side of line {number:,}")
            if a is not None and b is not None:
                yield a, b

    def _text(self, addresses: tuple[Address, ...]) -> tuple[str, Path]:
        address, path = self._shop.fetch_any(addresses)
        if address.member is None:
            _check_text(address, path)
            return address.url, path
        if address.url not in self._unpacked:
            self._shop.log(f"unpacking {path.name}")
            members = list(self._members[address.url])
            folder = self._shop.work / f"unpacked-{len(self._unpacked)}"
            self._unpacked[address.url] = unpack(path, members, folder)
        return address.member, self._unpacked[address.url][address.member]


def _check_text(address: Address, path: Path) -> None:
    if address.text_sha256 is None:
        return
    digest = sha256()
    reader = open_text(path)
    try:
        for chunk in read_chunks(reader, str(path)):
            digest.update(chunk)
    finally:
        reader.close()
    if digest.hexdigest() != address.text_sha256:
        path.unlink()
        raise DataError(
            f"{address.url} is not the text that was expected: the SHA-256 of the unpacked text is "
            f"{digest.hexdigest()}, and {address.text_sha256} is expected; it was thrown away"
        )


def _sentences(name: str, path: Path) -> Iterator[str | None]:
    """The sentences of a text, None for a line of markup that the other side has as well."""
    file = name.rsplit("/", 1)[1]
    lines = (line.replace("\t", " ").strip() for line in read_lines(path, invalid_utf8="replace", name=name))
    if file.endswith((".sgm", ".xml")):
        # sacreBLEU leaves the entities of the news tests as they are, and so does whoever compares with it.
        meaning: Callable[[str], str] = html.unescape if file.endswith(".xml") else str
        return (meaning(match[1]).strip() for line in lines if (match := _SEGMENT.search(line)))
    if file.startswith("train.tags."):
        return (None if _TED_TAG.match(line) else line for line in lines)
    return lines
