"""What a cut leaves: a part of a module's forward, as a module.

It knows of itself whether it may draw random numbers, and asks for its own mode where the forward asks for the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from pipeal.al.draws import may_draw_between


class Piece(fx.GraphModule):
    """A part of a module's forward, holding the submodules that it calls under their own names."""

    def __init__(self, root: nn.Module | Mapping[str, Any], graph: fx.Graph, class_name: str = "Piece") -> None:
        super().__init__(root, graph, class_name)  # type: ignore[arg-type]
        # fx makes a class for each instance; so what that class says of random numbers is said of this graph.
        type(self).draws_from_default = any(map(may_draw_between, graph.nodes))  # type: ignore[attr-defined]

    def _deepcopy_init(self) -> Any:
        """What fx calls on the copy in the place of ``__init__``."""
        return Piece.__init__


class TrainingFlag(nn.Module):
    """Whether the part it belongs to is in training mode."""

    draws_from_default = False

    def forward(self) -> bool:
        """Its own flag, which ``train()`` and ``eval()`` set as for any module."""
        return self.training
