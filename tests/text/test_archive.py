from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from dragoman.errors import DataError
from dragoman.text.archive import member_of_zip, unpack


def tar(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz", "w"])
def test_members_of_tar_files(tmp_path: Path, mode: str) -> None:
    archive = tar(tmp_path / "a.tgz", {"./x/one.en": b"1", "x/two.en.gz": b"2", "x/three": b"3"}, mode)
    written = unpack(archive, ["x/one.en", "x/two.en.gz"], tmp_path / "out")
    assert {name: path.read_bytes() for name, path in written.items()} == {"x/one.en": b"1", "x/two.en.gz": b"2"}
    assert written["x/two.en.gz"].suffix == ".gz"  # so that it is read as what it is


def test_members_of_zip_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x/one", "1")
    assert unpack(tmp_path / "a.zip", ["x/one"], tmp_path / "out")["x/one"].read_bytes() == b"1"
    with member_of_zip(tmp_path / "a.zip", "x/one") as stream:
        assert stream.read() == b"1"
    with pytest.raises(DataError, match="has no file y"), member_of_zip(tmp_path / "a.zip", "y"):
        pass


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    evil = {"../../evil": b"x", "/tmp/evil": b"x", "good": b"fine"}
    archive = tar(tmp_path / "a.tgz", evil)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    written = unpack(archive, ["../../evil", "good"], tmp_path / "deep" / "er" / "out")
    assert all(path.parent == tmp_path / "deep" / "er" / "out" for path in written.values())
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "deep" / "evil").exists()


def test_a_link_is_no_file(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("text")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(DataError, match="has no file text"):
        unpack(tmp_path / "a.tgz", ["text"], tmp_path / "out")


def test_damage_is_named(tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tgz", {"x": bytes(range(256)) * 1000})
    archive.write_bytes(archive.read_bytes()[:300])
    with pytest.raises(DataError, match=r"a\.tgz is damaged"):
        unpack(archive, ["x"], tmp_path / "out")
    (tmp_path / "b.tgz").write_bytes(b"<html>not an archive</html>")
    with pytest.raises(DataError, match=r"b\.tgz is damaged"):
        unpack(tmp_path / "b.tgz", ["x"], tmp_path / "out")


def test_missing_members_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no file y, z"):
        unpack(tar(tmp_path / "a.tgz", {"x": b""}), ["x", "y", "z"], tmp_path / "out")
