"""What a cut leaves: a part of a module's forward, as a module, and the steps that cutting adds to it.

It knows of itself whether it may draw random numbers, and asks for its own mode where the forward asks for the model's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pipeal.core.tree import Tree, batch_size, map_tensors

_HARMLESS: list[Callable[..., Any]] = [getattr, torch._assert]

Step = TypeVar("Step", bound=Callable[..., Any])


def draws_nothing(function: Step) -> Step:
    """Says of a function that it draws no random numbers."""
    _HARMLESS.append(function)
    return function


class Piece(fx.GraphModule):
    """A part of a module's forward, holding the submodules that it calls under their own names.

    Attributes:
        hands_on: What each item of the tuple is that it hands on; empty where it hands on one value.
        mask_at: The place of the model's mask among them; None where there is none.
        unreached: The names of weights that are behind the other items alone, and so without a gradient.
    """

    hands_on: tuple[str, ...] = ()
    mask_at: int | None = None
    unreached: tuple[str, ...] = ()

    def __init__(self, root: nn.Module | Mapping[str, Any], graph: fx.Graph, class_name: str = "Piece") -> None:
        super().__init__(root, graph, class_name)  # type: ignore[arg-type]
        if isinstance(root, nn.Module):
            _keep_unsaved(root, self)
        # fx makes a class for each instance; so what that class says of random numbers is said of this graph.
        type(self).draws_from_default = any(map(may_draw_between, graph.nodes))  # type: ignore[attr-defined]

    def _deepcopy_init(self) -> Any:
        """What fx calls on the copy in the place of ``__init__``."""
        return Piece.__init__


def _keep_unsaved(root: nn.Module, piece: nn.Module) -> None:
    """Has buffers that are not persistent stay so, which fx of PyTorch 2.6 forgets where it copies them."""
    made = dict(piece.named_modules())
    for name, module in root.named_modules():
        if (copy := made.get(name)) is not None and copy is not module:
            copy._non_persistent_buffers_set |= module._non_persistent_buffers_set & copy._buffers.keys()


class TrainingFlag(nn.Module):
    """Whether the part it belongs to is in training mode."""

    def forward(self) -> bool:
        """Its own flag, which ``train()`` and ``eval()`` set as for any module."""
        return self.training


class Features(nn.Module):
    """Picks from the values that a piece hands on what a bridge looks at: the first, and the mask of its words.

    Args:
        mask_at: The place of the mask; None where there is none.
    """

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


@draws_nothing
def batch_first(value: Tree, dims: Sequence[int]) -> Tree:
    """Tensors of which the batch is in these dimensions, with the batch first, so that samples can be chosen."""
    each = iter(dims)
    return map_tensors(lambda tensor: tensor.movedim(next(each), 0), value)


@draws_nothing
def batch_back(value: Tree, dims: Sequence[int]) -> Tree:
    """What :func:`batch_first` was given, laid out as modules that ask for it (``nn.LSTM``) take it."""
    each = iter(dims)
    return map_tensors(lambda tensor: tensor.movedim(0, next(each)).contiguous(), value)


def may_draw_between(node: fx.Node) -> bool:
    """Whether a step between submodules may draw; the submodules are judged by :func:`pipeal.core.draws.may_draw`.

    PyTorch tags its operators that do. A function that is no such operator is not trusted.
    """
    target = node.target
    if node.op == "call_method":
        return not _operator_draws_not(str(target))
    if node.op != "call_function" or target in _HARMLESS:
        return False
    name = getattr(target, "__name__", "")
    if target is getattr(operator, name, None) or target is getattr(math, name, None):
        return False
    if target is getattr(torch, name, None) or target is getattr(F, name, None):
        return not _operator_draws_not(name)
    return True


def _operator_draws_not(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name.startswith("fractional"):  # the operator does not, its function in F does
        return False
    return all(torch.Tag.nondeterministic_seeded not in getattr(packet, kind).tags for kind in packet.overloads())
