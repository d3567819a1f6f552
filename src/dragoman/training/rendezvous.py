"""The key-value store of one start of a job, which all ranks of this start know and none of an earlier one.

A launcher starts a job again over the store of the start before (PyTorch 2.13, `DynamicRendezvousHandler` in
`torch.distributed.elastic`), where the addresses of the dead still are: process groups would connect to them, and wait
or fail. So the first rank gives every start a name of its own. The number of restarts is no such name: with several
nodes each launcher counts its own failures.
"""

from __future__ import annotations

import datetime
import math
import os
import time
import uuid
from dataclasses import dataclass
from typing import Literal, cast, get_args

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed gives them no typed name
from torch.distributed.rendezvous import rendezvous

from dragoman.errors import TrainingError

PATIENCE = 1800.0
"""Seconds until a rank that never came is an error: there is no watchdog yet."""

Progress = Literal["", "refused", "begun", "saved"]
"""How far earlier starts of a job had come: nowhere that is known; to an error before anything was written; to a folder
that is theirs; to a checkpoint."""

_PROGRESS = "dragoman/progress"


@dataclass(frozen=True)
class Start:
    """One start of a job."""

    name: str
    store: Store
    """Empty at this start."""
    launchers: Store
    """Outlives the start where the launcher keeps it."""
    earlier: Progress = ""
    """Of the starts before."""
    failures: int = 0
    """How often the launcher of this rank had to start it again."""

    def note(self, progress: Progress) -> None:
        """For the starts to come. What earlier ones had reached stays reached."""
        reached = get_args(Progress)
        if reached.index(progress) > reached.index(self.earlier):
            self.launchers.set(_PROGRESS, progress)

    def say(self, key: str, word: str) -> None:
        """To those that `hear` the same key, now or later."""
        self.store.set(key, word)

    def hear(self, key: str, patience: float = math.inf) -> str:
        """Wait for the word, however long its rank takes: if it dies the launcher ends this one too. "" where it does
        not come within the patience."""
        deadline = time.monotonic() + patience
        while not (word := _read(self.store, key)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return word.decode()

    def connect(self) -> Store:
        """The store of this start over a connection of its own, for a thread that another's wait must not hold up."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=60))
        return PrefixStore(self.name, store)


def meet(rank: int, size: int, patience: float = PATIENCE) -> Start:
    """Agree with the other ranks on a start. Raises TrainingError if one of them does not come."""
    failures = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    deadline = time.monotonic() + patience
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=datetime.timedelta(seconds=PATIENCE)))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            earlier = _read(store, _PROGRESS).decode()
        else:
            earlier = "saved" if failures else ""  # each start has a store of its own, which knows of no other
        if rank == 0:
            name = _lead(store, size, earlier, deadline)
        else:
            name, earlier = _follow(store, rank, size, deadline)
    except (RuntimeError, OSError) as error:  # torch.distributed's own errors are RuntimeErrors
        raise TrainingError(f"rank {rank} of {size} cannot reach the launcher's store: {error}") from error
    return Start(name, PrefixStore(name, store), store, cast("Progress", earlier), failures)


def _lead(store: Store, size: int, earlier: str, deadline: float) -> str:
    """Tell each rank the name, and what is known of earlier starts, until it has heard; the name.

    A greeting may be that of a dead rank, which hears nothing; the living one writes over it, and is answered then.
    """
    name = f"dragoman-{uuid.uuid4().hex}"
    for other in range(1, size):
        greeting = b""
        while _read(store, f"dragoman/heard-{other}") != name.encode():
            found = _read(store, f"dragoman/greeting-{other}")
            if found != greeting:
                greeting = found
                store.set(f"dragoman/answer-{other}", f"{found.decode()} {name} {earlier}")
            _wait(deadline, f"rank {other} of {size} has not come")
    return name


def _follow(store: Store, rank: int, size: int, deadline: float) -> tuple[str, str]:
    greeting = uuid.uuid4().hex
    store.set(f"dragoman/greeting-{rank}", greeting)
    while True:
        answer = _read(store, f"dragoman/answer-{rank}").decode().split(" ")
        if answer[0] == greeting:
            store.set(f"dragoman/heard-{rank}", answer[1])
            return answer[1], answer[2]
        _wait(deadline, f"rank 0 of {size} has not come")


def _read(store: Store, key: str) -> bytes:
    return store.get(key) if store.check([key]) else b""


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise TrainingError(f"{what}: see what its launcher says, and whether it reaches MASTER_ADDR and MASTER_PORT")
    time.sleep(0.01)
