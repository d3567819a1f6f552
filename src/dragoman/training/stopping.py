"""SIGINT and SIGTERM: the first one ends training after the update under way, the second one at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from dragoman.training.loop import SIGNALS, Loop


@contextlib.contextmanager
def stopping_at_signals(loop: Loop) -> Iterator[None]:
    """Within the block SIGINT and SIGTERM end the loop after its update; the second one ends the process at once."""
    received: list[float] = []
    # A launcher hands on what its ranks got themselves, where a scheduler signals all processes of a job.
    echo = 1.0 if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0.0

    def handle(number: int) -> None:
        now = time.monotonic()
        if received and now - received[0] >= echo:
            os._exit(128 + number)
        if not received:
            received.append(now)
            loop.request_stop(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _listening(handle):
        yield


@contextlib.contextmanager
def _listening(handle: Callable[[int], None]) -> Iterator[None]:
    """Within the block `handle` is called with each signal, by a thread: Python's own handlers run in the main thread
    and only between its instructions, which a backward pass may keep waiting for minutes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while number := os.read(reader, 1)[0]:
            if number in SIGNALS:
                handle(number)

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Without a handler of some kind the signal would end the process before it is written to the pipe.
    before = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.write(writer, b"\0")
        thread.join()
        os.close(writer)
        os.close(reader)
