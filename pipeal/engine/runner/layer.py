"""One layer's forward, backward and update: the innermost runner, and what every one around it does, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipeal.core.errors import ScheduleError
from pipeal.core.packet import Packet
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree, tensors


@dataclass(frozen=True)
class Passed:
    """What a forward gave.

    Attributes:
        onward: What the next layer gets.
        losses: The layer's losses, detached; None where it reports none.
    """

    onward: tuple[Tree, Tree]
    losses: list[Tensor] | None


class Runner(Protocol):
    """Runs one layer, or wraps another runner of it. The three are called in this order for each batch."""

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """Goes forward.

        Args:
            packet: The batch; its own tensors may be gone.
            x: The layer's input.
            y: Its target.
            rows: Which samples these are, where they are a part of the batch.
        """
        ...

    def backward(self, packet: Packet, rows: range | None = None) -> None:
        """Goes back through what the last forward kept."""
        ...

    def update(self, packet: Packet) -> None:
        """Ends the batch."""
        ...


class Plain:
    """The layer itself."""

    def __init__(self, layer: TrainableLayer) -> None:
        self._layer = layer

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:  # noqa: ARG002
        """Calls the layer.

        Raises:
            ScheduleError: It changed its input in place.
        """
        versions = _versions((x, y))
        onward = self._layer(x, y)
        losses = self._layer.loss()
        if _versions((x, y)) != versions:
            raise ScheduleError(
                "the forward changed its input in place, which the layer before still needs for its backward; "
                "use operators that do not (such as inplace=False) on what a layer receives"
            )
        # A user's own loss() may hold a graph, be numbers already, or hold nothing.
        detached = [torch.as_tensor(loss).detach() for loss in (() if losses is None else losses)]
        return Passed(onward, detached or None)

    def backward(self, packet: Packet, rows: range | None = None) -> None:  # noqa: ARG002
        """Backward of its losses."""
        self._layer.backward()

    def update(self, packet: Packet) -> None:
        """Its optimizers' step, at the learning rate of this batch."""
        self._layer.scale_lr(packet.lr_scale)
        self._layer.update()


def _versions(tree: Tree) -> list[int]:
    """How often each tensor was written to; tensors made in inference mode do not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors(tree)]
