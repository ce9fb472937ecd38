"""Worker processes that prepare data: they ignore signals and end with the run."""

from __future__ import annotations

import multiprocessing
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from ctypes import c_bool
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from pipeal.core.errors import WorkerError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

TELLS_S = 10.0
"""How long a dead worker may go unnoticed; PyTorch looks after 5 seconds without a batch, or after its ``timeout``."""


def serve_parent(_: int = 0) -> None:
    """What a worker process does first (``worker_init_fn`` of a ``DataLoader``, ``initializer`` of a pool).

    A batch system, ``timeout`` and a terminal's Ctrl-C signal a whole process group. The parent has batches to finish
    and a checkpoint to write then, so that the worker does not heed SIGINT, nor a SIGTERM, unless it is its parent's
    own (``Process.terminate``). It ends with its parent, also where that is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None  # it is a worker
    threading.Thread(target=_follow, args=(parent,), name="pipeal-follow-parent", daemon=True).start()
    released = set(_SIGNALS)
    if sys.platform == "linux":  # only here a thread is told who sent a signal; elsewhere SIGTERM ends the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey, args=(parent.pid,), name="pipeal-obey-parent", daemon=True).start()
        released.discard(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, released)


def worker_context(start_method: str | None = None) -> BaseContext:
    """What a ``DataLoader`` makes its workers of, and the event that says that they are done: here without a lock.

    That of :mod:`multiprocessing` has one, and a worker that is killed as it looks at the event keeps it. Before the
    loader tells of the death it looks, too: it would wait for ever, and once more in what cleans up after a Ctrl-C.

    Args:
        start_method: How workers start; None for Python's default.
    """
    context = copy(multiprocessing.get_context(start_method))
    context.Event = partial(_Flag, context)  # type: ignore[method-assign, assignment]
    return context


class _Flag:
    """A byte that all processes see."""

    def __init__(self, context: BaseContext) -> None:
        self._value = context.RawValue(c_bool)

    def set(self) -> None:
        self._value.value = True

    def is_set(self) -> bool:
        return self._value.value


def watch_workers(
    workers: Callable[[], Iterable[BaseProcess]],
    writer: Connection,
    over: threading.Event,
    blocked: Callable[[], bool] = lambda: False,
) -> None:
    """Ends the wait for a message that never comes, or never whole, since a worker was killed as it sent one.

    ``TELLS_S`` after one worker has failed, or once ``blocked`` has been so for as long, :func:`give_up`.

    Args:
        workers: Those that may still send something.
        writer: The end of the pipe through which they all answer.
        over: To be set once no message is waited for any more.
        blocked: Whether a worker of which nothing is expected any more has failed, and the others cannot send.
    """
    watched = (workers, writer, over, blocked)
    threading.Thread(target=_watch, args=watched, name="pipeal-watch-workers", daemon=True).start()


def give_up(workers: Iterable[BaseProcess], writer: Connection, waits: Callable[[], bool]) -> None:
    """Kills workers, and writes zeros in place of what they owe while the rest of a message is waited for.

    A pickle that is cut short ends in none, so that its reader raises. To close the pipe would not do: processes that
    were forked meanwhile, such as those of another iterator, could write to it, too.
    """
    for worker in workers:
        worker.kill()
        worker.join()
    room = select.poll()
    with suppress(OSError):  # it is closed, or its reader is gone
        room.register(writer, select.POLLOUT)
        while waits():
            if room.poll(100):
                os.write(writer.fileno(), bytes(select.PIPE_BUF))


@contextmanager
def starting_workers(start_method: str | None = None) -> Iterator[None]:
    """Signals wait while processes are started, in them too until :func:`serve_parent`: one would end them before it.

    And no handler of SIGCHLD is left behind. PyTorch's raises in whatever line the main thread has come to, also in
    one that handles the failure, or that writes down how the run ended; without it a ``DataLoader`` finds a dead
    worker where the next batch is waited for, within 5 seconds. That holds for all others of the process, too: PyTorch
    sets its handler once.

    Args:
        start_method: How they start; None for Python's default. A fork server is left as it is: it would hand what it
            inherits to all processes that anybody has it start.
    """
    with _same_handler_of_deaths():
        if (start_method or multiprocessing.get_start_method()) == "forkserver":
            yield
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _same_handler_of_deaths() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        # Only there handlers can be set; None is one that is not Python's.
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)


def worker_failure(error: BaseException) -> WorkerError | None:
    """What PyTorch, or Python, says of a worker process that died, in one line; None for any other error."""
    said = " ".join(str(error).split())
    if isinstance(error, ConnectionError | FileNotFoundError | EOFError) and _handing_over(error):
        return WorkerError(f"{_DIED} ({said})")
    if not isinstance(error, RuntimeError):
        return None
    for pattern, advice in _REASONS:
        if pattern.search(said):
            return WorkerError(f"{advice} ({said[:300]})")
    return None


def _handing_over(error: BaseException) -> bool:
    """Whether an error comes from fetching a batch's memory from a worker that has died."""
    return any(
        frame.f_globals.get("__name__") == "multiprocessing.resource_sharer"
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


_DIED = (
    "a worker process that prepares batches died, perhaps for want of memory; lower data.workers, or set it to 0 to "
    "see the cause"
)
_REASONS = (
    (
        re.compile(
            "out of shared memory|"
            "unable to (write to file|open shared memory object|resize file|allocate shared memory)"
        ),
        "no shared memory is left to hand batches over in; lower data.workers, or give the machine more of it "
        "(/dev/shm; --shm-size of a container)",
    ),
    (
        re.compile(r"Too many open files|received \d+ items of ancdata"),
        "no open files are left to hand batches over in; raise their number (ulimit -n), or lower data.workers",
    ),
    (
        re.compile("DataLoader worker .*(exited unexpectedly|killed by signal)|Pin memory thread exited unexpectedly"),
        _DIED,
    ),
)
"""What PyTorch says, and what to make of it."""


def _watch(
    workers: Callable[[], Iterable[BaseProcess]], writer: Connection, over: threading.Event, blocked: Callable[[], bool]
) -> None:
    looks = 0
    while not over.wait(1.0):
        looks = looks + 1 if blocked() else 0  # counted: a job that is stopped and goes on has not looked meanwhile
        failed = any(worker.exitcode for worker in workers())  # neither None nor 0
        if failed and over.wait(TELLS_S):
            return
        if failed or looks > TELLS_S:
            give_up(workers(), writer, lambda: not over.is_set())
            return


def _follow(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _obey(parent: int | None) -> None:
    while sys.platform == "linux":
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == parent:
            os._exit(0)
