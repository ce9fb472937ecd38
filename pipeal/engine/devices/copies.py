"""Pinned memory: the only memory of the host for which a GPU's copies do not hold the host up."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, in pinned memory and without gaps: itself, or a copy."""
    if _has_gaps(tensor):
        tensor = tensor.contiguous()  # or it would be gathered into memory that is not pinned
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def to_pinned(tensor: Tensor) -> Tensor:
    """A copy on the CPU of a tensor on a GPU, made on the current stream there: in it once a later mark has passed.

    Of sparse tensors there is no such copy: for those the host waits.
    """
    source = tensor.detach()
    if source.layout is not torch.strided:
        return source.cpu()
    if _has_gaps(source):
        source = source.contiguous()  # or it would come by way of memory that is not pinned, before it has arrived
    return torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True)


def _has_gaps(tensor: Tensor) -> bool:
    """Whether its elements do not fill its memory, as those of a slice; what does is copied at once, in any order.

    >>> batch = torch.zeros(8, 3, 4, 4)
    >>> [_has_gaps(one) for one in (batch, batch.contiguous(memory_format=torch.channels_last), batch[:4], batch[:, 0])]
    [False, False, False, True]
    """
    return tensor.layout is torch.strided and torch.empty_like(tensor, device="meta").stride() != tensor.stride()
