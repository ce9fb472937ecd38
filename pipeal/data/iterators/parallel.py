"""A function over a stream, in several processes: in order, with bounded look-ahead, and without a barrier.

source   0 1 2 3 4 5 6 7 8 9 ...           chunks in flight: at most two per process
chunks   [0 1] [2 3] [4 5] [6 7]
served    ■ □   state: source before chunk 0, 1 served
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from pipeal.core.errors import ConfigError, add_note
from pipeal.data.checks import at_least
from pipeal.data.iterators.base import CheckpointableIterator, Stage, State
from pipeal.data.iterators.checks import a_function, apply, shorter
from pipeal.data.loading.workers import give_up, serve_parent, starting_workers, watch_workers

__all__ = ["ParallelMapIterator"]

In = TypeVar("In")
Out = TypeVar("Out")

GRACE_S = 5.0
"""How long a process may take to finish its chunk after the iterator was closed."""


_Answer: TypeAlias = tuple[list[Any], Exception | None, str]
"""What a process made of a chunk: the results up to the first failure, that, and its trace."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Items under way; ``first`` counts from the chunk's beginning, where ``state`` was taken."""

    state: list[State]
    first: int
    answer: Future[_Answer]
    source_failure: Exception | None = None
    """What the source raised after the items of this chunk."""


class ParallelMapIterator(Stage[Out]):
    """:class:`MapIterator` in ``num_processes`` processes: the same items in the same order.

    At most ``num_processes × num_items_per_process`` items are under way (two, if that is more, for each process);
    while the first of them is worked on, later results wait. An exception arrives in its turn, after the results
    before it, as its own type, with a note that says which item it was. A process that dies is an error, too.

    Processes start with the first item and end with ``close``, with the iterator itself and with their parent;
    whichever is not done with its chunk after ``GRACE_S`` seconds is killed. Within a process that
    may have no children, such as a worker of a ``DataLoader``, the function runs in place.

    Args:
        source_iterator: The items.
        transform: Must be importable, unless processes are forked: lambdas cannot be pickled.
        num_processes: At least 1.
        num_items_per_process: At least 1. Large enough to pay for the way there and back.
        start_method: ``"fork"``, ``"spawn"``, ``"forkserver"``; None is the default of ``multiprocessing``.

    Raises:
        ConfigError: A setting out of range; from ``next``: a function that cannot be pickled and must be.
    """

    setup = ("chunk",)
    fields = ("served", "position")
    _served: int
    _position: int
    _skip: int
    _flying: deque[_Chunk]
    _source_ended: bool
    # Not settings: a copy starts its own.
    _pool: ProcessPoolExecutor | None = None
    _end: weakref.finalize[Any, Any] | None = None
    _owner = 0

    def __init__(
        self,
        source_iterator: CheckpointableIterator[In],
        transform: Callable[[In], Out],
        num_processes: int,
        num_items_per_process: int,
        *,
        start_method: str | None = None,
    ) -> None:
        super().__init__(source_iterator)
        self._transform = a_function("transform", transform)
        self._processes = at_least("num_processes", num_processes, 1)
        self._chunk = (at_least("num_items_per_process", num_items_per_process, 1) + 1) // 2
        if start_method not in (None, *multiprocessing.get_all_start_methods()):
            known = ", ".join(multiprocessing.get_all_start_methods())
            raise ConfigError(f"start_method is {start_method!r}; this system has {known}")
        self._start_method = start_method
        self._finish()

    def prepare(self) -> None:
        """See :meth:`CheckpointableIterator.prepare`."""
        super().prepare()
        if self._pool is not None and self._owner != os.getpid():
            state = self.getstate()
            self._pool = None  # a forked copy: the processes are the parent's
            self._go_to(state)
        if self._pool is None and not multiprocessing.current_process().daemon:
            context = multiprocessing.get_context(self._start_method)
            if context.get_start_method() != "fork":
                _check_importable(self._transform)
            self._pool = ProcessPoolExecutor(self._processes, context, _learn, (self._transform,))
            self._owner = os.getpid()
            pool, over = self._pool, threading.Event()
            self._end = weakref.finalize(self, _end, pool, self._owner, over)
            # The pool starts its processes with the first task.
            with self._dying(), starting_workers(self._start_method):
                first = pool.submit(_answer, [])
            insides = _Insides(pool)
            watch_workers(insides.processes, insides.writer, over)
            with self._dying():
                first.result()

    def _next(self) -> Out:
        self.prepare()
        most = 1 if self._pool is None else 2 * self._processes
        while True:
            while not self._source_ended and len(self._flying) < most:
                self._send()
            if not self._flying:
                raise StopIteration
            chunk = self._flying[0]
            with self._dying():
                results, failure, trace = chunk.answer.result()
            place = self._served - chunk.first
            if place < len(results):
                self._served += 1
                self._position += 1
                return results[place]
            failure = failure or chunk.source_failure
            if failure is not None:
                add_note(failure, f"raised for item {self._position} of ParallelMapIterator, from 0")
                if trace:
                    add_note(failure, f"in its process:\n{trace}")
                raise failure
            self._flying.popleft()
            self._served = 0

    def _send(self) -> None:
        """Reads a chunk and gives it to the pool; what a restored iterator has served is not worked on again."""
        state = super()._source_states()
        items: list[Any] = []
        source_failure = None
        try:
            for item in islice(self._sources[0], self._chunk):
                items.append(item)  # one by one: what came before a failure is kept
        except Exception as failure:  # noqa: BLE001  raised in its turn, after the results before it
            source_failure = failure
        self._source_ended = len(items) < self._chunk
        first, self._skip = self._skip, 0
        if len(items) < first and source_failure is None:
            raise shorter("ParallelMapIterator", f"item {self._position}")
        if first >= len(items) and source_failure is None:
            self._served = 0
            return
        if self._pool is None or first >= len(items):
            answer: Future[_Answer] = Future()
            answer.set_result(_answers(self._transform, items[first:]))
        else:
            with self._dying():
                answer = self._pool.submit(_answer, items[first:])
        self._flying.append(_Chunk(state, first, answer, source_failure))

    @contextmanager
    def _dying(self) -> Iterator[None]:
        """Says where the consumer stood when a process died, or when items or results could not travel."""
        try:
            yield
        except BrokenProcessPool as failure:
            add_note(failure, f"a process died with item {self._position} or a later one of ParallelMapIterator")
            self._drop_pool()  # it stays broken; after restoring a state, another one starts
            raise
        except Exception as failure:
            add_note(
                failure, f"raised between processes for item {self._position} of ParallelMapIterator or a later one"
            )
            raise

    def _stop(self) -> None:
        # What is in flight stays listed: the first chunk says where the consumer stood, of a closed iterator too.
        for chunk in self._flying:
            chunk.answer.cancel()
        if self._closed:
            self._drop_pool()

    def _drop_pool(self) -> None:
        if self._end is not None:
            self._end()
            self._pool = self._end = None

    def _begin(self, state: State | None) -> None:
        super()._begin(state)
        self._skip = self._served
        self._flying = deque()
        self._source_ended = False

    def _source_states(self) -> list[State]:
        return self._flying[0].state if self._flying else super()._source_states()


