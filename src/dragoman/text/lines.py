"""Bytes to lines: the one rule by which every file, pipe and compressed stream is cut.

Only LF ends a line; one CR before it is dropped; a byte-order mark at the start of the file is dropped. U+2028, form
feeds, a lone CR and the like are characters of the line that holds them, as they are for `wc -l`.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from dragoman.errors import DataError

if TYPE_CHECKING:
    import zstandard

InvalidUtf8 = Literal["error", "replace"]

CHUNK = 1 << 20
"""Bytes read at a time: the memory that one open text takes is a few of these, whatever its length."""

SHOWN = 20
"""Faults of one input that are spelt out; the rest are counted."""

_BOM = b"\xef\xbb\xbf"
_FOREIGN = {
    b"\xff\xfe": "it looks like UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "it looks like UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\x1f\x8b": "it looks gzip-compressed; give its name the suffix .gz",
    b"\xfd7zXZ": "it looks xz-compressed; give its name the suffix .xz",
    b"\x28\xb5\x2f\xfd": "it looks zstd-compressed; give its name the suffix .zst",
}


class Reader(Protocol):
    """What a text is read from: `read1` gives what is there, at most `size` bytes, and b"" at the end."""

    def read1(self, size: int = ..., /) -> bytes: ...

    def close(self) -> None: ...


class Faults:
    """What was wrong with one input: the first `SHOWN` sentences and the number of all."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.total = 0

    def add(self, sentence: str) -> None:
        self.total += 1
        if len(self.shown) < SHOWN:
            self.shown.append(sentence)

    def raise_if_any(self) -> None:
        """Raise DataError with every fault, the last sentence telling how many are not spelt out."""
        if not self.total:
            return
        problems = list(self.shown)
        if self.total > len(problems):
            problems.append(f"and {self.total - len(problems):,} more of the kind: {self.total:,} faults in all")
        raise DataError(problems)


class _ZstdReader:
    """A zstd file as a byte stream. The library's own reader takes a cut file for a complete one; this one does not."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._file = path.open("rb")
        self._library = zstandard
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._pending = b""

    def read1(self, size: int = -1, /) -> bytes:
        # `size` is a wish here: a small compressed piece is fed at a time, and all that it unfolds to is given.
        while True:
            piece = self._pending or self._file.read(1 << 14)
            self._pending = b""
            if not piece:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is incomplete")
                return b""
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            text = self._frame.decompress(piece)
            if self._frame.eof:
                self._pending = self._frame.unused_data
                self._frame = None
            if text:
                return text

    def close(self) -> None:
        self._file.close()


def open_text(path: str | Path) -> Reader:
    """The decompressed bytes of a file, by its suffix (.gz, .xz, .zst, .bz2; anything else is taken as it is).

    Raises DataError where there is no such file or it may not be read.
    """
    path = Path(path)
    try:
        if path.suffix in (".gz", ".zst") and path.is_file() and path.stat().st_size == 0:
            raise DataError(f"{path} is empty: compressing even an empty text gives a few bytes; make the file again")
        if path.suffix == ".gz":
            import gzip

            return cast(Reader, gzip.open(path, "rb"))
        if path.suffix == ".xz":
            import lzma

            return cast(Reader, lzma.open(path, "rb"))
        if path.suffix == ".bz2":
            import bz2

            return cast(Reader, bz2.open(path, "rb"))
        if path.suffix == ".zst":
            return _ZstdReader(path)
        return cast(Reader, path.open("rb", buffering=CHUNK))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder, and a text file is wanted") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def is_pipe(path: str | Path) -> bool:
    """Whether opening the path to look at it would lose what is in it: a named pipe, the shell's `<(command)`."""
    return Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir()


def check_text(path: str | Path) -> None:
    """Raise DataError as `open_text` does, before any work is done; what is a pipe is not opened."""
    if not is_pipe(path):
        open_text(path).close()


def read_chunks(reader: Reader, name: str) -> Iterator[bytes]:
    """The bytes of `reader` as they come. Raises DataError, naming the file, where a compressed stream is damaged."""
    given = 0
    while True:
        try:
            chunk = reader.read1(CHUNK)
        except EOFError:
            raise DataError(
                f"{name} is cut short: its compressed data end after {given:,} bytes of text; "
                "fetch or compress the file again"
            ) from None
        except (OSError, zlib.error) as error:  # BadGzipFile and bz2's errors are OSErrors
            raise DataError(f"{name} cannot be read past byte {given:,} of its text: {error}") from None
        except Exception as error:  # LZMAError and ZstdError have no base in common, and their modules may be absent
            if type(error).__name__ not in ("LZMAError", "ZstdError"):
                raise
            raise DataError(f"{name} is damaged after {given:,} bytes of text: {error}") from None
        if not chunk:
            return
        given += len(chunk)
        yield chunk


