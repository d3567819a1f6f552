from __future__ import annotations

import errno
import hashlib
import socket
from pathlib import Path

import pytest

from dragoman.errors import DataError
from dragoman.text import download
from dragoman.text.download import UnreachableError, fetch

from .conftest import Site

BODY = bytes(range(256)) * 4000
SHA = hashlib.sha256(BODY).hexdigest()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)


def test_a_file_comes_whole_and_is_described(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = BODY
    told: list[tuple[int, int | None]] = []
    fetched = fetch(
        f"{site.url}/a.bin",
        tmp_path / "a.bin",
        size=len(BODY),
        sha=SHA,
        md5_sum=hashlib.md5(BODY).hexdigest(),
        progress=lambda url, done, total: told.append((done, total)),
    )
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert (fetched.size, fetched.sha256) == (len(BODY), SHA)
    assert told[-1] == (len(BODY), len(BODY))
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]  # nothing is left beside it


def test_what_is_here_and_right_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(BODY)
    fetch(f"{site.url}/a.bin", tmp_path / "a.bin", sha=SHA)
    assert site.requests == []


def test_what_is_here_and_wrong_is_fetched_again(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = BODY
    (tmp_path / "a.bin").write_bytes(b"something else")
    fetch(f"{site.url}/a.bin", tmp_path / "a.bin", sha=SHA)
    assert (tmp_path / "a.bin").read_bytes() == BODY


def test_a_cut_connection_is_taken_up_again(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = BODY
    site.cut_after["/a.bin"] = 300_000
    fetch(f"{site.url}/a.bin", tmp_path / "a.bin", sha=SHA)
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert [asked for _, asked, _ in site.requests] == [None, "bytes=300000-"]
    assert site.requests[1][2] is not None  # with the ETag of the first


def test_a_later_call_goes_on_where_one_was_cut(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = BODY
    site.cut_after["/a.bin"] = 500_000
    site.status["/a.bin"] = _Later([503, 503, 503])
    url = f"{site.url}/a.bin"
    real = site.files
    with pytest.raises(UnreachableError, match=r"after 500,000 bytes; run the same command again"):
        fetch(url, tmp_path / "a.bin")
    assert (tmp_path / "a.bin.part").stat().st_size == 500_000
    assert not (tmp_path / "a.bin").exists()
    site.status.clear()
    site.requests.clear()
    fetch(url, tmp_path / "a.bin", sha=SHA)
    assert site.requests[0][1] == "bytes=500000-"
    assert (tmp_path / "a.bin").read_bytes() == real["/a.bin"]


class _Later(list[int]):
    """Status codes that begin with the second request."""

    first = True

    def __bool__(self) -> bool:
        if self.first:
            self.first = False
            return False
        return len(self) > 0


def test_a_file_that_changed_meanwhile_begins_again(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = BODY[::-1]
    (tmp_path / "a.bin.part").write_bytes(BODY[:1000])
    (tmp_path / "a.bin.part.etag").write_text('"an older one"')
    fetch(f"{site.url}/a.bin", tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == BODY[::-1]


def test_a_server_without_ranges_begins_again(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = BODY
    site.ranges = False
    site.cut_after["/a.bin"] = 1000
    fetch(f"{site.url}/a.bin", tmp_path / "a.bin", sha=SHA)
    assert (tmp_path / "a.bin").read_bytes() == BODY


def test_a_partial_file_longer_than_the_whole_begins_again(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = BODY
    site.etags = False
    (tmp_path / "a.bin.part").write_bytes(BODY + b"too much")
    fetch(f"{site.url}/a.bin", tmp_path / "a.bin", sha=SHA)
    assert (tmp_path / "a.bin").read_bytes() == BODY


def test_a_server_that_always_cuts_is_given_up(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = BODY
    site.ranges = False
    site.always_cut["/a.bin"] = 1000
    with pytest.raises(UnreachableError, match="after 1,000 bytes"):
        fetch(f"{site.url}/a.bin", tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({"sha": "0" * 64}, f"its SHA-256 is {SHA}, and {'0' * 64} is expected"),
        ({"md5_sum": "0" * 32}, "its MD5 is"),
        ({"size": 5}, "it has 1,024,000 bytes, and 5 are expected"),
    ],
)
def test_a_wrong_checksum_throws_the_file_away(
    site: Site, tmp_path: Path, known: dict[str, str | int], told: str
) -> None:
    site.files["/a.bin"] = BODY
    url = f"{site.url}/a.bin"
    with pytest.raises(UnreachableError) as caught:
        fetch(url, tmp_path / "a.bin", **known)  # type: ignore[arg-type]
    assert told in str(caught.value)
    assert url in str(caught.value)
    assert "run the same command again" in str(caught.value)
    assert not (tmp_path / "a.bin").exists()
    assert not (tmp_path / "a.bin.part").exists()


def test_404_is_one_sentence_at_once(site: Site, tmp_path: Path) -> None:
    with pytest.raises(UnreachableError) as caught:
        fetch(f"{site.url}/gone.tgz", tmp_path / "gone.tgz")
    assert f"{site.url}/gone.tgz: the server answers 404 Not Found" in str(caught.value)
    assert len(site.requests) == 1


def test_a_server_that_recovers(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = BODY
    site.status["/a.bin"] = [503, 500]
    fetch(f"{site.url}/a.bin", tmp_path / "a.bin", sha=SHA)
    assert len(site.requests) == 3


def test_a_refused_connection(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with pytest.raises(UnreachableError, match=r"cannot be reached: Connection refused; check the network"):
        fetch(f"http://127.0.0.1:{port}/a", tmp_path / "a")


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match=r"nowhere\.invalid/a cannot be reached"):
        fetch("http://nowhere.invalid/a", tmp_path / "a", attempts=1)


def test_a_silent_server_is_given_up_in_time(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a"
        with pytest.raises(UnreachableError, match="the server does not answer"):
            fetch(url, tmp_path / "a", timeout=0.2, attempts=1)


def test_a_full_disk_says_how_far_it_got(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files["/a.bin"] = BODY

    def full(response: object, file: object, *rest: object) -> None:
        file.write(b"x" * 123_456)  # type: ignore[attr-defined]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_copy", full)
    with pytest.raises(DataError, match=r"is full after 123,456 bytes; make room") as caught:
        fetch(f"{site.url}/a.bin", tmp_path / "a.bin")
    assert not isinstance(caught.value, UnreachableError)  # another address would not help
