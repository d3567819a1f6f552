"""Every start of a job has a store of its own, whatever earlier ones left behind in the launcher's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from dragoman.errors import TrainingError
from dragoman.training.parallel import World
from dragoman.training.rendezvous import Start, meet


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store that torchrun keeps, and the environment that tells of it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(store.port)),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ):
        monkeypatch.setenv(name, value)
    return store


def started(size: int, patience: float = 30.0, ranks: tuple[int, ...] | None = None) -> list[Start]:
    """What each of the ranks makes of one start."""
    present = tuple(range(size)) if ranks is None else ranks
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: meet(rank, size, patience), present))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_of_a_start_agree_and_no_two_starts_share_a_key(launcher: TCPStore, size: int) -> None:
    names = set()
    for _ in range(2):
        starts = started(size)
        assert len({start.name for start in starts}) == 1
        assert not any(start.store.check(["address-0"]) for start in starts)
        starts[0].store.set("address-0", "of this start")
        assert all(start.store.get("address-0") == b"of this start" for start in starts)
        assert all(start.connect().get("address-0") == b"of this start" for start in starts)
        names.add(starts[0].name)
    assert len(names) == 2


def test_a_rank_that_died_before_it_was_answered_does_not_mislead_the_next_start(launcher: TCPStore) -> None:
    with pytest.raises(TrainingError, match="rank 0 of 3 has not come"):
        started(3, 0.2, ranks=(1,))  # its greeting stays
    with pytest.raises(TrainingError, match="rank 1 of 3 has not come"):
        started(3, 0.2, ranks=(0,))  # its answer to the dead one stays
    starts = started(3)
    assert len({start.name for start in starts}) == 1


def test_a_start_knows_how_far_earlier_ones_had_come(launcher: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [start.earlier for start in started(2)] == ["", ""]
    for progress in ("refused", "begun", "saved"):
        started(2)[0].note(progress)
        # The other node's launcher counts no failure of its own.
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        assert [start.earlier for start in started(2)] == [progress, progress]
    started(2)[0].note("refused")
    assert [start.earlier for start in started(2)] == ["saved", "saved"]


def test_without_a_store_that_outlives_a_start_the_launchers_count_tells(
    launcher: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert meet(0, 1).earlier == ""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert meet(0, 1).earlier == "saved"


def test_where_the_first_rank_fails_the_others_end_in_silence(launcher: TCPStore) -> None:
    worlds = [World(rank, 2, start=start) for rank, start in enumerate(started(2))]

    def refuse() -> None:
        raise ValueError("no")

    def led(world: World) -> object:
        try:
            return world.lead("first", lambda: 5), world.lead("second", refuse)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(led, worlds)
    assert isinstance(first, ValueError)
    assert isinstance(second, SystemExit)
    assert second.code == 1
    assert World().lead("alone", lambda: 5) == 5
