"""A corpus as memory-mapped ids, made once: streamed through cleaning, normalisation and the tokenizer.

The folder holds, for either side, `ids` (uint16 where the vocabulary allows, else uint32), `offsets` (uint64, one more
than pairs) and `lengths` (uint32), plain arrays laid end to end, and `index.json`, which is written last: where it is,
the rest is whole. While it is being made `progress.json` says how far the arrays are good; after a kill the corpus is
read again up to there (reading is cheap), the arrays are cut back to it, and tokenising goes on.

Memory does not grow with the corpus: a few thousand pairs are in flight, everything else is in files.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dragoman.errors import DataError
from dragoman.text.clean import Seen, cleaned_pairs
from dragoman.text.corpus import Corpus, Counts, DataConfig, check_corpora
from dragoman.tokens.files import write_atomically
from dragoman.tokens.fingerprint import FileFacts, fingerprint, look_at_all
from dragoman.tokens.paired import PairedIds
from dragoman.tokens.tokenizer import Tokenizer

__all__ = ["PairedIds", "binarize"]

VERSION = 1
INDEX, PROGRESS = "index.json", "progress.json"
_SIDES = ("src", "tgt")
_ARRAYS = ("ids", "offsets", "lengths")

_CHUNK = 8192
"""Pairs that are read, tokenised and written together."""
_SAVE_EVERY = 20.0
"""Seconds of work that a kill may cost."""

Log = Callable[[str], None]
Rows = list[list[int]]


def binarize(
    corpora: Sequence[Corpus],
    tokenizer: Tokenizer,
    config: DataConfig,
    out_dir: str | os.PathLike[str],
    log: Log = lambda message: None,
    warn: Log = lambda message: None,
) -> PairedIds:
    """The corpora as ids, from `out_dir` where they stand there already, else made and left there.

    Pairs stand in the order of the corpora, but for those with more than `config.max_length` tokens on a side (counted
    as `too_long`) or with none (`no_tokens`: a tokenizer's own normalisation may leave nothing of a text). Weights go
    into the result and are no part of the files. A second process that wants the same folder waits for the first.
    Raises DataError for what is wrong with a corpus, for a disk that is full, and where no pair is left. For validation
    text pass a config without cleaning: filters are for training.
    """
    out = Path(out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _alone(out):
            return _binarize(list(corpora), tokenizer, config, out, log, warn)
    except OSError as error:
        raise DataError(f"{error.filename or out} cannot be written: {error.strerror or error}") from None


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Holds the folder for this process. Where it cannot be locked (read-only, or a file system without locks) it goes
    on without: what has been binarised can still be read."""
    with ExitStack() as stack:
        with suppress(OSError):
            lock = stack.enter_context((out / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _binarize(
    corpora: list[Corpus], tokenizer: Tokenizer, config: DataConfig, out: Path, log: Log, warn: Log
) -> PairedIds:
    index = _read_json(out / INDEX)
    progress = _read_json(out / PROGRESS)
    known = {**_table(progress.get("files")), **_table(index.get("files"))}
    facts = look_at_all(corpora, known)
    wanted = fingerprint(corpora, facts, tokenizer, config, VERSION)
    weights = tuple(corpus.weight for corpus in corpora)
    if index.get("fingerprint") == wanted:
        data = _open(out, index, weights)
        if data is not None:
            if {path: FileFacts.parse(known.get(path)) for path in facts} != facts:
                index["files"] = {path: asdict(seen) for path, seen in facts.items()}
                with suppress(DataError):  # a read-only folder: the files are hashed again next time, no more
                    write_atomically(out / INDEX, json.dumps(index).encode())
            log(f"data: {data.n:,} pairs, binarised before; {data.counts.describe()}")
            return data
        warn(f"data: the binarised corpus in {out} is damaged; it is made again")
    check_corpora(corpora)
    (out / INDEX).unlink(missing_ok=True)
    state = _State.resume(progress, wanted, out)
    if state.taken:
        log(f"data: going on after {state.taken:,} pairs that were binarised before")
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    counts = Counts()
    started = time.monotonic()
    writer = _Writer(out, state, dtype, wanted, facts)
    try:
        _run(corpora, tokenizer, config, writer, counts, log)
        writer.finish()
    except DataError:
        writer.discard()
        raise
    finally:
        writer.close()
    counts["kept"] = state.pairs
    causes = {"too_long": state.too_long, "no_tokens": state.taken - state.pairs - state.too_long}
    counts.update({cause: n for cause, n in causes.items() if n})
    if not state.pairs:
        writer.discard()
        names = ", ".join(corpus.name for corpus in corpora)
        raise DataError(f"no pair of {names} is left to work with: {counts.describe()}")
    index = {
        "version": VERSION,
        "fingerprint": wanted,
        "dtype": dtype.name,
        "pairs": state.pairs,
        "tokens": state.tokens,
        "bounds": state.bounds,
        "counts": dict(counts),
        "files": {path: asdict(seen) for path, seen in facts.items()},
    }
    write_atomically(out / INDEX, json.dumps(index).encode())
    (out / PROGRESS).unlink(missing_ok=True)
    seconds = time.monotonic() - started
    log(f"data: {counts.describe()}; {sum(state.tokens):,} tokens; binarised in {seconds:.1f} s")
    result = _open(out, index, weights)
    if result is None:
        raise DataError(f"{out} changed while it was written; is another program using that folder?")
    return result


@dataclass
class _State:
    """How far the arrays are good."""

    taken: int = 0
    """Cleaned pairs of all corpora that were tokenised, kept or not."""
    pairs: int = 0
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    too_long: int = 0
    bounds: list[int] = field(default_factory=lambda: [0])
    """Pairs kept at the start, and at the end of each corpus that is done."""

    @classmethod
    def resume(cls, progress: dict[str, Any], wanted: str, out: Path) -> _State:
        """Where an earlier start came to, if it was at the same work and its files are as long as it says."""
        if progress.get("fingerprint") != wanted:
            return cls()
        try:
            state = cls(**progress["state"])
            itemsize = np.dtype(progress["dtype"]).itemsize
            whole = all((out / name).stat().st_size >= size for name, size in _sizes(state, itemsize).items())
        except (KeyError, TypeError, OSError):
            return cls()
        return state if whole else cls()


class _Writer:
    """The array files, appended to; `save` makes what is there survive a kill."""

    def __init__(
        self, out: Path, state: _State, dtype: np.dtype[Any], wanted: str, facts: dict[str, FileFacts]
    ) -> None:
        self.out, self.state, self.dtype = out, state, dtype
        self._head = {
            "fingerprint": wanted,
            "dtype": dtype.name,
            "files": {path: asdict(seen) for path, seen in facts.items()},
        }
        self._files: dict[str, IO[bytes]] = {}
        for name, size in _sizes(state, dtype.itemsize).items():
            if not state.taken:  # a new file, not the old one emptied: a running training may have that one mapped
                (out / name).unlink(missing_ok=True)
            file = (out / name).open("r+b" if state.taken else "w+b")
            file.truncate(size)
            file.seek(size)
            self._files[name] = file
        if not state.taken:
            for side in _SIDES:
                self._files[f"{side}.offsets"].write(np.zeros(1, dtype=np.uint64).tobytes())
        self._saved = time.monotonic()

    def add(self, sides: tuple[Rows, Rows], max_length: int) -> None:
        """Appends the pairs that are short enough on both sides, and not empty."""
        lengths = [np.fromiter(map(len, rows), dtype=np.uint32, count=len(rows)) for rows in sides]
        longest = np.maximum(*lengths)
        keep = (longest <= max_length) & (np.minimum(*lengths) > 0)
        self.state.too_long += int((longest > max_length).sum())
        self.state.taken += len(keep)
        self.state.pairs += int(keep.sum())
        for number, (side, rows) in enumerate(zip(_SIDES, sides, strict=True)):
            if not keep.all():
                rows = [row for row, kept in zip(rows, keep, strict=True) if kept]
            kept_lengths = lengths[number][keep]
            total = int(kept_lengths.sum())
            ids = np.fromiter(chain.from_iterable(rows), dtype=self.dtype, count=total)
            offsets = self.state.tokens[number] + np.cumsum(kept_lengths, dtype=np.uint64)
            self._files[f"{side}.ids"].write(ids.tobytes())
            self._files[f"{side}.offsets"].write(offsets.astype(np.uint64).tobytes())
            self._files[f"{side}.lengths"].write(kept_lengths.tobytes())
            self.state.tokens[number] += total
        if time.monotonic() - self._saved > _SAVE_EVERY:
            self.save()

    def save(self) -> None:
        self._sync()
        write_atomically(self.out / PROGRESS, json.dumps({**self._head, "state": asdict(self.state)}).encode())
        self._saved = time.monotonic()

    def finish(self) -> None:
        self._sync()

    def _sync(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def discard(self) -> None:
        """Removes what was written: the corpus must change before anything of it can be used."""
        self.close()
        for name in (*self._files, PROGRESS):
            (self.out / name).unlink(missing_ok=True)


def _run(
    corpora: list[Corpus], tokenizer: Tokenizer, config: DataConfig, writer: _Writer, counts: Counts, log: Log
) -> None:
    """Tokenises what has not been yet. One chunk is with SentencePiece's threads while the next is read and cleaned."""
    seen = Seen()
    done = writer.state.taken
    before = 0  # cleaned pairs of the corpora gone through
    told = started = time.monotonic()

    def encode(src: list[str], tgt: list[str]) -> tuple[Rows, Rows]:
        return tokenizer.encode_batch(src), tokenizer.encode_target_batch(tgt)

    with ThreadPoolExecutor(max_workers=1) as pool:
        for number, corpus in enumerate(corpora):
            pairs = ((pair.src, pair.tgt) for pair in cleaned_pairs(corpus, config, counts, seen))
            skipped = sum(1 for _ in islice(pairs, max(0, done - before)))
            waiting: Future[tuple[Rows, Rows]] | None = None
            taken = skipped
            for src, tgt in _chunks(pairs):
                taken += len(src)
                ahead = pool.submit(encode, src, tgt)
                if waiting is not None:
                    writer.add(waiting.result(), config.max_length)
                waiting = ahead
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    speed = 2 * (before + taken - done) / (told - started)
                    log(f"data: {before + taken:,} pairs read, {speed:,.0f} sentences/s")
            if waiting is not None:
                writer.add(waiting.result(), config.max_length)
            before += taken
            if len(writer.state.bounds) == number + 1:
                writer.state.bounds.append(writer.state.pairs)


def _chunks(pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    while chunk := list(islice(pairs, _CHUNK)):
        yield [src for src, _ in chunk], [tgt for _, tgt in chunk]


def _open(out: Path, index: dict[str, Any], weights: tuple[float, ...]) -> PairedIds | None:
    """The arrays that an index describes; None where they are not there or not of that size."""
    try:
        state = _State(pairs=index["pairs"], tokens=index["tokens"])
        dtype = np.dtype(index["dtype"])
        for name, size in _sizes(state, dtype.itemsize).items():
            if (out / name).stat().st_size != size:
                return None
        kinds = {"ids": dtype, "offsets": np.dtype(np.uint64), "lengths": np.dtype(np.uint32)}
        arrays = {f"{side}_{kind}": _map(out / f"{side}.{kind}", kinds[kind]) for side in _SIDES for kind in _ARRAYS}
        return PairedIds(
            **arrays,
            bounds=tuple(index["bounds"]),
            weights=weights,
            counts=Counts(index["counts"]),
            fingerprint=index["fingerprint"],
        )
    except (KeyError, TypeError, ValueError, OSError):
        return None


def _sizes(state: _State, itemsize: int) -> dict[str, int]:
    """How many bytes of each array file are good."""
    sizes = {}
    for side, tokens in zip(_SIDES, state.tokens, strict=True):
        sizes[f"{side}.ids"] = tokens * itemsize
        sizes[f"{side}.offsets"] = (state.pairs + 1) * 8 if state.taken or state.pairs else 0
        sizes[f"{side}.lengths"] = state.pairs * 4
    return sizes


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _table(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}


def _table(tree: object) -> dict[str, Any]:
    return tree if isinstance(tree, dict) else {}
