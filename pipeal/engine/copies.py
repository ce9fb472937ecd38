"""Copies that lie in memory as their originals do, so that what reads them finds the strides it found before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from pipeal.packet import map_tensors

T = TypeVar("T")


def copied(tree: T) -> T:
    """A packet whose tensors are copies of those of another."""
    return map_tensors(copy_of, tree)


@torch.no_grad()
def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the strides of the original, which takes no more memory; of one that :func:`overlaps`, without."""
    if overlaps(tensor):
        return tensor.clone()
    once = one_of_each(tensor)
    copy = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype, device=tensor.device).copy_(once)
    return copy if once is tensor else copy.expand(tensor.shape)  # a view could not be changed in place under autograd


def one_of_each(tensor: Tensor) -> Tensor:
    """What lies in memory of a tensor that repeats itself along some dimensions: one of each."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def carried(tensor: Tensor, carry: Callable[[Tensor], Tensor]) -> Tensor:
    """What arrives of a tensor, which repeats itself there as it does here: ``carry`` is given one of each."""
    if tensor.layout is not torch.strided:
        return carry(tensor)
    once = one_of_each(tensor)
    arrived = carry(once)
    return arrived if once is tensor else arrived.expand(tensor.shape)


def overlaps(tensor: Tensor) -> bool:
    """Whether two of its elements may lie in one place, other than by repeating it along whole dimensions."""
    if tensor.layout is not torch.strided:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
