"""Work on a daemon thread of its own, for what may block for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Begins it; the future brings what it returns or raises.

    A daemon, and no pool's: Python waits at its end for the threads of pools, and this one may never end.

    Args:
        work: What to do.
        name: Of the thread.
    """
    done: Future[T] = Future()
    threading.Thread(target=fulfil, args=(done, work), name=name, daemon=True).start()
    return done


def fulfil(done: Future[T], work: Callable[[], T]) -> None:
    """Does it on this thread; what it raises is raised where ``done`` is asked."""
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001  raised where it is waited for
        done.set_exception(error)
