"""A thread that reads ahead, of which either side can go away without leaving the other one waiting.

thread     iterable ──► channel of size ──┐
consumer   items in order, then the end ◄─┘
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeal.core.errors import ScheduleError

T = TypeVar("T")

PATIENCE_S = 5.0
"""How long an end waits for the item being made; after that the thread, a daemon, ends by itself."""


class ReadingThread(Iterator[T]):
    """The items of an iterable in their order, of which a thread reads ``size`` ahead.

    The thread starts with the first item that is wanted. It ends with the last one, with :meth:`close`, which any
    thread may call, and where this object is dropped. What the iterable raises is raised in its turn, as it is, and
    at every further item.

    Args:
        items: Read by the thread alone.
        size: How many items are ready at most, at least 1.
    """

    def __init__(self, items: Iterable[T], size: int) -> None:
        self._channel: _Channel[T | _End] = _Channel(size)
        # The thread holds no reference to this object: it must not keep it alive. A daemon, since the interpreter
        # joins other threads before it runs finalizers.
        self._thread = threading.Thread(target=_read, args=(items, self._channel), name="pipeal-prefetch", daemon=True)
        self._end: _End | None = None
        self._owner = os.getpid()
        weakref.finalize(self, _close, self._channel, self._thread, self._owner, PATIENCE_S)

    def __next__(self) -> T:
        if self._end is None:
            if self._thread.ident is None:
                self._thread.start()
            found = self._channel.get()
            if not isinstance(found, _End):
                return found
            self._end = found
        raise self._end.failure or StopIteration

    @property
    def ready(self) -> int:
        """How many items wait to be taken."""
        return len(self._channel.items)

    @property
    def has_ended(self) -> bool:
        """Whether the last item, or what was raised in the place of one, was taken."""
        return self._end is not None

    def close(self, *, patient: bool = False) -> None:
        """Ends the thread, and waits for it; not longer than :data:`PATIENCE_S`, unless one is patient."""
        _close(self._channel, self._thread, self._owner, None if patient else PATIENCE_S)


@dataclass(frozen=True)
class _End:
    """What comes after the last item: why there are no more, unless they are all there."""

    failure: BaseException | None


class _Channel(Generic[T]):
    """Hands over items in order; holds ``size`` at most."""

    def __init__(self, size: int) -> None:
        self.items: deque[T] = deque()
        self.closed = False
        self._size = size
        self._moved = threading.Condition()

    def put(self, item: T) -> bool:
        """Waits for room; False if the channel was closed."""
        with self._moved:
            self._moved.wait_for(lambda: self.closed or len(self.items) < self._size)
            if self.closed:
                return False
            self.items.append(item)
            self._moved.notify_all()
            return True

    def get(self) -> T:
        """Waits for an item. The giving side must end with one that says so.

        Raises:
            ScheduleError: It was closed, meanwhile or before.
        """
        with self._moved:
            self._moved.wait_for(lambda: self.closed or bool(self.items))
            if self.closed:
                raise ScheduleError("the thread that read ahead was closed; take a new iterator")
            self._moved.notify_all()
            return self.items.popleft()

    def close(self) -> None:
        """Says, from the taking side, that nothing more is wanted."""
        with self._moved:
            self.closed = True
            self._moved.notify_all()


def _read(items: Iterable[T], channel: _Channel[T | _End]) -> None:
    """Runs in the thread until the items end or fail, or the channel is closed."""
    if channel.closed:
        return
    failure = None
    try:
        for item in items:
            if not channel.put(item):
                return
    except BaseException as error:  # noqa: BLE001  raised where the items are taken
        failure = error
    channel.put(_End(failure))


def _close(channel: _Channel[T], thread: threading.Thread, process: int, patience_s: float | None) -> None:
    if os.getpid() != process:
        return  # a forked copy: it has no such thread, but perhaps a lock that the thread held
    channel.close()
    # Garbage may be collected anywhere, on that very thread too.
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(patience_s)
