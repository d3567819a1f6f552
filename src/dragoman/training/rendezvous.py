"""The key-value store of one start of a job, which all ranks of this start know and none of an earlier one.

A launcher starts a job again over the store of the start before (PyTorch 2.13, `DynamicRendezvousHandler` in
`torch.distributed.elastic`), where the addresses of the dead still are: process groups would connect to them, and wait
or fail. So the first rank gives every start a name of its own. The number of restarts is no such name: with several
nodes each launcher counts its own failures.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed gives them no typed name
from torch.distributed.rendezvous import rendezvous

from dragoman.errors import TrainingError

PATIENCE = 1800.0
"""Seconds until a rank that never came is an error: there is no watchdog yet."""

_BEGUN = "dragoman/begun"


@dataclass(frozen=True)
class Start:
    """One start of a job."""

    name: str
    store: Store
    """Empty at this start."""
    launchers: Store
    """Outlives the start where the launcher keeps it."""
    restarted: bool
    """Whether an earlier start of the same job had begun to write: this one goes on with it."""

    def begun(self) -> None:
        """From now on a restart goes on with what is there; the first rank says so once it may write."""
        self.launchers.set(_BEGUN, "1")

    def connect(self) -> Store:
        """The store of this start over a connection of its own, for a thread that another's wait must not hold up."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=60))
        return PrefixStore(self.name, store)


def meet(rank: int, size: int, patience: float = PATIENCE) -> Start:
    """Agree with the other ranks on a start. Raises TrainingError if one of them does not come."""
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=datetime.timedelta(seconds=PATIENCE)))
    except (RuntimeError, OSError) as error:  # torch.distributed's own errors are RuntimeErrors
        raise TrainingError(f"rank {rank} of {size} cannot reach the launcher's store: {error}") from error
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        restarted = store.check([_BEGUN])
    else:
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    name, restarted = (_lead if rank == 0 else _follow)(store, rank, size, restarted, time.monotonic() + patience)
    return Start(name, PrefixStore(name, store), store, restarted)


def _lead(store: Store, rank: int, size: int, restarted: bool, deadline: float) -> tuple[str, bool]:
    """Tell each rank the name, until it has heard.

    A greeting may be that of a dead rank, which hears nothing; the living one writes over it, and is answered then.
    """
    name = f"dragoman-{uuid.uuid4().hex}"
    for other in range(1, size):
        greeting = b""
        while _read(store, f"dragoman/heard-{other}") != name.encode():
            found = _read(store, f"dragoman/greeting-{other}")
            if found != greeting:
                greeting = found
                store.set(f"dragoman/answer-{other}", f"{found.decode()} {name} {int(restarted)}")
            _wait(deadline, f"rank {other} of {size} has not come")
    return name, restarted


def _follow(store: Store, rank: int, size: int, _: bool, deadline: float) -> tuple[str, bool]:
    greeting = uuid.uuid4().hex
    store.set(f"dragoman/greeting-{rank}", greeting)
    while True:
        answer = _read(store, f"dragoman/answer-{rank}").decode().split()
        if answer and answer[0] == greeting:
            store.set(f"dragoman/heard-{rank}", answer[1])
            return answer[1], answer[2] == "1"
        _wait(deadline, f"rank 0 of {size} has not come")


def _read(store: Store, key: str) -> bytes:
    return store.get(key) if store.check([key]) else b""


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise TrainingError(f"{what}: see what its launcher says, and whether it reaches MASTER_ADDR and MASTER_PORT")
    time.sleep(0.01)
