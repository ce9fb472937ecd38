"""Copies from device to device: what repeats itself in memory travels once, and repeats itself where it arrives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def carried(tensor: Tensor, carry: Callable[[Tensor], Tensor]) -> Tensor:
    """What arrives of a tensor, which repeats itself there as it does here: ``carry`` is given one of each."""
    if tensor.layout is not torch.strided:
        return carry(tensor)
    once = _one_of_each(tensor)
    arrived = carry(once)
    return arrived if once is tensor else arrived.expand(tensor.shape)


def _one_of_each(tensor: Tensor) -> Tensor:
    """What lies in memory of a tensor that repeats itself along some dimensions: one of each."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
