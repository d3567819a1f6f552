"""`data get`: a corpus of the catalogue as files that a recipe reads.

OUT gets `train.tsv.gz`, `dev.tsv`, `test.tsv` (source TAB target), `dev.refs.json` and `test.refs.json` (a list with
the list of references of each line of the .tsv of the same name), `ATTRIBUTION.txt`, and `checksums.json`, written
last: what was downloaded and what was made of it. Downloads lie in `OUT/.download` until all is done, so that a command
that was cut off goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dragoman.errors import DataError, UsageError
from dragoman.text.catalogue import CATALOGUE, Entry, Tatoeba
from dragoman.text.download import Progress, file_sha256
from dragoman.text.published import published_files
from dragoman.text.tatoeba import tatoeba_files
from dragoman.text.workshop import Workshop

RECORD = "checksums.json"


@dataclass(frozen=True)
class Result:
    """What `get` did."""

    name: str
    folder: Path
    pairs: dict[str, int]
    """Pairs of each split; for dev and test, sources."""
    left_out: dict[str, int]
    """Pairs in no split, by cause."""
    files: dict[str, dict[str, int | str]] = field(repr=False)
    """Size and SHA-256 of each file."""
    made: bool
    """False where everything was there already, and intact."""


def find(name: str) -> Entry:
    """The corpus of that name; raises UsageError with the nearest where there is none."""
    for entry in CATALOGUE:
        if entry.name == name:
            return entry
    near = difflib.get_close_matches(name, [entry.name for entry in CATALOGUE], n=1)
    hint = f"did you mean {near[0]}?" if near else "`dragoman data list` shows those that are known"
    raise UsageError(f"no corpus is called {name!r}; {hint}")


def get(
    name: str,
    out: str | Path,
    *,
    force: bool = False,
    mirror: bool = False,
    progress: Progress | None = None,
    log: Callable[[str], None] = lambda message: None,
) -> Result:
    """Download, check and split the corpus `name` into the folder `out`. Nothing is done where it is there, intact.

    `force` writes over what is there, and takes a source that has changed; `mirror` goes to the second address at once.
    Raises DataError with one sentence a fault.
    """
    return make(find(name), Path(out), force=force, mirror=mirror, progress=progress, log=log)


def make(
    entry: Entry,
    out: Path,
    *,
    force: bool = False,
    mirror: bool = False,
    progress: Progress | None = None,
    log: Callable[[str], None] = lambda message: None,
) -> Result:
    """`get` for an entry at hand."""
    record = _read_record(out)
    if not force:
        found = _as_it_stands(entry, out, record)
        if found is not None:
            return found
    try:
        return _make(entry, out, {} if force or record is None else _sources(record), mirror, progress, log)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"the disk with {out} is full; make room and run the same command again") from None
        raise DataError(f"{error.filename or out} cannot be written: {error.strerror or error}") from None
    finally:
        _sweep(out)


def _make(
    entry: Entry,
    out: Path,
    known: dict[str, str],
    mirror: bool,
    progress: Progress | None,
    log: Callable[[str], None],
) -> Result:
    work = out / ".download"
    fresh = work / "made"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    shop = Workshop(work, fresh, known, mirror, progress, log)
    if isinstance(entry, Tatoeba):
        tatoeba_files(entry, shop)
    else:
        published_files(entry, shop)
    (fresh / "ATTRIBUTION.txt").write_text(_attribution(entry, shop), "utf-8", newline="\n")
    files: dict[str, dict[str, int | str]] = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(fresh.iterdir())
    }
    left_out = {cause: n for cause, n in shop.left_out.items() if n}
    record = {
        "format_version": 1,
        "name": entry.name,
        "pairs": shop.pairs,
        "left_out": left_out,
        "sources": [{"url": f.url, "bytes": f.size, "sha256": f.sha256} for f in shop.fetched.values()],
        "files": files,
    }
    (fresh / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", "utf-8", newline="\n")
    # The record goes first and comes last: with it, the files are whole.
    (out / RECORD).unlink(missing_ok=True)
    for name in [*files, RECORD]:
        with (fresh / name).open("rb") as file:
            os.fsync(file.fileno())
        (fresh / name).replace(out / name)
    shutil.rmtree(work)
    return Result(entry.name, out, dict(shop.pairs), left_out, files, made=True)


def _sweep(out: Path) -> None:
    """Leave of a call that failed what it downloaded, for the next to go on with, and no empty folders."""
    shutil.rmtree(out / ".download" / "made", ignore_errors=True)
    for folder in (*(out / ".download").glob("*/"), out / ".download", out):
        with contextlib.suppress(OSError):  # not empty, or not there
            folder.rmdir()


def _read_record(out: Path) -> dict[str, object] | None:
    path = out / RECORD
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file, and a folder is wanted for the corpus")
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text("utf-8"))
        if record["format_version"] != 1 or not isinstance(record["files"], dict):
            raise ValueError
        return dict(record)
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is not a record of `data get`; --force writes the corpus again") from None


def _sources(record: dict[str, object]) -> dict[str, str]:
    sources = record.get("sources")
    return {s["url"]: s["sha256"] for s in sources} if isinstance(sources, list) else {}


def _as_it_stands(entry: Entry, out: Path, record: dict[str, object] | None) -> Result | None:
    """What is in `out` already, where it is this corpus and whole; None where it has to be made."""
    if record is None:
        there = [name for name in ("train.tsv.gz", "dev.tsv", "test.tsv") if (out / name).exists()]
        if there:
            raise DataError(
                f"{out} has {', '.join(there)} already, but no {RECORD}, so it is not known whose they are; "
                "choose another --out, or write over them with --force"
            )
        return None
    if record["name"] != entry.name:
        raise DataError(f"{out} holds the corpus {record['name']}; choose another --out, or write over it with --force")
    files = record["files"]
    assert isinstance(files, dict)  # _read_record saw to it
    missing = [name for name in files if not (out / name).exists()]
    changed = [name for name in files if name not in missing and file_sha256(out / name) != files[name]["sha256"]]
    if changed:
        raise DataError(
            f"{', '.join(str(out / name) for name in changed)}: not as it was written (the SHA-256 in {RECORD} is "
            "another); --force writes the corpus again"
        )
    if missing:
        return None
    pairs, left_out = record["pairs"], record["left_out"]
    assert isinstance(pairs, dict)
    assert isinstance(left_out, dict)
    return Result(entry.name, out, pairs, left_out, files, made=False)


def _attribution(entry: Entry, shop: Workshop) -> str:
    lines = [
        f"{entry.name}: {entry.about}",
        f"Licence: {entry.licence}",
        f"Homepage: {entry.homepage}",
        "",
        "Made from:",
        *(f"  {fetched.url} ({fetched.size:,} bytes, SHA-256 {fetched.sha256})" for fetched in shop.fetched.values()),
        "",
        *shop.notes,
        "",
        "Splits: no source and no target, compared without case, punctuation and spaces, stands in two of them.",
        "Pairs in no split, by cause: "
        + (", ".join(f"{n:,} {cause}" for cause, n in shop.left_out.items() if n) or "none")
        + ".",
    ]
    return "\n".join(lines) + "\n"
