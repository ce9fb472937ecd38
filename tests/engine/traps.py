"""Layers without tensors that fail, or stand still, where a test wants them to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bench.virtual import VirtualLayer
from torch import Tensor, nn

STALL_S = 2.0
"""How long a pipeline that is to stall may stand still: longer than a busy machine keeps a thread waiting."""

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
