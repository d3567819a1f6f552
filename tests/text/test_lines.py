from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import DataError
from dragoman.text import lines as module
from dragoman.text.lines import SHOWN, Faults, check_text, count_lines, lines_of, read_lines
from dragoman.text.stdin import StandardInput

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.compress(data),
    ".bz2": bz2.compress,
}
ODD = "line\u2028separator\x0b\x0c\x1c\x1d\x1e\x85\u2029\rlone"


def test_only_lf_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(f"one\n{ODD}\n\nthree".encode())
    assert list(read_lines(path)) == ["one", ODD, "", "three"]
    assert count_lines(path) == 4
    assert len(ODD.splitlines()) > 1  # what this guards against


def test_crlf_bom_and_no_last_newline_read_as_the_clean_file(tmp_path: Path) -> None:
    clean, odd = tmp_path / "clean", tmp_path / "odd"
    clean.write_bytes("héllo\n世界\nlast\n".encode())
    odd.write_bytes(b"\xef\xbb\xbf" + "héllo\r\n世界\r\nlast".encode())
    assert list(read_lines(odd)) == list(read_lines(clean)) == ["héllo", "世界", "last"]
    assert count_lines(odd) == count_lines(clean) == 3


def test_one_cr_goes_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"a\r\r\n\r\nb\rc\n")
    assert list(read_lines(path)) == ["a\r", "", "b\rc"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbf\n", [""]),
        (b"\xef\xbb", None),
        (b"\n\n", ["", ""]),
    ],
)
def test_small_files(tmp_path: Path, data: bytes, expected: list[str] | None) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    if expected is None:
        with pytest.raises(DataError, match="byte 0"):
            list(read_lines(path))
    else:
        assert list(read_lines(path)) == expected
        assert count_lines(path) == len(expected)


def test_a_bom_further_on_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes("a\n\ufeffb\n".encode())
    assert list(read_lines(path)) == ["a", "\ufeffb"]


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_are_streamed(tmp_path: Path, suffix: str) -> None:
    text = "".join(f"line {i} ünï 世界\r\n" for i in range(40_000))
    path = tmp_path / f"a{suffix}"
    path.write_bytes(PACKERS[suffix](text.encode()))
    read = list(read_lines(path))
    assert len(read) == count_lines(path) == 40_000
    assert read[37_777] == "line 37777 ünï 世界"


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst", ".bz2"])
def test_several_compressed_members_are_one_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(PACKERS[suffix](b"a\nb") + PACKERS[suffix](b"c\n"))
    assert list(read_lines(path)) == ["a", "bc"]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst", ".bz2"])
