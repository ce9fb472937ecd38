"""One tensor as a row of elements on a wire, and back with the strides it had."""

from __future__ import annotations

from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipeal.core.errors import DataError
from pipeal.core.tree import one_of_each
from pipeal.core.tree_codec import dtype_named

Layout: TypeAlias = list[Any]
"""``[dtype, shape, strides, length]``, of what JSON can hold. ``strides`` is None where they follow from the shape;
``length`` is how many elements travel."""


def flat(tensor: Tensor) -> tuple[Layout, Tensor]:
    """The layout of a tensor, and what of it travels: one row, on its device, mostly without a copy.

    Raises:
        DataError: It is sparse, or of another kind that has no strides.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise DataError(
            f"a packet holds a {str(tensor.layout).removeprefix('torch.')} tensor, which cannot be sent to another "
            "process; make it dense (to_dense) before the layer hands it on"
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    strides = list(tensor.stride())
    if not tensor.numel():
        return [dtype, shape, None, 0], tensor.new_empty(0)  # reshape would leave strides that no bytes can be seen of
    if strides == _usual(shape):
        return [dtype, shape, None, tensor.numel()], tensor.reshape(-1)
    reach = _reach(shape, strides)
    if reach > 2 * tensor.numel():  # a few columns of something large: its gaps need not travel
        row = one_of_each(tensor).reshape(-1).contiguous()
    else:  # its memory as it lies there
        row = tensor.as_strided((reach,), (1,))
    return [dtype, shape, strides, row.numel()], row


def check_layout(layout: Layout, size: int) -> None:
    """Refuses what is no layout of a tensor of so many bytes, on another process's word.

    Raises:
        DataError: It is none.
    """
    try:
        dtype, shape, strides, length = layout
        counts = [*shape, *(strides or ()), length]
        fits = all(isinstance(count, int) and count >= 0 for count in counts)
        fits = fits and length * dtype_named(dtype).itemsize == size
        if fits and strides is None:
            fits = prod(shape) == length
        elif fits:
            once = prod(1 if stride == 0 else count for count, stride in zip(shape, strides, strict=True))
            fits = length in (_reach(shape, strides), once)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise DataError(f"a message holds {size} bytes as a tensor {layout!r:.80}; expected the layout of as many")


def row_for(layout: Layout, *, device: str | torch.device = "cpu", pinned: bool = False) -> Tensor:
    """Memory for what travels of a tensor."""
    return torch.empty(layout[3], dtype=getattr(torch, layout[0]), device=device, pin_memory=pinned)


def unflat(layout: Layout, row: Tensor) -> Tensor:
    """The tensor that :func:`flat` was given; shares memory with ``row`` where that can be."""
    _, shape, strides, length = layout
    if strides is None:
        return row.view(shape)
    reach = _reach(shape, strides)
    if length == reach:
        return row.as_strided(shape, strides)
    arrived = torch.empty(reach, dtype=row.dtype, device=row.device).as_strided(shape, strides)
    once = one_of_each(arrived)
    once.copy_(row.view(once.shape))
    return arrived


def _usual(shape: list[int]) -> list[int]:
    """The strides of a new tensor; not all that ``is_contiguous``: those of dimensions of size 1 may differ."""
    return [prod(max(1, size) for size in shape[place + 1 :]) for place in range(len(shape))]


def _reach(shape: list[int], strides: list[int]) -> int:
    """How many elements lie from the first to the last of a tensor that is not empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
