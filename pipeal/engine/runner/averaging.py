"""Averaging over replicas: others hold the same layers, and learn from other samples of each batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from pipeal.core.packet import Packet
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree, batch_size
from pipeal.engine.runner.accumulation import Accumulation
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.runner.losses import LossLog
from pipeal.engine.trace import RowClock, StageClock


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


class Averaged:
    """In the place of :class:`~pipeal.engine.runner.accumulation.Accumulated`, where several learn together.

    An average is under way while the layers after it go backward::

        F  B(layer 2) ─┐ B(layer 3) ─┐      U(layer 2)  U(layer 3)
                       └ average     └ average

    Args:
        inner: What is run.
        index: The layer's number.
        layer: The layer.
        gathered: Its gradients.
        losses: Where the losses of all samples go.
        beside: The layer's turn at the compiler, for what is computed here and compiles nothing.
        together: The others.
        clock: Times the wait for them.
    """

    def __init__(
        self,
        inner: Runner,
        index: int,
        layer: TrainableLayer,
        gathered: Accumulation,
        losses: LossLog,
        beside: Callable[[], AbstractContextManager[None]],
        together: Together,
        clock: StageClock | RowClock,
    ) -> None:
        self._inner = inner
        self._index = index
        self._layer = layer
        self._gathered = gathered
        self._losses = losses
        self._beside = beside
        self._together = together
        self._clock = clock
        self._found: tuple[list[Tensor] | None, int] = (None, 0)

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`."""
        samples = batch_size((x, y))
        with self._beside():
            self._gathered.expect(samples)
        passed = self._inner.forward(packet, x, y, rows)
        self._found = passed.losses, samples
        return passed

    def backward(self, packet: Packet, rows: range | None = None) -> None:
        """A backward, after which averaging begins."""
        self._inner.backward(packet, rows)
        self._gathered.add()
        (losses, samples), self._found = self._found, (None, 0)
        learnt = 0
        if packet.updates:
            with self._beside():
                learnt = self._gathered.mean()
        self._together.begin(self._index, self._layer, losses, samples, learnt)

    def update(self, packet: Packet) -> None:
        """Waits for the average, and updates with it."""
        with self._clock.waiting("join"):
            losses = self._together.finish(self._index)
        if losses is not None:
            self._losses.add(self._index, losses)
        if packet.updates:
            self._inner.update(packet)
