"""Virtual layers: each action takes a given time and touches no tensor.

They run through the real executors, so that what is measured with them is the schedule and the engine's own cost
and nothing else: any number of them overlap on any machine, as layers on devices of their own would.
"""

from __future__ import annotations

from time import sleep

from torch import Tensor, nn

from pipeal.core.protocols import Path
from pipeal.core.tree import Tree


class VirtualLayer(nn.Module):
    """A layer on a device that exists only as time.

    Args:
        forward_s: The seconds of a forward.
        backward_s: The seconds of a backward.
        update_s: The seconds of an update.
    """

    draws_from_default = False

    def __init__(self, forward_s: float, backward_s: float, update_s: float = 0.0) -> None:
        super().__init__()
        self.seconds = {"F": forward_s, "B": backward_s, "U": update_s}

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Takes ``forward_s``; returns what it got."""
        self._take("F")
        return x, y

    def backward(self) -> None:
        """Takes ``backward_s``."""
        self._take("B")

    def update(self) -> None:
        """Takes ``update_s``."""
        self._take("U")

    def loss(self) -> tuple[Tensor, ...] | None:
        """None: there is no tensor."""
        return None

    def scale_lr(self, factor: float) -> None:
        """Does nothing: there is no optimizer."""

    def inference(self, x: Tree, path: Path) -> Tree:  # noqa: ARG002
        """Returns ``x``."""
        return x

    def _take(self, action: str) -> None:
        """Sleeps, whole, from now: a thread that wakes late is late, as it would be for a device's work."""
        seconds = self.seconds[action]
        if seconds:
            sleep(seconds)
