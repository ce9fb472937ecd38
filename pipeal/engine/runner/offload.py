"""Brings a layer before its forward, and sends it home after its update (:mod:`pipeal.engine.state.home`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from pipeal.core.packet import Packet
from pipeal.core.tree import Tree
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.state.home import Home


@dataclass(eq=False)
class Visited(Runner):
    """One visit per batch: with each layer of a stage before the next one, a layer comes once.

    Attributes:
        index: The layer's number.
        home: Where the stage's layers are between their visits.
        beside: The layer's turn at the compiler, for what is copied here and compiles nothing.
    """

    index: int
    home: Home
    beside: Callable[[], AbstractContextManager[None]]

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`."""
        with self.beside():
            self.home.begin(self.index, packet)
        return self.inner.forward(packet, x, y, rows)

    def update(self, packet: Packet) -> None:
        """As :meth:`Runner.update`."""
        self.inner.update(packet)
        with self.beside():
            self.home.end(self.index)
