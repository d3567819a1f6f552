"""Ends a job that shows no sign of life, and says where each of its processes stood.

Every process beats after each piece of work: a micro-batch, a validated batch, a saved file. While one of them works
the others may wait in silence; when all have been silent for `seconds`, each prints the stack of every thread it has
and exits, so that nothing hangs for ever. The processes see each other's beats through the store of the process group.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from typing import Protocol


class Store(Protocol):
    """The part of torch.distributed's key-value store that is used here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Watchdog:
    """Watches the process that makes it, and through `store` the others of the job."""

    def __init__(self, seconds: float, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self.seconds = seconds
        self.rank = rank
        self.size = size
        self.store = store
        self.beats = 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def _interval(self) -> float:
        return min(5.0, max(0.05, self.seconds / 10))

    def start(self) -> None:
        """Begin to watch."""
        self.thread.start()

    def beat(self) -> None:
        """A sign of life."""
        self.beats += 1

    def stop(self) -> None:
        """Watch no longer."""
        self.stopped.set()
        if self.thread.is_alive():
            self.thread.join(timeout=5.0)
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        interval = self._interval
        seen: list[int] = []
        last = time.monotonic()
        while not self.stopped.wait(interval):
            now = self._all_beats()
            if now != seen:
                seen, last = now, time.monotonic()
            elif time.monotonic() - last > self.seconds:
                self._end()
            # Should this very thread be kept from running, by code that never lets go of the interpreter, the timer of
            # faulthandler, which needs no interpreter, does the same.
            faulthandler.dump_traceback_later(self.seconds + 2 * interval + 1.0, exit=True)

    def _all_beats(self) -> list[int]:
        if self.store is None:
            return [self.beats]
        try:
            self.store.set(f"beat-{self.rank}", str(self.beats))
            keys = [f"beat-{rank}" for rank in range(self.size)]
            return [int(self.store.get(key)) if self.store.check([key]) else -1 for key in keys]
        except (RuntimeError, OSError):
            # The process that holds the store is gone; the launcher ends the job, and this one watches itself.
            self.store = None
            return [self.beats]

    def _end(self) -> None:
        place = f"rank {self.rank} of {self.size}: " if self.size > 1 else ""
        print(
            f"error: {place}no sign of life for {self.seconds:g} seconds (training.hang_seconds); where each thread "
            "stands:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        # The others have been silent as long, to within an interval; leave them the time to say where they stand, be it
        # by the timer of one that cannot.
        time.sleep(2 * self._interval + 2.0 if self.size > 1 else 0.0)
        os._exit(1)
