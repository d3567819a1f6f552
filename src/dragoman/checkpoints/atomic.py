"""Writing so that a kill, a full disk or a power cut leaves the old file or the new one, never half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from dragoman.errors import ModelError

LITTER = ".tmp-"
"""What the names of unfinished files and folders begin with; the process id follows."""


def sync(path: Path) -> None:
    """Ask the system to put a file, or the names in a folder, on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync a folder; its files are synced all the same.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _failure(path: Path, error: BaseException) -> ModelError:
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    else:
        reason = str(error)
        full = "No space left" in reason or "os error 28" in reason
    hint = "; free some space" if full else ""
    return ModelError(f"{path} cannot be written: {reason}{hint}. What was there before is intact")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` to write to, which takes its place, synced, when the block ends well.

    Raises ModelError in plain words where the disk is full or the folder read-only, and leaves nothing behind.
    """
    temporary = path.with_name(f"{LITTER}{os.getpid()}-{path.name}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        # safetensors keeps what it writes to its owner alone; a model has the permissions of any new file.
        temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise _failure(path, error) from None
        raise


def write_file(path: Path, data: bytes) -> None:
    """Put `data` in `path`, all of it or nothing."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `path` by `fill`, all of it or nothing; a folder of that name is replaced."""
    temporary = path.with_name(f"{LITTER}{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        fill(temporary)
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        if path.exists():
            # A folder cannot be replaced in one go: the old one steps aside under a name that sweeping removes.
            aside = path.with_name(f"{LITTER}{os.getpid()}-old-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            temporary.rename(path)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            temporary.rename(path)
        sync(path.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, ModelError):
            # A file of the folder could not be written; to the user it has the name that it was to have.
            named = [problem.replace(str(temporary), str(path)) for problem in error.problems]
            raise ModelError(named) from None
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise _failure(path, error) from None
        raise


def sweep(folder: Path) -> None:
    """Remove what a killed process left unfinished in `folder`."""
    for path in folder.glob(f"{LITTER}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
