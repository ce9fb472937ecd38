"""Timing: a stamp of the device's before each action and one after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeal.core.packet import Packet
from pipeal.engine.devices import Device
from pipeal.engine.runner.layer import Around
from pipeal.engine.schedule import Action
from pipeal.engine.trace import StageClock


@dataclass(eq=False)
class Timed(Around):
    """Times whole batches; what learns in parts times these itself.

    Attributes:
        index: The layer's number.
        device: Makes the stamps.
        clock: Keeps them.
    """

    index: int
    device: Device
    clock: StageClock

    @contextmanager
    def around(self, action: Action, packet: Packet, rows: range | None) -> Iterator[None]:  # noqa: ARG002
        """Times an action that goes well."""
        begin = self.device.stamp()
        yield
        self.clock.add(self.index, action, packet.batch, packet.sequence, begin)
