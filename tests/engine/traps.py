"""Layers without tensors that fail, or stand still, where a test wants them to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from unittest.mock import patch

import pytest
from bench.virtual import VirtualLayer
from torch import Tensor, nn

from pipeal.engine.execution import executors
from pipeal.engine.execution.worker import StageThread

STALL_S = 0.5
"""How long a pipeline that is to stall may stand still; counted by :meth:`Gate.alone` or :class:`LookedAt` alone, since
a busy machine keeps threads waiting for longer."""

SOON_S = 60.0
"""What ends at once ends within this on any machine; what it must not wait for takes longer, or for ever."""


class Trap(VirtualLayer):
    """Does ``spring()`` in the given action on the given batch (counted by itself); otherwise virtual."""

    def __init__(
        self, action: str, batch: int, spring: Callable[[], object], seconds: tuple[float, float, float] = (0, 0, 0)
    ) -> None:
        super().__init__(*seconds)
        self.action, self.batch, self.spring = action, batch, spring
        self.done = {"F": 0, "B": 0, "U": 0}

    def _take(self, action: str) -> None:
        super()._take(action)
        number, self.done[action] = self.done[action], self.done[action] + 1
        if action == self.action and number == self.batch:
            self.spring()


def throw(error: BaseException) -> Callable[[], object]:
    """A spring that raises."""

    def spring() -> object:
        raise error

    return spring


class Gate:
    """Blocks whoever comes until it is opened; leaving it open is the test's duty."""

    def __init__(self) -> None:
        self.reached, self.ended = threading.Event(), threading.Event()
        self._open = threading.Event()

    def stand_still_here(self) -> None:
        """The name that a stall report must show."""
        self.reached.set()
        self._open.wait(120)
        self.ended.set()

    def open(self) -> None:
        self._open.set()

    def open_after(self, event: threading.Event) -> None:
        """Opens it, on a thread of its own, when something has happened."""
        threading.Thread(target=lambda: (event.wait(120), self.open()), daemon=True).start()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it, who waits for stages counts no time but that in which one stands still here and all others wait:
        however late a busy machine lets a thread come that far, nothing has stalled before."""

        def counted() -> float:
            threads = [one for one in threading.enumerate() if isinstance(one, StageThread)]
            acting = [one for one in threads if not one.doing[0].startswith("waiting")]
            return perf_counter() if self.reached.is_set() and len(acting) == 1 else 0.0

        with patch.object(executors, "perf_counter", counted):
            yield


class LookedAt:
    """Time that passes only as virtual layers take it; and who waits for stages looks whether they move meanwhile.

    Attributes:
        now: What every clock of the engine shows.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._looks = 0
        self._looked = threading.Condition()
        monkeypatch.setattr("bench.virtual.sleep", self.take)
        monkeypatch.setattr(executors, "perf_counter", self._look)
        monkeypatch.setattr(executors, "TICK_S", 0.005)
        for module in ("execution.worker", "pipeline", "trace", "devices.base.time"):
            monkeypatch.setattr(f"pipeal.engine.{module}.perf_counter", lambda: self.now)

    def take(self, seconds: float) -> None:
        """Lets time pass in small steps, after each of which there was a look: two readings of the clock."""
        steps = max(1, round(seconds / 0.25))
        for _ in range(steps):
            with self._looked:
                self.now += seconds / steps
                before = self._looks
                assert self._looked.wait_for(lambda before=before: self._looks > before + 1, SOON_S)  # type: ignore[misc]

    def _look(self) -> float:
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
            return self.now


def quick(count: int) -> list[nn.Module]:
    """Virtual layers that take no time."""
    return [VirtualLayer(0, 0) for _ in range(count)]


def nothing(batches: int) -> list[tuple[Any, Any]]:
    """Virtual packets."""
    return [(None, None)] * batches


class LostLosses(VirtualLayer):
    """Fails when asked for its losses."""

    def loss(self) -> tuple[Tensor, ...] | None:
        raise LookupError("no losses here")
