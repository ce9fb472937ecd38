"""Ranks of a run as threads of this process, over a real store, and a wire to it that can be cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import count
from types import ModuleType
from typing import TypeVar
from unittest.mock import patch

import torch.distributed as dist

from pipeal.engine.distributed.heartbeat import Heartbeat
from pipeal.engine.distributed.launch import Launch
from pipeal.engine.distributed.mesh import Mesh
from pipeal.engine.distributed.world import World

T = TypeVar("T")
TIMEOUT_S = 6.0
"""Where a rank is to fall silent."""

LONG_S = 60.0
"""Where none is: a busy machine may keep a thread from giving a sign of life for some seconds."""


class Wire:
    """Passes bytes on between a port of its own and the store's, until it is cut: then it says nothing at all."""

    def __init__(self, port: int) -> None:
        self._cut = threading.Event()
        self._open: list[socket.socket] = []
        self._to = port
        self._attempt_store = socket.create_server(("127.0.0.1", 0))
        self.port = self._attempt_store.getsockname()[1]
        threading.Thread(target=self._answer, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        for one in [self._attempt_store, *self._open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes whoever waits there
            one.close()

    def _answer(self) -> None:
        while True:
            try:
                near, _ = self._attempt_store.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            self._open += [near, far]
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if not self._cut.is_set():
                    to.sendall(data)
        except OSError:
            return


@contextmanager
def store_port() -> Iterator[int]:
    """A store that lives as long as the block, as ``torchrun`` hosts one."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield store.port


@contextmanager
def rank_of(
    rank: int, size: int, port: int, replicas: int = 1, timeout_s: float = LONG_S, beats: bool = True
) -> Iterator[World]:
    """A world without process groups, of which one process can have only one."""
    launch = Launch(rank, size, rank, size, "127.0.0.1", port, hosted=True)
    mesh = Mesh.of_world(size, replicas)

    def connect() -> dist.Store:
        return dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30), wait_for_workers=False)

    heartbeat = Heartbeat(connect(), rank, mesh, timeout_s, f"127.0.0.1:{port}")
    if beats:
        heartbeat.start()
    world = World(launch, heartbeat, connect())
    try:
        yield world
    finally:
        world.close()
        if beats:
            heartbeat.stop()


@contextmanager
def hurried(module: ModuleType) -> Iterator[None]:
    """A minute passes there between two looks at the clock: what waits in vain gives up at once, however long it might
    have waited for a store or a thread that comes late."""
    with patch.object(module, "monotonic", count(0.0, LONG_S).__next__):
        yield


@contextmanager
def ranks(size: int, replicas: int = 1, timeout_s: float = LONG_S) -> Iterator[list[World]]:
    """As many that have met."""
    with store_port() as port, ExitStack() as open_now:
        worlds = [open_now.enter_context(rank_of(rank, size, port, replicas, timeout_s)) for rank in range(size)]
        assert each(worlds, lambda world: world.meet({})) == [None] * size
        yield worlds


def each(worlds: Sequence[World], work: Callable[[World], T]) -> list[T | BaseException]:
    """What every rank's thread gives or raises; the first of the latter where nobody expects any."""
    found: dict[int, T | BaseException] = {}

    def run(world: World) -> None:
        try:
            found[world.rank] = work(world)
        except BaseException as error:  # noqa: BLE001  looked at by the test
            found[world.rank] = error

    threads = [threading.Thread(target=run, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return [found[world.rank] for world in worlds]
