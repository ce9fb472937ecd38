"""Several batches to one update: the mean of their gradients, each batch by its samples.

::

    batch        0        1        2 ─ updates      3        4 ─ updates
    gradients   g0   g0 + g1   (n0 g0 + n1 g1 + n2 g2) / (n0 + n1 + n2)

That is the gradient of one batch of all their samples, up to rounding, wherever losses are means over the samples;
batch norm sees each batch's own statistics. Gradients add up where PyTorch adds them up, in a parameter's ``grad``, so
that no memory is needed for it. There they are kept in units of the newest batch: the sum of ``g_i n_i / n``, in which
that batch's own gradient counts once. Batches of one size therefore cost a single multiplication, at the update.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeal.core.packet import Packet
from pipeal.core.tree import Tree, batch_size
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.runner.losses import LossLog


@dataclass(eq=False)
class Accumulated(Runner):
    """Ends a batch by an update, or by keeping its gradients for a later one.

    Attributes:
        index: The layer's number.
        gathered: The layer's gradients.
        losses: Where its losses go.
        beside: The layer's turn at the compiler, for what is computed here and compiles nothing.
    """

    index: int
    gathered: Accumulation
    losses: LossLog
    beside: Callable[[], AbstractContextManager[None]]

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`."""
        samples = batch_size((x, y))
        with self.beside():
            self.gathered.expect(samples)
        passed = self.inner.forward(packet, x, y, rows)
        self._keep(passed.losses, samples)
        return passed

    def update(self, packet: Packet) -> None:
        """Counts the batch, or leaves it out; and where it updates, so does what was gathered."""
        if self.inner.learns():
            self.gathered.add()
        if not packet.updates:
            return
        with self.beside():
            samples = self.gathered.mean()
        if samples:
            self.inner.update(packet)

    def _keep(self, losses: list[Tensor] | None, samples: int) -> None:  # noqa: ARG002
        if losses is not None:
            self.losses.add(self.index, losses)


class Accumulation:
    """One layer's gradients between two updates.

    Args:
        module: The layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._samples, self._unit = 0, 1

    def forget(self, *, midway: bool) -> None:
        """After a life of the pipeline: drops the gradients of an update that never came.

        Those of a layer that holds gradients back by itself stay.

        Args:
            midway: Whether that life ended within a batch.
        """
        if midway or self._samples:
            for one in self._module.parameters():
                one.grad = None
        self._restart()

    def expect(self, samples: int) -> None:
        """Before a batch's forward: brings what there is to the units of that batch."""
        unit, self._unit = self._unit, max(samples, 1)
        if self._samples:
            self._multiply(unit / self._unit)

    def add(self) -> None:
        """After its backward, and where it is not left out: counts it."""
        self._samples += self._unit

    def mean(self) -> int:
        """Before an update: makes the sum a mean, and counts from 0.

        Returns:
            The samples of all batches; 0 where every one was left out, and nothing is to be learnt.
        """
        samples = self._samples
        if samples:
            self._multiply(self._unit / samples)
        self._restart()
        return samples

    def _restart(self) -> None:
        self._samples, self._unit = 0, 1

    @torch.no_grad()
    def _multiply(self, factor: float) -> None:
        if factor == 1:
            return
        gradients = [one.grad for one in self._module.parameters() if one.grad is not None]
        dense = [one for one in gradients if one.layout is torch.strided]
        if dense:
            torch._foreach_mul_(dense, factor)
        for one in gradients:
            if one.layout is not torch.strided:
                one.mul_(factor)
