"""A thread for what waits for other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from pipeal.core.background import fulfil
from pipeal.engine.devices.threads import set_intra_op_threads
from pipeal.engine.distributed.world import World

T = TypeVar("T")


class WorkThread:
    """A thread for what may wait for another rank for ever; it is left behind where one is lost.

    Args:
        world: The processes.
        threads: Of its operators on a CPU.
        stall_timeout_s: How long a piece of work may take.

    Attributes:
        is_idle: Whether all work was done that it was given; another rank may else wait in the midst of some for ever.
    """

    def __init__(self, world: World, threads: int | None, stall_timeout_s: float) -> None:
        self._world, self._timeout_s = world, stall_timeout_s
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.is_idle = True
        threading.Thread(target=self._run, args=[threads], name="pipeal-backprop", daemon=True).start()

    def __call__(self, work: Callable[[], T]) -> T:
        """Has it done.

        Raises:
            PeerLostError: Another rank is lost.
            StallError: It takes too long.
            Exception: What ``work`` raised.
        """
        done: Future[T] = Future()
        self.is_idle = False
        self._work.put((done, work))

        with self._world.naming_lost():
            found = self._world.awaited(
                done,
                self._timeout_s,
                f"the stages of backpropagation were not done with a batch within {self._timeout_s:g} s "
                "(engine.stall_timeout_s)",
            )
        self.is_idle = True
        return found

    def close(self) -> None:
        """Ends the thread."""
        self._work.put(None)

    def _run(self, threads: int | None) -> None:
        set_intra_op_threads(threads)
        while (found := self._work.get()) is not None:
            fulfil(*found)
