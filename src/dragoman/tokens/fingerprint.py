"""Whether a corpus is still the one that was binarised, without reading it through each time.

A file is known by the SHA-256 of its content. Where its size and time of change are those of the last look, the hash
of then still holds; so a second start on gigabytes asks the file system and reads nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from dragoman.errors import DataError
from dragoman.text.corpus import Corpus, DataConfig
from dragoman.tokens.tokenizer import Tokenizer

# A file that changes twice within its clock's grain keeps its time, so one that was this fresh at the look is not
# trusted later. Whole seconds are the sign of a file system that counts no finer.
_GRAIN_NS = 100_000_000
_COARSE_GRAIN_NS = 2_000_000_000


@dataclass(frozen=True)
class FileFacts:
    """What was seen of a file when it was last read through."""

    size: int
    mtime_ns: int
    looked_ns: int
    sha256: str

    @classmethod
    def parse(cls, tree: object) -> FileFacts | None:
        """From JSON; None for anything that is not the like."""
        try:
            return cls(**tree) if isinstance(tree, dict) else None
        except TypeError:
            return None


def look(path: str | os.PathLike[str], known: FileFacts | None) -> FileFacts:
    """The facts of a file, read through only where `known` does not vouch for it. Raises DataError if it cannot be."""
    try:
        now = time.time_ns()
        stat = Path(path).stat()
        if not S_ISREG(stat.st_mode):
            raise DataError(
                f"{path} is not a regular file: a corpus is read more than once, so write it to a file first"
            )
        grain = _GRAIN_NS if stat.st_mtime_ns % 1_000_000_000 else _COARSE_GRAIN_NS
        seen_before = known is not None and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        if known is not None and seen_before and known.mtime_ns < known.looked_ns - grain:
            return known
        with Path(path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    return FileFacts(stat.st_size, stat.st_mtime_ns, now, digest)


def look_at_all(corpora: Sequence[Corpus], known: Mapping[str, Any]) -> dict[str, FileFacts]:
    """The facts of every file of the corpora, by its path. Raises DataError naming all that cannot be read."""
    facts: dict[str, FileFacts] = {}
    problems: list[str] = []
    for path in dict.fromkeys(path for corpus in corpora for path in corpus.files):
        try:
            facts[path] = look(path, FileFacts.parse(known.get(path)))
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(problems)
    return facts


def fingerprint(
    corpora: Sequence[Corpus], facts: Mapping[str, FileFacts], tokenizer: Tokenizer, config: DataConfig, version: int
) -> str:
    """Equal exactly when binarising would give equal arrays: neither paths nor weights count, content does."""
    tree = {
        "version": version,
        "tokenizer": tokenizer.fingerprint,
        "max_length": config.max_length,
        "bad_rows": config.bad_rows,
        "invalid_utf8": config.invalid_utf8,
        "clean": asdict(config.clean),
        "corpora": [[(Path(path).suffix, facts[path].sha256) for path in corpus.files] for corpus in corpora],
    }
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
