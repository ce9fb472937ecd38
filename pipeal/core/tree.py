"""Functions on trees: nestings of tensors, as inputs, targets and outputs of layers are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

# Private by name, but what torch's own pipelining, export and functorch share, and what users register
# their own containers with.
from torch.utils import _pytree as pytree

from pipeal.core.errors import a_type

T = TypeVar("T")


Tree: TypeAlias = Any
"""A tensor, or any nesting of tuples, lists, dicts and dataclasses of tensors and of plain values."""

Shapes: TypeAlias = list[tuple[torch.Size, torch.dtype]]


def map_tensors(function: Callable[[Tensor], Tensor], tree: T) -> T:
    """Applies ``function`` to every tensor of a tree and keeps its shape and other values.

    >>> map_tensors(lambda t: t + 1, (torch.tensor(1), {"n": 2}))
    (tensor(2), {'n': 2})
    """
    # The plain cases without pytree, which takes many times as long: this is called several times per batch.
    if isinstance(tree, Tensor):
        return function(tree)  # type: ignore[return-value]
    if type(tree) is tuple:
        return tuple(map_tensors(function, part) for part in tree)  # type: ignore[attr-defined, return-value]
    if tree is None:
        return tree
    return pytree.tree_map(partial(_map_leaf, function), tree)


def version(tensor: Tensor) -> int:
    """How often it was written to; 0 of one made in inference mode, which does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def tensors(tree: Tree) -> list[Tensor]:
    """All tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is tuple:
        return [tensor for part in tree for tensor in tensors(part)]
    if tree is None:
        return []
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif _is_record(leaf):
            found += [tensor for field in dataclasses.fields(leaf) for tensor in tensors(getattr(leaf, field.name))]
        else:
            _refuse_unknown(leaf)
    return found


def versions(tree: Tree) -> list[int]:
    """How often each tensor of a tree was written to."""
    return [version(tensor) for tensor in tensors(tree)]


def detach(tree: T) -> T:
    """The same tree, cut from every graph; of a weight, or a view of one, it has a copy, which no update changes."""
    return map_tensors(_detach, tree)


def copied(tensor: Tensor) -> Tensor:
    """A copy, in which what is expanded lies once, as before."""
    return carried(tensor, Tensor.clone)


def carried(tensor: Tensor, carry: Callable[[Tensor], Tensor]) -> Tensor:
    """What arrives of a tensor, which repeats itself there as it does here: ``carry`` is given one of each."""
    once = one_of_each(tensor)
    arrived = carry(once)
    return arrived if once is tensor else arrived.expand(tensor.shape)


def one_of_each(tensor: Tensor) -> Tensor:
    """What lies in memory of a tensor that repeats itself along some dimensions: one of each."""
    for dim, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if tensor.shape[dim] > 1 and not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def detach_alone(tensor: Tensor) -> Tensor:
    """A tensor of no graph, in a storage that holds no more than it: to be kept.

    What PyTorch gives as a mean squared error lies in the storage of all the errors that it is the mean of.
    """
    own = tensor.detach()
    return own if own.untyped_storage().nbytes() <= own.nbytes else own.clone()


def move(tree: T, device: torch.device) -> T:
    """The same tree with every tensor on ``device``.

    Does not wait for copies onto a GPU. It does for those onto the CPU, which would read them before they are there.
    """
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"), tree)


def batch_size(tree: Tree) -> int:
    """The length of the first dimension of the first tensor; 0 without one (a virtual packet)."""
    found = tensors(tree)
    return found[0].shape[0] if found and found[0].dim() else 0


def shapes_of(tree: Tree) -> Shapes:
    """The shapes and types in a tree."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors(tree)]


def describe(shapes: Shapes) -> str:
    """Shapes and types in words, for messages.

    >>> describe(shapes_of((torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))))
    '(2, 3) float32, (2,) int64'
    """
    return ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in shapes) or "no tensor"


def _detach(tensor: Tensor) -> Tensor:
    whole = tensor if tensor._base is None else tensor._base
    return copied(tensor.detach()) if whole.requires_grad and whole.is_leaf else tensor.detach()


def _map_leaf(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if _is_record(leaf):
        fields = dataclasses.fields(leaf)
        parts = {field.name: map_tensors(function, getattr(leaf, field.name)) for field in fields}
        record = dataclasses.replace(leaf, **{field.name: parts.pop(field.name) for field in fields if field.init})
        for name, part in parts.items():  # of those that its __init__ does not take
            object.__setattr__(record, name, part)
        return record
    _refuse_unknown(leaf)
    return leaf


def _is_record(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _refuse_unknown(leaf: Any) -> None:
    """Refuses a container that pytree cannot look into: its tensors would be carried along undetached."""
    if isinstance(leaf, Mapping | list | tuple | set):
        raise TypeError(
            f"a packet holds {a_type(leaf)}, which may hold tensors but cannot be looked into; use tuples, "
            "lists, dicts or dataclasses, or register it with torch.utils._pytree.register_pytree_node"
        )
