"""Reading ahead on a thread, with the state of what the consumer has taken.

thread     source ──► (item, state after it) ──► channel of buffer_size ──┐
consumer   getstate() = the last state that came with an item  ◄──────────┘
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from pipeal.core.errors import add_note
from pipeal.data.checks import at_least
from pipeal.data.iterators.base import CheckpointableIterator, Stage, State
from pipeal.data.iterators.checks import shorter
from pipeal.data.iterators.reading_thread import ReadingThread

__all__ = ["PrefetchIterator"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

MAX_REPLAY = 16
"""A state is taken every so many items at least; after restoring, fewer than that are read a second time."""


_Read: TypeAlias = tuple[Any, State | None]
"""An item and, now and then, the state of the source after it."""


class PrefetchIterator(Stage[T]):
    """The items of the source, of which a thread reads ``buffer_size`` ahead.

    The thread starts with the first item and ends with the last, with ``close`` and with the iterator itself. It
    shares the interpreter: it hides waiting (files, :class:`ParallelMapIterator`), not work in Python.

    An exception of the source arrives in its turn, after the items before it, as its own type and with a note
    that says which item it was.

    Args:
        source_iterator: The items; from now on only the thread draws from it.
        buffer_size: At least 1.
        buffer_in_main_process: Taken for the sake of code written for infinibatch; the buffer always is.
        log_empty_buffer_warning: Log a warning when an item is wanted and none is there yet.
    """

    fields = ("offset", "position")
    _state: State
    _offset: int
    _position: int
    _reading: ReadingThread[_Read] | None

    def __init__(
        self,
        source_iterator: CheckpointableIterator[T],
        buffer_size: int = 1000,
        buffer_in_main_process: bool = True,
        log_empty_buffer_warning: bool = False,
    ) -> None:
        super().__init__(source_iterator)
        self._size = at_least("buffer_size", buffer_size, 1)
        self._buffer_in_main_process = buffer_in_main_process
        self._warn = log_empty_buffer_warning
        # A state costs some microseconds per stage of the source: each item's for short buffers, of batches say.
        self._every = min(MAX_REPLAY, max(1, self._size // MAX_REPLAY))
        self._finish()

    def _next(self) -> T:
        if self._owner != os.getpid():
            self._go_to(self.getstate())  # a forked copy: it has the channel, but not the thread
        if self._reading is None:
            self._sources[0].prepare()  # a process that is forked while threads run may inherit a lock that stays shut
            self._reading = ReadingThread(_with_states(self._sources[0], self._offset, self._every), self._size)
        if self._warn and not self._reading.ready:
            _log.warning("item %d is wanted, but the prefetch buffer is empty", self._position)
        try:
            item, state = next(self._reading)
        except BaseException as end:
            if not self._reading.has_ended:  # Ctrl-C while it waited: the thread may be long about its item
                raise
            self._stop()
            if not isinstance(end, StopIteration):
                add_note(end, f"raised for item {self._position} of PrefetchIterator, counted from 0")
            raise
        self._position += 1
        self._offset += 1
        if state is not None:
            self._state, self._offset = state, 0
        return item

    def _stop(self) -> None:
        if self._reading is not None:
            self._reading.close(patient=True)  # the source must stand still before it is sent elsewhere
        self._reading = None

    def _begin(self, state: State | None) -> None:
        super()._begin(state)
        self._state = self._sources[0].getstate()
        self._reading = None
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # The source cannot be copied while the thread draws from it: what was read ahead is read again.
        self.setstate(self.getstate())
        return super().__getstate__()

    def _source_states(self) -> list[State]:
        return [self._state]


def _with_states(source: CheckpointableIterator[Any], skip: int, every: int) -> Iterator[_Read]:
    """Reads on behind ``skip`` items, in the thread."""
    if sum(1 for _ in islice(source, skip)) < skip:
        raise shorter("PrefetchIterator", f"item {skip} after a state")
    for count, item in enumerate(source, start=skip + 1):
        yield item, source.getstate() if count % every == 0 else None
