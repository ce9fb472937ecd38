"""What may block for ever in code that nobody can interrupt, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from pipeal.core.errors import StallError

T = TypeVar("T")

_LOOK_S = 0.05


def on_a_thread(work: Callable[[], T], look: Callable[[], None], *, within_s: float, what: str) -> T:
    """Does it, and looks around meanwhile; the thread is left behind, blocked, when this ends before it.

    Args:
        work: What is to be done.
        look: Raises what is to end the wait.
        within_s: How long it may take.
        what: The work, for messages.

    Raises:
        StallError: It was not done in time.
        Exception: What ``work`` or ``look`` raised.
    """
    found: list[T] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001  raised where it was called
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name=f"pipeal-blocking: {what}", daemon=True).start()
    until = monotonic() + within_s
    while not done.wait(_LOOK_S):
        look()
        if monotonic() > until:
            raise StallError(f"{what} was not done within {within_s:g} s")
    if failed:
        raise failed[0]
    return found[0]
