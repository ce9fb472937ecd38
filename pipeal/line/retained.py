"""Items on their way to the next stage, each kept until a snapshot there covers it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from pipeal.line.items import Packed


class Retained:
    """Numbered items in order, from the oldest that no snapshot of the next stage covers.

    Args:
        limit_bytes: Beyond which nothing is added while there is something. One item alone may be larger.
        first: The number of the oldest.
        kept: What a snapshot has kept of them.

    Attributes:
        changed: Notified at every change; its lock guards all.
        first: The number of the oldest; that of the next one where there is none.
        size: Bytes of tensors.
    """

    def __init__(self, limit_bytes: float, first: int = 0, kept: Iterable[Packed] = ()) -> None:
        self.changed = threading.Condition()
        self.first = self._covered = first
        self._limit = limit_bytes
        self._items = deque(kept)
        self.size = sum(item.size for item in self._items)

    @property
    def next(self) -> int:
        """The number that the next one will have."""
        return self.first + len(self._items)

    def has_room(self, size: int) -> bool:
        """Whether an item of so many bytes may be added."""
        return not self._items or self.size + size <= self._limit

    def add(self, item: Packed) -> None:
        """Adds one; who calls has asked :meth:`has_room`. One that is covered already, as after a stage has gone back
        to its snapshot, does not stay."""
        with self.changed:
            self._items.append(item)
            self.size += item.size
            self._let_go()

    def get(self, number: int) -> Packed | None:
        """One of them; None where it has yet to come."""
        with self.changed:
            return self._items[number - self.first] if self.first <= number < self.next else None

    def cover(self, number: int) -> None:
        """A snapshot there covers all before a number: they go, also those that have yet to come."""
        with self.changed:
            self._covered = max(self._covered, number)
            self._let_go()

    def all(self) -> tuple[int, Sequence[Packed]]:
        """The number of the oldest, and all of them."""
        with self.changed:
            return self.first, list(self._items)

    def _let_go(self) -> None:
        while self._items and self.first < self._covered:
            self.size -= self._items.popleft().size
            self.first += 1
        self.changed.notify_all()
