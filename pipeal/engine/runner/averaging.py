"""Averaging over replicas: others hold the same layers, and learn from other samples of each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pipeal.core.packet import Packet
from pipeal.core.protocols import TrainableLayer
from pipeal.engine.runner.accumulation import Accumulated
from pipeal.engine.trace import StageClock


class Together(Protocol):
    """Others that hold the same layers, and learn from other samples of each batch."""

    @property
    def replica(self) -> int:
        """Which of them this is."""
        ...

    def begin(self, index: int, layer: TrainableLayer, losses: list[Tensor] | None, samples: int, learnt: int) -> None:
        """Begins, after a layer's backward, to make its gradients, of so many ``learnt`` samples, those of all samples.

        Where they are of none, only losses are brought together: the layer does not update after this batch.
        """
        ...

    def finish(self, index: int) -> list[Tensor] | None:
        """Waits for that, before the layer's update; gives the losses of all samples."""
        ...


@dataclass(eq=False)
class Averaged(Accumulated):
    """In the place of :class:`~pipeal.engine.runner.accumulation.Accumulated`, where several learn together.

    An average is under way while the layers after it go backward::

        F  B(layer 2) ─┐ B(layer 3) ─┐      U(layer 2)  U(layer 3)
                       └ average     └ average

    Attributes:
        layer: The layer.
        together: The others.
        clock: Times the wait for them.
    """

    layer: TrainableLayer
    together: Together
    clock: StageClock
    _found: tuple[list[Tensor] | None, int] = (None, 0)

    def backward(self, packet: Packet, rows: range | None = None) -> None:
        """A backward, after which averaging begins."""
        self.inner.backward(packet, rows)
        self.gathered.add()
        (losses, samples), self._found = self._found, (None, 0)
        learnt = 0
        if packet.updates:
            with self.beside():
                learnt = self.gathered.mean()
        self.together.begin(self.index, self.layer, losses, samples, learnt)

    def update(self, packet: Packet) -> None:
        """Waits for the average, and updates with it."""
        with self.clock.waiting("join"):
            losses = self.together.finish(self.index)
        if losses is not None:
            self.losses.add(self.index, losses)
        if packet.updates:
            self.inner.update(packet)

    def _keep(self, losses: list[Tensor] | None, samples: int) -> None:
        self._found = losses, samples  # until those of the others are there
