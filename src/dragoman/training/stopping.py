"""SIGINT and SIGTERM: the first one ends training after the update under way, the second one at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from dragoman.training.loop import SIGNALS, Loop


@contextlib.contextmanager
def stopping_at_signals(loop: Loop) -> Iterator[None]:
    """Within the block SIGINT and SIGTERM end the loop after its update; the second one ends the process at once."""
    received: list[float] = []
    # A launcher hands on what its ranks got themselves, where a scheduler signals all processes of a job.
    echo = 1.0 if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if received and now - received[0] >= echo:
            os._exit(128 + number)
        if received:
            return
        received.append(now)
        loop.request_stop(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
