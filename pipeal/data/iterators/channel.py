"""A queue between two threads of which either side can go away without leaving the other one waiting."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from pipeal.core.errors import ScheduleError

T = TypeVar("T")


class Channel(Generic[T]):
    """Hands over items in order; holds ``size`` at most."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[T] = deque()
        self._moved = threading.Condition()
        self._closed = False

    def put(self, item: T) -> bool:
        """Waits for room; False if the channel was closed."""
        with self._moved:
            self._moved.wait_for(lambda: self._closed or len(self._items) < self._size)
            if self._closed:
                return False
            self._items.append(item)
            self._moved.notify_all()
            return True

    def get(self) -> T:
        """Waits for an item. The giving side must end with one that says so.

        Raises:
            ScheduleError: It was closed, meanwhile or before.
        """
        with self._moved:
            self._moved.wait_for(lambda: self._closed or bool(self._items))
            if self._closed:
                raise ScheduleError("the thread that read ahead was closed; take a new iterator")
            self._moved.notify_all()
            return self._items.popleft()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Says, from the taking side, that nothing more is wanted."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()

    def __len__(self) -> int:
        return len(self._items)
