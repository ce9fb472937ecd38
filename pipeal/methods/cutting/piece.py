"""What a cut leaves: a part of a module's forward, as a module, and the steps that cutting adds to it.

It knows of itself whether it may draw random numbers, and asks for its own mode where the forward asks for the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from pipeal.core.tree import Tree, batch_size
from pipeal.methods.cutting.draws import draws_nothing, may_draw_between


class Piece(fx.GraphModule):
    """A part of a module's forward, holding the submodules that it calls under their own names.

    Attributes:
        hands_on: What each item of the tuple is that it hands on; empty where it hands on one value.
        mask_at: The place of the model's mask among them; None where there is none.
    """

    hands_on: tuple[str, ...] = ()
    mask_at: int | None = None

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


class Features(nn.Module):
    """Picks from the values that a piece hands on what a bridge looks at: the first, and the mask of its words.

    Args:
        mask_at: The place of the mask; None where there is none.
    """

    draws_from_default = False

    def __init__(self, mask_at: int | None = None) -> None:
        super().__init__()
        self.mask_at = mask_at

    def forward(self, values: tuple[Tree, ...]) -> Tree:
        """``values`` as the piece hands them on; features, or features and their mask."""
        return values[0] if self.mask_at is None else (values[0], values[self.mask_at].bool())


@draws_nothing
def shape_alone(tensor: Tensor) -> Tensor:
    """A number expanded to the shape of a tensor: it has its sizes, its type and its device, and takes no memory."""
    return tensor.new_zeros(()).expand(tensor.shape)


@draws_nothing
def for_each_sample(value: Any, samples: Tree) -> Any:
    """A tensor that is the same for all samples, once for each of them, without a copy; what is none stays."""
    return value.expand(batch_size(samples), *value.shape) if isinstance(value, Tensor) else value


@draws_nothing
def of_one_sample(value: Any) -> Any:
    """What :func:`for_each_sample` was given."""
    return value[0] if isinstance(value, Tensor) else value
