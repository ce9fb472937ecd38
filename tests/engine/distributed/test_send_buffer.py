"""Send buffers follow what their connections carry: real sockets, of which the kernel's word is made up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeal.engine.distributed import send_buffer
from pipeal.engine.distributed.endpoint import Endpoint
from pipeal.engine.distributed.send_buffer import LOOK_S, SendBuffer, Told, first_size, told
from tests.integration.processes import until

from .ranks import LONG_S

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system tells nothing of connections")

KERNELS, MOST = 1 << 15, 1 << 17
"""Made up: what buffers grow to by themselves, and what they can be asked to become."""


class Connection:
    """One that is open, over the loopback, and what the kernel shall say of it."""

    def __init__(self, size: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.near = socket.create_connection(server.getsockname())
            self.far, _ = server.accept()
        self.resize(size)
        self.says = Told(0, 0, 0, 0.0, 0.1, 0.1, 0, ("near", "far"))
        self.now = 0.0
        self.looked = SendBuffer(self.near.fileno(), 0.0)

    @property
    def size(self) -> int:
        return self.near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def resize(self, size: int) -> None:
        self.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size // 2)

    def told(self, file: int) -> Told:
        assert file == self.near.fileno()
        return replace(self.says, buffer=self.size)

    def look(
        self, share: float, trip_s: float = 0.1, lost: float = 0.0, peer_full: float = 0.0, seconds: float = 2 * LOOK_S
    ) -> bool:
        """After some time in which so much of the buffer was under way, and so many packets were lost."""
        rate, before = share * self.size / trip_s, self.says
        self.says = replace(
            before,
            acked=before.acked + int(rate * seconds),
            sent=before.sent + 1000,
            again=before.again + int(1000 * lost),
            peer_full_s=before.peer_full_s + peer_full * seconds,
            trip_s=trip_s,
        )
        self.now += seconds
        return self.looked.look(self.now)


@pytest.fixture
def of_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Connection]]:
    limits = {"net/ipv4/tcp_wmem": KERNELS, "net/core/wmem_max": MOST // 2}
    monkeypatch.setattr(send_buffer, "_limit", limits.__getitem__)
    with ExitStack() as open_now:

        def made(size: int, **changed: int) -> Connection:
            limits.update({name.replace("__", "/"): value for name, value in changed.items()})
            found = Connection(size)
            open_now.callback(found.near.close)
            open_now.callback(found.far.close)
            monkeypatch.setattr(send_buffer, "told", found.told)
            found.looked = SendBuffer(found.near.fileno(), 0.0)
            return found

        yield made


def test_a_buffer_that_holds_its_connection_up_doubles_as_far_as_it_may(of_size: Any) -> None:
    one = of_size(KERNELS)
    sizes = []
    while not one.look(0.66):
        sizes.append(one.size)
    assert sizes == [2 * KERNELS, MOST]
    assert one.look(0.66), "as long as it does"


def test_a_system_that_gives_less_than_it_was_asked_for_is_not_asked_for_ever(of_size: Any) -> None:
    one = of_size(KERNELS, net__core__wmem_max=1 << 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SendBuffer, "_resize", lambda self, wanted: one.size)
        assert one.look(0.66)


@pytest.mark.parametrize(("share", "trip_s"), [(0.55, 0.1), (0.66, 0.13), (0.9, 0.4)])
def test_a_buffer_with_room_or_before_a_queue_holds_nothing_up(of_size: Any, share: float, trip_s: float) -> None:
    one = of_size(KERNELS)
    assert not one.look(share, trip_s)
    assert one.size == KERNELS


def test_where_a_peer_has_no_room_it_is_not_this_buffer_that_must_grow(of_size: Any) -> None:
    one = of_size(KERNELS)
    assert one.look(0.1, peer_full=0.6)
    assert not one.look(0.1, peer_full=0.4)
    assert one.size == KERNELS


@pytest.mark.parametrize(("share", "size"), [(0.01, KERNELS), (0.5, MOST // 2), (0.8, int(0.8 * MOST)), (1.0, MOST)])
def test_where_a_queue_overflows_it_shrinks_to_what_is_ample(of_size: Any, share: float, size: int) -> None:
    one = of_size(MOST)
    assert not one.look(share / 2, lost=0.1)
    assert not one.look(share, 0.2)
    assert one.size == MOST, "no queue has formed, or it holds all"
    assert not one.look(share, 0.2, lost=0.1)
    assert one.size == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize("limit", ["net__ipv4__tcp_wmem", "net__core__wmem_max"])
def test_where_a_limit_is_not_told_nothing_shrinks(of_size: Any, limit: str) -> None:
    """Symptom: where /proc/sys/net cannot be read, a buffer of 4 MB was told to keep 4608 bytes for ever."""
    one = of_size(MOST, **{limit: 0})
    before = one.size
    assert not one.look(0.0, 0.2, lost=0.1)
    assert one.size in (before, KERNELS)


def test_one_that_grows_by_itself_is_left_alone(of_size: Any) -> None:
    """Symptom: a connection that began was told to keep twice its small buffer for ever."""
    one = of_size(KERNELS // 2)
    assert not one.look(0.9)
    assert not one.look(0.1, 0.5, lost=0.1)
    assert one.size == KERNELS // 2


def test_the_shortest_round_trip_is_not_forgotten(of_size: Any) -> None:
    """Linux does after some minutes, and a queue that stands would then look like the link's own delay."""
    one = of_size(KERNELS)
    assert not one.look(0.3)
    one.says = replace(one.says, shortest_s=0.15)
    assert not one.look(0.9, 0.15)
    assert one.size == KERNELS


