"""Where a corpus is put together: downloads with their second addresses, and files written so that the same text always
gives the same bytes."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from dragoman.errors import DataError
from dragoman.text.catalogue import Address, host
from dragoman.text.download import Fetched, Progress, UnreachableError, fetch


class Workshop:
    """One `data get` at work. `pairs`, `left_out`, `fetched` and `notes` are what it has to tell afterwards."""

    def __init__(
        self,
        work: Path,
        made: Path,
        known: dict[str, str],
        mirror: bool,
        progress: Progress | None,
        log: Callable[[str], None],
    ) -> None:
        """`work`: folder of downloads; `made`: folder of what becomes the corpus; `known`: SHA-256 by address of the
        last time; `mirror`: skip first addresses that have a second."""
        self.work = work
        self.made = made
        self.mirror = mirror
        self.log = log
        self.fetched: dict[str, Fetched] = {}
        self.pairs: dict[str, int] = {}
        self.left_out: Counter[str] = Counter()
        self.notes: list[str] = []
        self._known = known
        self._progress = progress
        self._failed: dict[str, UnreachableError] = {}

    def fetch_any(self, addresses: Sequence[Address], *, attempts: int = 3) -> tuple[Address, Path]:
        """The file of the first address that gives it. Raises UnreachableError with what was wrong with each."""
        problems: list[str] = []
        causes: list[str] = []
        choice = addresses[1:] if self.mirror and len(addresses) > 1 else addresses
        for address in choice:
            if address.url not in self._failed:
                try:
                    return address, self._fetch(address, attempts)
                except UnreachableError as error:
                    self._failed[address.url] = error
                    if address is not choice[-1]:
                        self.log(f"{error.cause}; taking the next address")
            problems.extend(self._failed[address.url].problems)
            causes.append(self._failed[address.url].cause)
        raise UnreachableError(problems, "; ".join(causes))

    def took(self, fetched: Fetched) -> None:
        """Note a download. Raises DataError where it is not what came from the same address the last time."""
        known = self._known.get(fetched.url)
        if known is not None and known != fetched.sha256:
            raise DataError(
                f"{fetched.url} has changed since the first download (SHA-256 {fetched.sha256}, recorded {known}); "
                "--force takes the new one"
            )
        self.fetched[fetched.url] = fetched

    def _fetch(self, address: Address, attempts: int) -> Path:
        if address.url in self.fetched:
            return self.fetched[address.url].path
        # Files of one name may come from several hosts.
        path = self.work / host(address.url).replace(":", "-") / address.url.rsplit("/", 1)[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        fetched = fetch(
            address.url,
            path,
            size=address.size,
            sha=address.sha256,
            md5_sum=address.md5,
            attempts=attempts,
            progress=self._progress,
        )
        self.took(fetched)
        return path

    def write_pairs(self, name: str, pairs: Iterable[tuple[str, str]]) -> int:
        """Write a TSV file of the corpus (compressed where it is called .gz); how many lines it has."""
        lines = 0
        with self._open(name) as file:
            for src, tgt in pairs:
                file.write(f"{src}\t{tgt}\n".encode())
                lines += 1
        return lines

    def write_rows(self, name: str, rows: Iterable[Sequence[object]]) -> None:
        """Write a table with TABs between its columns."""
        with self._open(name) as file:
            for row in rows:
                file.write(("\t".join(map(str, row)) + "\n").encode())

    def write_test(self, split: str, items: Sequence[tuple[str, list[str]]]) -> None:
        """Write `split`.tsv with the first reference of each source, and `split`.refs.json with all of them."""
        self.pairs[split] = self.write_pairs(f"{split}.tsv", ((src, references[0]) for src, references in items))
        references = json.dumps([references for _, references in items], ensure_ascii=False, indent=0)
        (self.made / f"{split}.refs.json").write_text(references + "\n", "utf-8", newline="\n")

    @contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO]:
        with (self.made / name).open("wb") as raw:
            if name.endswith(".gz"):
                # No name and no time inside: the same lines, the same bytes.
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=9) as packed:
                    yield cast(BinaryIO, packed)
            else:
                yield raw
