"""Attempts at a run in one store, which torchrun keeps for all of them."""

from __future__ import annotations

import socket
from threading import Event, Thread
from unittest.mock import patch

import pytest
import torch.distributed as dist

from pipeal.core.errors import ConfigError, PeerLostError
from pipeal.engine.distributed import attempt_store as door
from pipeal.engine.distributed import world
from pipeal.engine.distributed.attempt_store import AttemptStore
from pipeal.engine.distributed.launch import Launch
from pipeal.engine.distributed.world import open_world

from .ranks import LONG_S, Wire, hurried, store_port


def launches(size: int, port: int) -> list[Launch]:
    return [Launch(rank, size, rank, size, "127.0.0.1", port, hosted=True) for rank in range(size)]


def entered(size: int, port: int) -> list[str]:
    """The names by which the ranks of one attempt know it; rank 0 comes last."""
    found: dict[int, str] = {}
    first, *others = launches(size, port)

    def enter(launch: Launch) -> None:
        found[launch.rank] = AttemptStore(launch, LONG_S).attempt

    threads = [Thread(target=enter, args=(launch,)) for launch in others]
    for thread in threads:
        thread.start()
    attempt_store = AttemptStore(first, LONG_S)
    while any(thread.is_alive() for thread in threads):
        attempt_store.answer()
    return [attempt_store.attempt, *(found[rank] for rank in range(1, size))]


def test_all_ranks_know_an_attempt_by_one_name_and_every_attempt_has_another() -> None:
    """Symptom: two machines whose torchruns had counted different restarts waited for each other in vain."""
    with store_port() as port:
        names = [entered(3, port) for _ in range(3)]
    assert all(len(set(attempt)) == 1 for attempt in names)
    assert len({attempt[0] for attempt in names}) == 3


def test_rank_0_that_does_not_come_is_named() -> None:
    with (
        store_port() as port,
        hurried(door),
        pytest.raises(PeerLostError, match="rank 0 of 2 did not come within 60 s "),
    ):
        AttemptStore(launches(2, port)[1], LONG_S)


def test_a_store_that_goes_away_while_rank_0_lets_the_others_in_is_told() -> None:
    """Symptom: a RuntimeError of the store itself, as of a bug."""
    with store_port() as port:
        wire = Wire(port)
        attempt_store = AttemptStore(launches(2, wire.port)[0], LONG_S)
        attempt_store.answer()
        wire.close()
        with pytest.raises(
            PeerLostError, match=f"the store cannot be reached: nobody answers at {attempt_store.where} "
        ) as found:
            attempt_store.answer()
        assert found.value.rank is None


@pytest.mark.parametrize(("rank", "kind"), [(0, ConfigError), (1, PeerLostError)])
def test_a_store_that_says_nothing_of_its_error_is_told_of_in_words(rank: int, kind: type[Exception]) -> None:
    """Symptom: an IndexError, of a text that has no first line."""
    launch = Launch(rank, 2, rank, 2, "127.0.0.1", 1)
    with patch.object(dist, "TCPStore", side_effect=RuntimeError()), pytest.raises(kind, match="RuntimeError"):
        AttemptStore(launch, 1.0)


def test_a_port_that_accepts_and_says_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: ranks other than 0 waited for ever for a program that was no store, past every timeout."""
    monkeypatch.setattr(door, "_LATE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        launch = Launch(1, 2, 1, 2, *silent.getsockname())
        with pytest.raises(PeerLostError, match=r"rank 0 cannot be reached: nobody answers at .* \(.*says nothing\)$"):
            AttemptStore(launch, 0.1)


def test_a_port_where_nobody_listens_is_not_said_to_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: PyTorch's store tries again past its timeout, and of a rank 0 that had not come it was said that it
    accepts connections."""
    monkeypatch.setattr(door, "_LATE_S", 0.0)
    over = Event()
    with (
        patch.object(dist, "TCPStore", side_effect=lambda *_, **__: over.wait()),
        pytest.raises(PeerLostError, match=r"nobody answers at .* \(.*nobody listens there: Connection refused\)$"),
    ):
        AttemptStore(Launch(1, 2, 1, 2, "127.0.0.1", 1), 0.1)
    over.set()


def test_what_an_earlier_attempt_left_in_the_store_is_not_heard() -> None:
    """A rank that knocked and died is not there, whatever it has left."""
    with store_port() as port:
        assert len(set(entered(2, port))) == 1
        wanted = "rank 1 of 2 did not come within 60 s"
        with (
            hurried(world),
            pytest.raises(PeerLostError, match=wanted),
            open_world(launches(2, port)[0], {}, timeout_s=LONG_S),
        ):
            pass
