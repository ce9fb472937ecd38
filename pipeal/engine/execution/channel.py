"""A link between two threads: a bounded queue that can be closed from anywhere, and what travels in it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from pipeal.core.packet import Packet
from pipeal.engine.stage import Stage
from pipeal.engine.state.snapshot import Snapshot


class Stopped(Exception):  # noqa: N818  not an error: the way out of a wait
    """The pipeline was told to stop."""


class Request(Protocol):
    """Something to do between two batches, that travels with them."""

    @property
    def does(self) -> str:
        """What, in words, for a stall report."""
        ...

    @property
    def goes_on(self) -> bool:
        """Whether the stage after this one gets it as well."""
        ...

    def __call__(self, stage: Stage) -> None:
        """Does it, on the stage's thread."""
        ...


Item: TypeAlias = "Packet | Snapshot | Request"
"""What travels down the line of stages."""


class Link:
    """A bounded queue between two threads that can be closed from any other.

    Args:
        depth: How many packets may wait in it.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._items: deque[Item] = deque()
        self._taken = 0
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def packets(self) -> int:
        """How many packets it was ever given; true also where a signal cuts :meth:`put` short."""
        with self._changed:
            return self._taken + sum(isinstance(item, Packet) for item in self._items)

    def put(self, item: Item, timeout_s: float | None = None) -> bool:
        """Adds a packet or what else travels as soon as there is space; False if there was none in time.

        Raises:
            Stopped: The link was closed.
        """
        with self._changed:
            there = self._wait(self._has_space, timeout_s)
            if there:
                self._add(item)
            return there

    def push(self, item: Item) -> None:
        """Adds what someone else bounds, space or not; raises as :meth:`put`."""
        with self._changed:
            self._wait(lambda: True)
            self._add(item)

    def wait_for_space(self) -> None:
        """Waits until :meth:`put` would find space; raises as that does."""
        with self._changed:
            self._wait(self._has_space)

    def first(self) -> Item:
        """The oldest as soon as there is one; it keeps its place until :meth:`get`, which then does not wait.

        Raises:
            Stopped: The link was closed.
        """
        with self._changed:
            self._wait(lambda: bool(self._items))
            return self._items[0]

    def get(self) -> Item:
        """Takes the oldest as soon as there is one; raises as :meth:`first`."""
        with self._changed:
            self._wait(lambda: bool(self._items))
            self._changed.notify_all()
            item = self._items.popleft()
            self._taken += isinstance(item, Packet)
            return item

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        there = self._changed.wait_for(lambda: self._closed or ready(), timeout_s)
        if self._closed:
            raise Stopped
        return there

    def _has_space(self) -> bool:
        return len(self._items) < self.depth

    def _add(self, item: Item) -> None:
        self._items.append(item)
        self._changed.notify_all()

    def close(self) -> None:
        """Ends every wait, now and from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
