"""Rounds what a layer hands on, and gives the next one its input as it was rounded (:mod:`pipeal.core.thin`).

::

    stage 0:  layer 0 ─ thin ─► thick ─ layer 1 ─ thin ─┐
                                                        │  int8 and scales: from stage to stage, and in queues
    stage 1:                                            └─► thick ─ layer 2

The same at every boundary between layers, within a stage as between two: so layouts leave the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from pipeal.core.options import PacketFormat
from pipeal.core.packet import Packet
from pipeal.core.rng import keyed
from pipeal.core.thin import thick, thin
from pipeal.core.tree import Tree, shapes_of
from pipeal.engine.devices import Device
from pipeal.engine.runner.error_context import ErrorContext
from pipeal.engine.runner.keyed import ROUNDING, Seeds
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.schedule import Action
from pipeal.engine.trace import StageClock


@dataclass(eq=False)
class Thinned(Runner):
    """Rounds whole batches, whatever becomes of a batch within: one that is learnt from in parts is rounded alike.

    Attributes:
        index: The layer's number.
        kind: How what it hands on is rounded; ``as_is`` of the last layer, which hands on to none.
        seeds: Those of its stage: what is drawn follows from seed, layer and batch.
        errors: Told what the layer gets.
        device: Makes stamps for the clock.
        clock: Times it, as part of the layer's forward.
        beside: The layer's turn at the compiler, for what is computed here and compiles nothing.
    """

    index: int
    kind: PacketFormat
    seeds: Seeds
    errors: ErrorContext
    device: Device
    clock: StageClock
    beside: Callable[[], AbstractContextManager[None]]

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`; what is handed on is thin."""
        if self.index:
            with self._timed(packet):
                x, y = thick(x), thick(y)
            self.errors.had[self.index] = shapes_of((x, y))
        passed = self.inner.forward(packet, x, y, rows)
        if self.kind == "as_is":
            return passed
        key = self.seeds.of(Action.FORWARD), self.index, packet.batch, ROUNDING
        with self._timed(packet), keyed(*key):
            x, y = (thin(tree, self.kind) for tree in passed.onward)
        return replace(passed, onward=(x, y))

    @contextmanager
    def _timed(self, packet: Packet) -> Iterator[None]:
        with self.beside():
            begin = self.device.stamp()
            yield
            self.clock.add(self.index, Action.FORWARD, packet.batch, packet.sequence, begin)
