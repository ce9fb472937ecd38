"""Timing: a stamp of the device's before each action and one after it."""

from __future__ import annotations

from pipeal.core.packet import Packet
from pipeal.core.tree import Tree
from pipeal.engine.devices import Device
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.schedule import Action
from pipeal.engine.trace import RowClock, StageClock


class Timed:
    """Times whole batches; what learns in parts times these itself.

    Args:
        inner: What is run.
        index: The layer's number.
        device: Makes the stamps.
        clock: Keeps them.
    """

    def __init__(self, inner: Runner, index: int, device: Device, clock: StageClock | RowClock) -> None:
        self._inner = inner
        self._index = index
        self._device = device
        self._clock = clock

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`."""
        begin = self._device.stamp()
        passed = self._inner.forward(packet, x, y, rows)
        self._clock.add(self._index, Action.FORWARD, packet.batch, packet.sequence, begin)
        return passed

    def backward(self, packet: Packet, rows: range | None = None) -> None:
        """As :meth:`Runner.backward`."""
        begin = self._device.stamp()
        self._inner.backward(packet, rows)
        self._clock.add(self._index, Action.BACKWARD, packet.batch, packet.sequence, begin)

    def update(self, packet: Packet) -> None:
        """As :meth:`Runner.update`."""
        begin = self._device.stamp()
        self._inner.update(packet)
        self._clock.add(self._index, Action.UPDATE, packet.batch, packet.sequence, begin)