def test_a_truncated_file_is_named_and_its_last_piece_is_no_line(tmp_path: Path, suffix: str) -> None:
    text = "".join(f"{i} {os.urandom(8).hex()}\n" for i in range(20_000)).encode()
    path = tmp_path / f"a{suffix}"
    packed = PACKERS[suffix](text)
    path.write_bytes(packed[: len(packed) // 2])
    given: list[str] = []
    with pytest.raises(DataError, match=r"cut short.*fetch or compress the file again") as caught:
        given.extend(read_lines(path))
    assert str(path) in str(caught.value)
    assert given == text.decode().split("\n")[: len(given)]
    with pytest.raises(DataError, match="cut short"):
        count_lines(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst", ".bz2"])
def test_what_is_not_compressed_as_its_name_says_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"plain text, not compressed at all\n" * 9)
    with pytest.raises(DataError, match=f"a{suffix}"):
        list(read_lines(path))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst", ".bz2"])
def test_an_empty_compressed_file_is_no_empty_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=rf"a\{suffix} is (empty|cut short)"):
        list(read_lines(path))
    path.write_bytes(PACKERS[suffix](b""))
    assert list(read_lines(path)) == []


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_compressed_file_without_its_suffix_gets_advice(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(PACKERS[suffix](b"hello\n"))
    with pytest.raises(DataError, match=f"suffix {suffix}"):
        list(read_lines(path))


def test_utf16_gets_advice(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("hello\n".encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16"):
        list(read_lines(path))


def test_invalid_utf8_is_placed_by_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a"
    before = "".join(f"zeile {i}\r\n" for i in range(6)).encode()
    path.write_bytes(b"\xef\xbb\xbf" + before + b"ab\xc3\x28cd\n" + b"fine\n")
    at = 3 + len(before) + 2
    with pytest.raises(DataError, match=rf"a, line 7, byte {at} \(from 0\): 0xC3 is not valid UTF-8") as caught:
        list(read_lines(path))
    assert len(caught.value.problems) == 1
    assert path.read_bytes()[at : at + 2] == b"\xc3\x28"


def test_byte_offsets_are_those_of_the_decompressed_stream(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    text = b"x" * 70_000 + b"\n" + b"y" * 2_000_000 + b"\nbad \xff\n"
    path.write_bytes(gzip.compress(text))
    with pytest.raises(DataError, match=rf"line 3, byte {text.index(0xFF)} "):
        list(read_lines(path))


def test_every_fault_is_collected_the_first_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "latin1"
    path.write_bytes("".join(f"Zürich {i} größer\n" for i in range(100)).encode("latin-1"))
    with pytest.raises(DataError) as caught:
        list(read_lines(path))
    problems = caught.value.problems
    assert len(problems) == SHOWN + 1
    assert "line 1, byte 1 " in problems[0]
    assert "line 1, byte 11 " in problems[1]  # two faults of one line are two
    assert problems[-1] == "and 280 more of the kind: 300 faults in all"


def test_lines_before_the_first_fault_are_given_and_none_after(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1\n2\n\xff\n4\n" + b"5\n" * 1_000_000)
    given: list[str] = []
    with pytest.raises(DataError):
        given.extend(read_lines(path))
    assert given in ([], ["1", "2"])


def test_replacement_is_by_choice(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"ok\nab\xc3\x28cd\n\xe4\xbd\nend\xff")
    assert list(read_lines(path, "replace")) == ["ok", "ab\ufffd(cd", "\ufffd", "end\ufffd"]


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_lines(tmp_path / "nowhere.gz")
    with pytest.raises(DataError, match="is a folder"):
        read_lines(tmp_path)


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=9)),
    st.integers(1, 7),
)
def test_lines_do_not_depend_on_how_the_bytes_arrive(texts: list[str], size: int) -> None:
    data = "".join(text + "\n" for text in texts).encode()
    whole = list(lines_of(_Trickle(data, 1 << 20), "a", Faults(), "replace"))
    assert list(lines_of(_Trickle(data, size), "a", Faults(), "replace")) == whole
    if not texts or not texts[0].startswith("\ufeff"):
        assert whole == texts


class _Trickle(io.BytesIO):
    def __init__(self, data: bytes, size: int) -> None:
        super().__init__(data)
        self._size = size

    def read1(self, size: int | None = -1, /) -> bytes:
        return self.read(self._size)


def test_a_line_from_a_pipe_arrives_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    reader, writer = os.fdopen(read, "rb"), os.fdopen(write, "wb", buffering=0)
    monkeypatch.setattr(module.sys, "stdin", io.TextIOWrapper(reader))
    lines = read_lines("-")
    writer.write(b"erste Zeile\n")
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(next(lines)))
    thread.start()
    thread.join(timeout=5)
    assert got == ["erste Zeile"]
    writer.write(b"bad \xff\nmore")
    with pytest.raises(DataError, match=r"<stdin>, line 2, byte 16 "):  # at once, though the pipe is still open
        next(lines)
    writer.close()


@pytest.mark.parametrize("end", [b"\n", b""])
def test_of_a_block_with_a_fault_standard_input_gives_nothing(monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader:
        monkeypatch.setattr(module.sys, "stdin", io.TextIOWrapper(reader))
        lines = StandardInput().lines()
        os.write(write, b"good\n")
        assert next(lines) == "good"
        os.write(write, b"bad \xff" + end)
        os.close(write)
        with pytest.raises(DataError, match=r"<stdin>, line 2, byte 9 "):
            next(lines)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_opened_to_see_whether_it_is_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_text(tmp_path / "pipe")  # opening it would wait for a writer
    with pytest.raises(DataError, match="no such file"):
        check_text(tmp_path / "nowhere")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks the Linux kernel for the peak of memory")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a line of some forty bytes, no more.\n" * 2_000_000, 1))  # 74 MB of text
    program = (
        "from dragoman.text.lines import read_lines\n"
        f"assert sum(1 for _ in read_lines({str(path)!r})) == 2_000_000\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    peak = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout)
    assert peak < 60_000  # kilobytes, the interpreter included
