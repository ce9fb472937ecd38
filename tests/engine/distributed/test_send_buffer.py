"""Send buffers follow what their connections carry: real sockets, of which the kernel's word is made up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from pipeal.engine.distributed import send_buffer
from pipeal.engine.distributed.endpoint import Endpoint
from pipeal.engine.distributed.send_buffer import LOOK_S, SendBuffer, Told, first_size, largest, told
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
        self.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size // 2)
        self.acked, self.trip_s, self.now = 0.0, 0.1, 0.0
        self.looked = SendBuffer(self.near.fileno(), 0.0)

    @property
    def size(self) -> int:
        return self.near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def told(self, file: int) -> Told:
        assert file == self.near.fileno()
        return Told(int(self.acked), self.trip_s, 0.1, self.size)

    def holds_up(self, share: float, trip_s: float = 0.1, seconds: float = 2 * LOOK_S) -> bool:
        """After some time in which so much of the buffer was under way."""
        self.acked += share * self.size * seconds / 0.1
        self.trip_s = trip_s
        self.now += seconds
        return self.looked.holds_up(self.now)


@pytest.fixture
def of_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Connection]]:
    limits = {"net/ipv4/tcp_wmem": KERNELS, "net/core/wmem_max": MOST // 2}
    monkeypatch.setattr(send_buffer, "_limit", limits.__getitem__)
    with ExitStack() as open_now:

        def made(size: int) -> Connection:
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
    while not one.holds_up(0.66):
        sizes.append(one.size)
    assert sizes == [2 * KERNELS, MOST]
    assert one.size == MOST
    assert one.holds_up(0.66), "as long as it does"


@pytest.mark.parametrize("trip_s", [0.1, 0.4])
def test_a_buffer_with_room_holds_nothing_up(of_size: Any, trip_s: float) -> None:
    one = of_size(KERNELS)
    assert not one.holds_up(0.55, trip_s)
    assert one.size == KERNELS


@pytest.mark.parametrize(("share", "size"), [(0.01, KERNELS), (0.25, MOST // 2), (0.4, int(0.8 * MOST)), (0.55, MOST)])
def test_where_a_queue_has_formed_it_shrinks_to_what_is_ample(of_size: Any, share: float, size: int) -> None:
    one = of_size(MOST)
    assert not one.holds_up(share)
    assert one.size == MOST, "no queue has formed"
    assert not one.holds_up(share, 0.2)
    assert one.size == pytest.approx(size, rel=1e-3)


def test_one_that_grows_by_itself_is_left_alone(of_size: Any) -> None:
    """Symptom: a connection that began was told to keep twice its small buffer for ever."""
    one = of_size(KERNELS // 2)
    assert not one.holds_up(0.9)
    assert not one.holds_up(0.1, 0.5)
    assert one.size == KERNELS // 2


def test_a_look_takes_its_time(of_size: Any) -> None:
    one = of_size(MOST)
    for _ in range(4):
        assert not one.holds_up(0.9, seconds=LOOK_S / 4 - 0.01)
    assert one.holds_up(0.9, seconds=0.05)


def test_what_a_system_does_not_tell_counts_as_held_up(of_size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = of_size(KERNELS)
    monkeypatch.setattr(send_buffer, "told", lambda file: None)
    assert not one.looked.holds_up(10.0), "it was told of, and is closed"
    assert one.looked.holds_up(20.0)
    silent = SendBuffer(one.near.fileno(), 0.0)
    assert not silent.holds_up(0.5)
    assert silent.holds_up(1.0)


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
        return found.acked - begun.acked == 10_000

    until(arrived)
    file = one.near.fileno()
    one.near.close()
    one.far.close()
    assert told(file) is None


def test_the_first_size_is_asked_for_only_where_it_is_more_than_the_kernels(of_size: Any) -> None:
    assert of_size(KERNELS) is not None
    assert largest() == MOST
    assert first_size() == MOST // 2


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
            found = told(ends[0]._buffers[1]._file)
            return 0 if found is None else found.acked

        until(lambda: carried() > 50_000)
    finally:
        for end in ends:
            end.close(0)
