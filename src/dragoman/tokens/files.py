"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from dragoman.errors import DataError


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that whoever looks, at any instant and after any crash, sees the old content or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
