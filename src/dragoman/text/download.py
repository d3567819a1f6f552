"""A file from the network, whole or not at all: resumed after a cut, checked by size and SHA-256, kept under its name
only when it is right. What went wrong is one sentence with the address and what to do next."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import md5, sha256
from pathlib import Path
from typing import BinaryIO

from dragoman.errors import DataError

Progress = Callable[[str, int, int | None], None]
"""Told the address, the bytes that are here, and the bytes in all, where the server says."""

BLOCK = 1 << 18
TIMEOUT = 8.0
"""Seconds without an answer or a byte after which a server counts as out of reach."""


class UnreachableError(DataError):
    """The server did not answer, or not with the file; another address may. `cause` says why, and no more."""

    def __init__(self, problems: str | Sequence[str], cause: str) -> None:
        super().__init__(problems)
        self.cause = cause


@dataclass(frozen=True)
class Fetched:
    """A file that was downloaded and checked: where from, where to, and what it is."""

    url: str
    path: Path
    size: int
    sha256: str


def fetch(
    url: str,
    path: Path,
    *,
    size: int | None = None,
    sha: str | None = None,
    md5_sum: str | None = None,
    timeout: float = TIMEOUT,
    attempts: int = 3,
    progress: Progress | None = None,
) -> Fetched:
    """Download `url` to `path`, going on from `path`.part where an earlier call was cut off.

    `size`, `sha` (SHA-256) and `md5_sum` are what is known of the file; one that differs is thrown away. A connection
    that breaks is taken up again while bytes still come, `attempts` times without. Raises UnreachableError for what
    another address could give, DataError for what it could not (a full disk).
    """
    part = path.with_name(path.name + ".part")
    tag = path.with_name(path.name + ".part.etag")
    if path.exists():
        with contextlib.suppress(UnreachableError):  # thrown away then, and fetched again
            return _checked(url, path, size, sha, md5_sum)
    idle = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            total = _transfer(url, part, tag, timeout, progress)
            break
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and before:
                part.unlink()  # longer than the file is now: begin again
                reason = "the partial file does not fit the server's"
            elif error.code < 500 and error.code not in (408, 429):
                raise UnreachableError(
                    f"{url}: the server answers {error.code} {error.reason}; the file may have moved: look for it on "
                    "the corpus's page",
                    f"{url}: {error.code} {error.reason}",
                ) from None
            else:
                reason = f"the server answers {error.code} {error.reason}"
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DataError(
                    f"{url}: the disk with {part.parent} is full after {_bytes(part):,} bytes; make room and run the "
                    "same command again, it goes on from there"
                ) from None
            if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM) and error.filename is not None:
                raise DataError(f"{part} cannot be written: {error.strerror}") from None
            reason = _reason(error)
        except http.client.HTTPException as error:
            reason = f"the connection broke ({type(error).__name__})"
        moved = _bytes(part) > before
        idle = 0 if moved else idle + 1
        if idle >= attempts:
            here = _bytes(part)
            if here:
                raise UnreachableError(
                    f"{url}: {reason} after {here:,} bytes; run the same command again, it goes on from there",
                    f"{url}: {reason} after {here:,} bytes",
                )
            raise UnreachableError(
                f"{url} cannot be reached: {reason}; check the network connection (or the proxy in https_proxy), then "
                "run the same command again",
                f"{url} cannot be reached: {reason}",
            )
        if not moved:
            time.sleep(min(2.0, 0.2 * 2**idle))
    if total is not None and _bytes(part) != total:
        came = _bytes(part)
        part.unlink()
        cause = f"{url}: {came:,} bytes came, {total:,} were announced"
        raise UnreachableError(f"{cause}; run the same command again", cause)
    fetched = _checked(url, part, size, sha, md5_sum)
    part.replace(path)
    tag.unlink(missing_ok=True)
    return Fetched(url, path, fetched.size, fetched.sha256)


def _transfer(url: str, part: Path, tag: Path, timeout: float, progress: Progress | None) -> int | None:
    """One connection's worth of the file, appended to `part`; the size of the whole, where the server said it.

    Raises IncompleteRead where the connection ends too early.
    """
    have = _bytes(part)
    request = urllib.request.Request(url, headers={"User-Agent": "dragoman"})
    validator = tag.read_text("utf-8") if have and tag.exists() else ""
    if have:
        request.add_header("Range", f"bytes={have}-")
        if validator:  # a file that changed meanwhile is then sent from its start
            request.add_header("If-Range", validator)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        if response.status == 206:
            start, total = _content_range(response.headers.get("Content-Range", ""))
            if start != have:
                raise http.client.HTTPException(f"asked for byte {have}, got byte {start}")
        else:
            have = 0
            length = response.headers.get("Content-Length")
            total = int(length) if length and length.isdigit() else None
        part.parent.mkdir(parents=True, exist_ok=True)
        strong = response.headers.get("ETag", "")
        tag.write_text(strong if strong and not strong.startswith("W/") else "", "utf-8")
        with part.open("ab" if have else "wb") as file:
            _copy(response, file, url, have, total, progress)
    if total is not None and _bytes(part) < total:
        raise http.client.IncompleteRead(b"", total - _bytes(part))
    return total


def _copy(
    response: http.client.HTTPResponse,
    file: BinaryIO,
    url: str,
    have: int,
    total: int | None,
    progress: Progress | None,
) -> None:
    while block := response.read1(BLOCK):
        file.write(block)
        have += len(block)
        if progress is not None:
            progress(url, have, total)
    file.flush()
    os.fsync(file.fileno())


def _content_range(header: str) -> tuple[int, int | None]:
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", header.strip())
    if match is None:
        raise http.client.HTTPException(f"no usable Content-Range: {header!r}")
    return int(match[1]), None if match[2] == "*" else int(match[2])


def _checked(url: str, path: Path, size: int | None, sha: str | None, md5_sum: str | None) -> Fetched:
    """Raise DataError, after throwing the file away, where it is not what is known of it."""
    digest, older = sha256(), md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if md5_sum is not None:
                older.update(block)
    found = path.stat().st_size
    wrong = None
    if sha is not None and digest.hexdigest() != sha:
        wrong = f"its SHA-256 is {digest.hexdigest()}, and {sha} is expected"
    elif md5_sum is not None and older.hexdigest() != md5_sum:
        wrong = f"its MD5 is {older.hexdigest()}, and {md5_sum} is expected"
    elif size is not None and found != size:
        wrong = f"it has {found:,} bytes, and {size:,} are expected"
    if wrong is not None:
        path.unlink()
        raise UnreachableError(
            f"{url} is not the file that was expected: {wrong}; it was thrown away: run the same command again, and if "
            "that changes nothing, the file was changed at its source",
            f"{url}: {wrong}",
        )
    return Fetched(url, path, found, digest.hexdigest())


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, as 64 hexadecimal digits."""
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _reason(error: OSError) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return "the server does not answer"
    if isinstance(cause, OSError):
        return (cause.strerror or str(cause) or type(cause).__name__).strip()
    return str(cause)


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
