"""Leaves a layer's update on a batch out where its loss is not finite: buffers and gradients go back to what they were.

Under ``on_oom='split'`` it stands around the parts of a batch, too, which move the gradients of earlier batches aside.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pipeal.core.packet import Packet
from pipeal.core.tree import Tree
from pipeal.engine.runner.before import Before
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.runner.nonfinite import FiniteWatch, refuse_broken


@dataclass(eq=False)
class Skip(Runner):
    """Keeps what a batch changes before its update.

    Attributes:
        index: The layer's number.
        module: The layer.
        watch: Knows which losses were not finite; under another policy than ``skip``, none is known to be.
        before: The layer's buffers and gradients from before the batch.
    """

    index: int
    module: nn.Module
    watch: FiniteWatch
    before: Before

    def forget(self) -> None:
        """As :meth:`Runner.forget`."""
        self.before.forget()
        self.inner.forget()

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`."""
        self.before.keep_buffers()
        return self.inner.forward(packet, x, y, rows)

    def backward(self, packet: Packet, rows: range | None = None) -> None:
        """As :meth:`Runner.backward`."""
        self.before.move_gradients_aside()  # unless parts of the batch have gone backward already
        self.inner.backward(packet, rows)

    def learns(self) -> bool:
        """Whether its loss was finite. Else the layer is as it was before the batch.

        Raises:
            NonFiniteError: The loss and the weights are not finite.
        """
        found = self.watch.not_finite(self.index)
        if found is not None:
            refuse_broken(self.module, found)
        self.before.put_gradients_back(together=found is None)
        if found is not None:
            self.before.put_buffers_back()
        self.before.forget()
        return found is None and self.inner.learns()