_transform: Callable[[Any], Any]


def _learn(transform: Callable[[Any], Any]) -> None:
    """Runs once in each process: the function travels once, not with each chunk."""
    global _transform
    _transform = transform
    serve_parent()


def _answer(items: list[Any]) -> _Answer:
    """Runs in a process."""
    results, failure, trace = _answers(_transform, items)
    return results, failure and _portable(failure), trace


def _answers(transform: Callable[[Any], Any], items: list[Any]) -> _Answer:
    results: list[Any] = []
    for item in items:
        try:
            results.append(apply(transform, item))
        except Exception as failure:  # noqa: BLE001  travels to the consumer
            return results, failure, "".join(traceback.format_exception(failure)).rstrip()
    return results, None, ""


def _check_importable(transform: Callable[[Any], Any]) -> None:
    try:
        pickle.dumps(transform)
    except Exception as failure:
        raise ConfigError(
            f"transform cannot be pickled ({failure}); wanted a function of a module, which other processes can "
            "import, or start_method='fork'"
        ) from failure


def _portable(failure: Exception) -> Exception:
    """The failure itself where it survives pickling, which types with an unusual ``__init__`` do not."""
    try:
        pickle.loads(pickle.dumps(failure))
    except Exception:  # noqa: BLE001  whatever pickling does, the failure must arrive
        return RuntimeError(f"{type(failure).__name__}: {failure}")
    return failure


class _Insides:
    """What a pool has no public names for, as it was before its shutdown: one that is stuck is ended by these."""

    def __init__(self, pool: Any) -> None:
        self.manager: threading.Thread | None = pool._executor_manager_thread
        self.writer: Connection = pool._result_queue._writer
        self._processes: dict[int, BaseProcess] = pool._processes

    def processes(self) -> list[BaseProcess]:
        """Those that there are by now."""
        return list(self._processes.values())


def _end(pool: ProcessPoolExecutor, process: int, over: threading.Event) -> None:
    if os.getpid() != process:
        return
    over.set()
    insides = _Insides(pool)
    manager = insides.manager
    pool.shutdown(wait=False, cancel_futures=True)
    # Garbage collection may run anywhere, on the thread that manages the pool too, which cannot wait for itself.
    if manager is None or threading.current_thread() is manager:
        return
    manager.join(GRACE_S)
    if manager.is_alive():
        until = monotonic() + GRACE_S
        give_up(insides.processes(), insides.writer, lambda: manager.is_alive() and monotonic() < until)
