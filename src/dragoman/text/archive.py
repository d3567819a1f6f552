"""Single members of archives, by their exact names. Names inside an archive never become paths here: each member that
is asked for is written under a name of ours, so an archive cannot write anywhere else."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dragoman.errors import DataError


def unpack(archive: Path, members: Sequence[str], folder: Path) -> dict[str, Path]:
    """Write the named members of a tar (any compression) or zip file into `folder`; where each was written.

    Raises DataError where the archive is damaged, or has not all of them as plain files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                for member in members:
                    if member in opened.namelist():
                        with opened.open(member) as stream:
                            written[member] = _write(stream, folder, member, len(written))
        else:
            with tarfile.open(archive, "r|*") as tar:
                for info in tar:
                    name = info.name.removeprefix("./")
                    if name in members and name not in written and info.isfile():
                        content = tar.extractfile(info)
                        assert content is not None  # a plain file has some
                        with content:
                            written[name] = _write(content, folder, name, len(written))
                    if len(written) == len(set(members)):
                        break
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is damaged ({error}); delete it and run the same command again") from None
    missing = [member for member in members if member not in written]
    if missing:
        raise DataError(f"{archive} has no file {', '.join(missing)}: the archive is not the one that was expected")
    return written


@contextmanager
def member_of_zip(archive: Path, member: str) -> Iterator[IO[bytes]]:
    """One member of a zip file as a stream; raises DataError where there is none."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as stream:
            yield stream
    except KeyError:
        raise DataError(f"{archive} has no file {member}: the archive is not the one that was expected") from None
    except zipfile.BadZipFile as error:
        raise DataError(f"{archive} is damaged ({error}); delete it and run the same command again") from None


def _write(stream: IO[bytes], folder: Path, member: str, number: int) -> Path:
    suffix = Path(member).suffix
    path = folder / f"member-{number}{suffix if suffix in ('.gz', '.xz', '.zst', '.bz2') else ''}"
    with path.open("wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
    return path
