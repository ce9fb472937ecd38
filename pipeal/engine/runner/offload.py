"""Brings a layer before its forward, and sends it away after its update (:mod:`pipeal.engine.state.offload`)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeal.core.packet import Packet
from pipeal.core.tree import Tree
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.state.offload import Offloaded


@dataclass(eq=False)
class Visited(Runner):
    """One visit per batch: with each layer of a stage before the next one, a layer comes once.

    Attributes:
        index: The layer's number.
        home: Where the stage's layers are between their visits.
    """

    index: int
    home: Offloaded

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`."""
        self.home.begin(self.index)
        return self.inner.forward(packet, x, y, rows)

    def update(self, packet: Packet) -> None:
        """As :meth:`Runner.update`."""
        self.inner.update(packet)
        self.home.end(self.index)
