"""The gate before the compiler: any number of actions side by side, or one alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

COMPILE_TIMEOUT_S = 1800.0
"""How long an action may run alone before the watchdog counts it as standing still."""

_POLL_S = 0.1


class Abandoned(Exception):  # noqa: N818  not an error: the way out of a wait
    """The pipeline was told to stop while an action waited for its turn."""


class CompileGate:
    """Lets actions through: any number side by side, or one alone, first come, first served.

    No one starves: who comes after one that waits to be alone waits behind it. No thread may pass twice at once, and no
    action waits for another, so that every wait ends.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._inside = 0
        self._alone_since: float | None = None

    @contextmanager
    def shared(self, abandoned: threading.Event | None = None) -> Iterator[None]:
        """Within it, no one is alone.

        Args:
            abandoned: When set, the wait ends.

        Raises:
            Abandoned: The wait was ended.
        """
        with self._changed:
            if self._queue or self._alone_since is not None:
                self._wait(lambda: self._alone_since is None, abandoned)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if self._queue:
                    self._changed.notify_all()

    @contextmanager
    def alone(self, abandoned: threading.Event | None = None) -> Iterator[None]:
        """Within it, no one else is inside. Arguments and errors as for :meth:`shared`."""
        with self._changed:
            self._wait(lambda: self._alone_since is None and not self._inside, abandoned)
            self._alone_since = perf_counter()
        try:
            yield
        finally:
            with self._changed:
                self._alone_since = None
                self._changed.notify_all()

    def busy(self) -> bool:
        """Whether one is alone inside, and not yet for so long that it stands still."""
        since = self._alone_since
        return since is not None and perf_counter() - since < COMPILE_TIMEOUT_S

    def _wait(self, free: Callable[[], bool], abandoned: threading.Event | None) -> None:
        """Waits, the condition held, until one is first in the queue and the way is free."""
        ticket = object()
        self._queue.append(ticket)
        try:
            while not (self._queue[0] is ticket and free()):
                if abandoned is not None and abandoned.is_set():
                    raise Abandoned
                self._changed.wait(None if abandoned is None else _POLL_S)
        finally:
            self._queue.remove(ticket)
            self._changed.notify_all()


GATE = CompileGate()
"""The one gate of the process: the compiler's state is the process's."""
