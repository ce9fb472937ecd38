"""The first Ctrl-C, or SIGTERM, asks a run to end at a good place; the second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Listens to both signals within its ``with`` block; outside of it they do what they did before.

    Used from the main thread; in any other it hears nothing.

    Attributes:
        signal: The signal that came first; None while none has come.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def code(self) -> int | None:
        """The exit code of a process that ends by the signal; None while none has come."""
        return None if self.signal is None else 128 + self.signal

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._heard) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _heard(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
