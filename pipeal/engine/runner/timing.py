"""Timing: a stamp of the device's before each action and one after it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeal.core.packet import Packet
from pipeal.core.tree import Tree
from pipeal.engine.devices import Device, Stamp
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.schedule import Action
from pipeal.engine.trace import StageClock


@dataclass(eq=False)
class Timed(Runner):
    """Times whole batches, where the clock wants each layer's times; what learns in parts times these itself.

    Attributes:
        index: The layer's number.
        device: Makes the stamps.
        clock: Keeps them.
    """

    index: int
    device: Device
    clock: StageClock

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`; an action that fails is not counted."""
        begin = self._begin(packet)
        passed = self.inner.forward(packet, x, y, rows)
        self._end(Action.FORWARD, packet, begin)
        return passed

    def backward(self, packet: Packet, rows: range | None = None) -> None:
        """As :meth:`Runner.backward`; likewise."""
        begin = self._begin(packet)
        self.inner.backward(packet, rows)
        self._end(Action.BACKWARD, packet, begin)

    def update(self, packet: Packet) -> None:
        """As :meth:`Runner.update`; likewise."""
        begin = self._begin(packet)
        self.inner.update(packet)
        self._end(Action.UPDATE, packet, begin)

    def _begin(self, packet: Packet) -> Stamp:
        return self.device.stamp() if self.clock.by_layer(packet.sequence) else None

    def _end(self, action: Action, packet: Packet, begin: Stamp) -> None:
        if begin is not None:
            self.clock.add(self.index, action, packet.batch, packet.sequence, begin)
