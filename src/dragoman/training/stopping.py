"""SIGINT and SIGTERM: the first one ends training after the update under way, the second one at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from dragoman.training.loop import SIGNALS, Loop


@contextlib.contextmanager
def stopping_at_signals(loop: Loop) -> Iterator[None]:
    """Within the block SIGINT and SIGTERM end the loop after its update; the second one ends the process at once."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
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
