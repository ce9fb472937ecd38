"""Reading ahead on a thread, with the state of what the consumer has taken.

thread     source ──► (item, state after it) ──► channel of buffer_size ──┐
consumer   getstate() = the last state that came with an item  ◄──────────┘
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from pipeal.data.iterators.base import CheckpointableIterator, Stage, State
from pipeal.data.iterators.channel import Channel
from pipeal.data.iterators.checks import add_note, at_least, shorter

T = TypeVar("T")

_log = logging.getLogger(__name__)

MAX_REPLAY = 16
"""A state is taken every so many items at least; after restoring, fewer than that are read a second time."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What the thread hands over: an item and, now and then, the state of the source after it; or the end."""

    item: Any = None
    state: State | None = None
    end: BaseException | None = None


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
    _count: int
    _channel: Channel[_Read] | None
    _end: weakref.finalize[Any, Any] | None

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
        channel = self._start() if self._channel is None else self._channel
        if self._warn and not len(channel):
            _log.warning("item %d is wanted, but the prefetch buffer is empty", self._count)
        read: _Read = channel.get()
        if read.end is not None:
            self._stop()
            if not isinstance(read.end, StopIteration):
                add_note(read.end, f"raised for item {self._count} of PrefetchIterator, counted from 0")
            raise read.end
        self._count += 1
        self._offset += 1
        if read.state is not None:
            self._state, self._offset = read.state, 0
        item: T = read.item
        return item

    def _start(self) -> Channel[_Read]:
        self._sources[0].prepare()  # a process that is forked while threads run may inherit a lock that stays shut
        channel: Channel[_Read] = Channel(self._size)
        # The thread holds no reference to the iterator: it must not keep it alive. A daemon, since the interpreter
        # joins other threads before it runs finalizers.
        thread = threading.Thread(
            target=_read_ahead,
            args=(self._sources[0], self._offset, self._every, channel),
            name="pipeal-prefetch",
            daemon=True,
        )
        self._channel = channel
        self._end = weakref.finalize(self, _end, channel, thread, os.getpid())
        thread.start()
        return channel

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._channel = None

    def _begin(self, state: State | None) -> None:
        self._state = self._sources[0].getstate()
        self._offset, self._count = (state["offset"], state["position"]) if state else (0, 0)
        self._channel = None
        self._end = None
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # The source cannot be copied while the thread draws from it: what was read ahead is read again.
        self.setstate(self.getstate())
        return super().__getstate__()

    def _source_states(self) -> list[State]:
        return [self._state]

    def _position(self) -> State:
        return {"offset": self._offset, "position": self._count}


def _read_ahead(source: CheckpointableIterator[Any], skip: int, every: int, channel: Channel[_Read]) -> None:
    """Runs in the thread until the source ends or fails, or the channel is closed."""
    try:
        if sum(1 for _ in islice(source, skip)) < skip:
            raise shorter("PrefetchIterator", f"item {skip} after a state")
        count = skip
        while True:
            item = next(source)
            count += 1
            if not channel.put(_Read(item, source.getstate() if count % every == 0 else None)):
                return
    except BaseException as end:  # noqa: BLE001  handed to the consumer, who raises it
        channel.put(_Read(end=end))


def _end(channel: Channel[_Read], thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return  # a forked copy: it has no such thread, but perhaps a lock that the thread held
    channel.close()
    # Garbage collection may run anywhere, on that very thread too.
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join()