def lines_of(
    reader: Reader, name: str, faults: Faults, invalid_utf8: InvalidUtf8 = "error", *, at_once: bool = False
) -> Iterator[str]:
    """The lines of a byte stream, without their ends, as soon as they are complete.

    Invalid UTF-8 goes to `faults` when `invalid_utf8` is "error" (the caller raises them when it is done) and is read
    as U+FFFD either way, so that line numbers stay true. `at_once` raises after the chunk that holds the fault, for
    pipes that may never end.
    """
    rest: list[bytes] = []  # the line that is not complete yet, in the pieces that it came in
    offset = 0  # of `rest` in the stream
    number = 1  # of the line that starts at `rest`
    start = True
    for chunk in read_chunks(reader, name):
        if start:
            chunk = b"".join(rest) + chunk
            rest = [chunk]
            if len(chunk) < 3 and _BOM.startswith(chunk):
                continue
            start = False
            rest = []
            if chunk.startswith(_BOM):
                chunk = chunk[3:]
                offset = 3
            elif invalid_utf8 == "error":
                _refuse_foreign(chunk, name)
        end = chunk.rfind(b"\n") + 1
        if not end:
            rest.append(chunk)
            continue
        block = b"".join([*rest, chunk[:end]])
        rest = [chunk[end:]]
        lines = _decode(block, name, offset, number, faults, invalid_utf8).replace("\r\n", "\n").split("\n")
        lines.pop()  # what follows the last LF: nothing
        yield from lines
        if at_once:
            faults.raise_if_any()
        number += len(lines)
        offset += len(block)
    last = b"".join(rest)
    if last and not (start and last == _BOM):
        yield _decode(last, name, offset, number, faults, invalid_utf8)


def read_lines(path: str | Path, invalid_utf8: InvalidUtf8 = "error", name: str | None = None) -> Iterator[str]:
    """The lines of a file, or of stdin where `path` is "-", one after the other.

    Raises DataError for a file that is missing, damaged, or (unless `invalid_utf8` is "replace") not UTF-8; lines
    before the first fault have been given by then, lines after it are only searched for more faults.
    """
    if str(path) == "-":
        return _checked(cast(Reader, sys.stdin.buffer), name or "<stdin>", invalid_utf8, at_once=True)
    return _checked(open_text(path), name or str(path), invalid_utf8, at_once=False)


def count_lines(path: str | Path) -> int:
    """How many lines `read_lines` gives, without decoding any."""
    lines = 0
    last = b"\n"
    size = 0
    head = b""
    reader = open_text(path)
    try:
        for chunk in read_chunks(reader, str(path)):
            lines += chunk.count(b"\n")
            last = chunk[-1:]
            size += len(chunk)
            if len(head) < 3:
                head = (head + chunk)[:3]
    finally:
        reader.close()
    if head == _BOM and size == 3:
        return 0
    return lines + (last != b"\n")


def _checked(reader: Reader, name: str, invalid_utf8: InvalidUtf8, at_once: bool) -> Iterator[str]:
    faults = Faults()
    try:
        for line in lines_of(reader, name, faults, invalid_utf8, at_once=at_once):
            if not faults.total:
                yield line
    except DataError as error:
        if at_once:
            raise
        for problem in error.problems:
            faults.add(problem)
    finally:
        if reader is not getattr(sys.stdin, "buffer", None):
            reader.close()
    faults.raise_if_any()


def _decode(block: bytes, name: str, offset: int, number: int, faults: Faults, invalid_utf8: InvalidUtf8) -> str:
    """`block` as text; `offset` is its place in the stream and `number` its first line's."""
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError:
        pass
    if invalid_utf8 == "error":
        for line in block.split(b"\n"):
            _find_faults(line, name, offset, number, faults)
            offset += len(line) + 1
            number += 1
    return block.decode("utf-8", errors="replace")


def _find_faults(line: bytes, name: str, offset: int, number: int, faults: Faults) -> None:
    start = 0
    while start < len(line):
        if len(faults.shown) >= SHOWN:  # a file in another encoding has a fault in every word: only count
            tail = line[start:]
            for _ in range(tail.decode("utf-8", errors="replace").count("\ufffd") - tail.count(b"\xef\xbf\xbd")):
                faults.add("")
            return
        try:
            line[start:].decode("utf-8")
            return
        except UnicodeDecodeError as error:
            at = start + error.start
            faults.add(
                f"{name}, line {number}, byte {offset + at} (from 0): 0x{line[at]:02X} is not valid UTF-8 "
                f'({error.reason}); convert the file to UTF-8, or ask for invalid_utf8 = "replace"'
            )
            start += error.end


def _refuse_foreign(block: bytes, name: str) -> None:
    for magic, advice in _FOREIGN.items():
        if block.startswith(magic):
            raise DataError(f"{name}, line 1, byte 0: not UTF-8 text: {advice}")