@pytest.mark.parametrize(
    ("link", "first", "last"),
    [(5 * MOST, KERNELS, MOST), (0.1 * KERNELS / 0.1, MOST, KERNELS), (0.4 * MOST / 0.1, MOST, 0.8 * MOST)],
    ids=["fast", "slow", "between"],
)
def test_buffers_settle(of_size: Any, link: float, first: int, last: float) -> None:
    """A link of so many bytes per second, 0.1 s, and a queue before it of half of what is then on the way."""
    one, sizes = of_size(first), []
    for _ in range(12):
        most = one.size * 2 / 3
        queued = max(0.0, most - link * 0.1)
        rate = min(link, most / 0.1)
        trip_s = 0.1 + min(queued, link * 0.05) / link
        one.look(rate * trip_s / one.size, trip_s, lost=0.02 if queued > link * 0.05 else 0.0)
        sizes.append(one.size)
    assert set(sizes[6:]) == {sizes[-1]}
    assert sizes[-1] == pytest.approx(last, rel=0.05)


def test_a_look_takes_its_time(of_size: Any) -> None:
    one = of_size(MOST)
    for _ in range(4):
        assert not one.look(0.9, seconds=LOOK_S / 4 - 0.01)
    assert one.look(0.9, seconds=0.05)


def test_what_a_system_does_not_tell_counts_as_held_up(of_size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = of_size(KERNELS)
    monkeypatch.setattr(send_buffer, "told", lambda file: None)
    assert not one.looked.look(10.0), "it was told of, and is closed"
    assert not one.looked.look(20.0)
    silent = SendBuffer(one.near.fileno(), 0.0)
    assert not silent.look(0.5)
    assert silent.look(1.0)


def test_another_connection_of_the_same_number_is_left_alone(of_size: Any) -> None:
    one = of_size(KERNELS)
    one.says = replace(one.says, ends=("near", "another"))
    assert not one.look(0.9)
    assert one.size == KERNELS


def test_the_kernel_tells_of_open_connections_alone() -> None:
    one = Connection(KERNELS)
    begun = told(one.near.fileno())
    assert begun is not None
    one.near.sendall(bytes(10_000))
    assert len(one.far.recv(10_000, socket.MSG_WAITALL)) == 10_000

    def arrived() -> bool:
        found = told(one.near.fileno())
        assert found is not None
        assert 0 < found.shortest_s <= found.trip_s
        assert found.buffer == one.size
        assert found.sent > begun.sent
        assert (found.peer_full_s, found.ends[1]) == (0.0, one.far.getsockname())
        return found.acked - begun.acked == 10_000

    until(arrived)
    file = one.near.fileno()
    one.near.close()
    one.far.close()
    assert told(file) is None


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        ({}, MOST // 2),
        ({"net__core__wmem_max": KERNELS // 2}, None),
        ({"net__core__wmem_max": KERNELS // 4}, None),
        ({"net__core__wmem_max": 0}, None),
        ({"net__ipv4__tcp_wmem": 0}, None),
    ],
)
def test_the_first_size_is_asked_for_only_where_it_is_more_than_the_kernels(
    of_size: Any, limits: dict[str, int], size: int | None
) -> None:
    of_size(KERNELS, **limits)
    assert first_size() == size


def test_ranks_of_several_machines_look_at_their_connections() -> None:
    """Each of its own, and not of another file."""
    given: dict[int, list[Any]] = {0: [], 1: []}
    meeting = threading.Barrier(2)

    def gather(rank: int) -> Callable[[Any], list[Any]]:
        def of_all(value: Any) -> list[Any]:
            given[rank].append(value)
            meeting.wait(LONG_S)
            return [given[0][len(given[rank]) - 1], given[1][len(given[rank]) - 1]]

        return of_all

    ends = [
        Endpoint(rank, gather(rank), near=False, hosts=("127.0.0.1", "127.0.0.1"), timeout_s=LONG_S) for rank in (0, 1)
    ]
    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Endpoint.connect, ends))
        ends[0].send(1, 0, ["words", {}, None, [[]], None], [torch.zeros(50_000, dtype=torch.uint8)])

        def carried() -> int:
            found = told(ends[0]._buffers._of[1]._file)
            return 0 if found is None else found.acked

        until(lambda: carried() > 50_000)
    finally:
        for end in ends:
            end.close(0)
