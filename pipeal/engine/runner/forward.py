"""One layer's forward: what it gives, and that it leaves its input as it was."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeal.core.errors import ScheduleError
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


def go_forward(layer: TrainableLayer, x: Tree, y: Tree) -> Passed:
    """Calls a layer.

    Raises:
        ScheduleError: It changed its input in place.
    """
    versions = _versions((x, y))
    onward = layer(x, y)
    losses = layer.loss()
    if _versions((x, y)) != versions:
        raise ScheduleError(
            "the forward changed its input in place, which the layer before still needs for its backward; "
            "use operators that do not (such as inplace=False) on what a layer receives"
        )
    # A user's own loss() may hold a graph, be numbers already, or hold nothing.
    detached = [torch.as_tensor(loss).detach() for loss in (() if losses is None else losses)]
    return Passed(onward, detached or None)


def _versions(tree: Tree) -> list[int]:
    """How often each tensor was written to; tensors made in inference mode do not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors(tree)]
