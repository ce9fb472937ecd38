"""Leaves a layer's update on a batch out where its loss is not finite: buffers and gradients go back to what they were.

Under ``on_oom='split'`` it stands around the parts of a batch, too, which move the gradients of earlier batches aside.
"""

from __future__ import annotations

from torch import nn

from pipeal.core.packet import Packet
from pipeal.core.tree import Tree
from pipeal.engine.runner.before import Before
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.runner.nonfinite import FiniteWatch, refuse_broken


class Skip:
    """Keeps what a batch changes before its update.

    Args:
        inner: What is run.
        index: The layer's number.
        module: The layer.
        watch: Knows which losses were not finite; under another policy than ``skip``, none is known to be.
        before: The layer's buffers and gradients from before the batch.
    """

    def __init__(self, inner: Runner, index: int, module: nn.Module, watch: FiniteWatch, before: Before) -> None:
        self._inner = inner
        self._index = index
        self._module = module
        self._watch = watch
        self._before = before

    def forget(self) -> None:
        """Drops what an earlier, perhaps failed, life of the pipeline left behind."""
        self._before.forget()

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`."""
        self._before.keep_buffers()
        return self._inner.forward(packet, x, y, rows)

    def backward(self, packet: Packet, rows: range | None = None) -> None:
        """As :meth:`Runner.backward`."""
        self._before.move_gradients_aside()  # unless parts of the batch have gone backward already
        self._inner.backward(packet, rows)

    def update(self, packet: Packet) -> None:
        """As :meth:`Runner.update`."""
        self._inner.update(packet)

    def counts(self) -> bool:
        """Before an update: whether the batch is learnt from. Else the layer is as it was before it.

        Raises:
            NonFiniteError: The loss and the weights are not finite.
        """
        found = self._watch.not_finite(self._index)
        if found is not None:
            refuse_broken(self._module, found)
        self._before.put_gradients_back(together=found is None)
        if found is not None:
            self._before.put_buffers_back()
        self._before.forget()
        return found is None
