"""Padded groups made of rows of other groups: a few operators for each of those.

Only real positions travel. Whatever a module left on the padding is replaced when a group is made, so nothing of it,
nor of its gradient, reaches another group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeal.core.errors import DataError
from pipeal.data.grouping.annotation import Shape
from pipeal.data.grouping.padders import Padder

Indices: TypeAlias = npt.NDArray[np.int64]


def inside(shape: Shape, size: Sequence[int], lengths: Mapping[str, Indices], device: torch.device) -> Tensor | None:
    """True where a position belongs to its sample: where **all** its length dimensions are inside.

    Args:
        shape: The dimensions of the tensor in question.
        size: Their sizes.
        lengths: For each name, ``(B,)``.
        device: Where the mask shall be.

    Returns:
        A bool tensor that broadcasts to ``size``; None where no position is padding.
    """
    mask: Tensor | None = None
    for place, name in shape.lengths:
        if (lengths[name] >= size[place]).all():
            continue
        position = torch.arange(size[place], device=device).view(_along(place, len(size)))
        ends = torch.from_numpy(lengths[name]).to(device).view(_along(shape.batch, len(size)))
        within = position < ends
        mask = within if mask is None else mask & within
    return mask


def check_alike(tensor: Tensor, name: str, first: Tensor, first_name: str, shape: Shape) -> None:
    """Makes sure that two samples, or groups, differ in nothing but lengths and the number of samples.

    Raises:
        DataError: They do.
    """
    free = {place for place, dim in enumerate(shape.dims) if dim.kind in ("batch", "length")}
    sizes = zip(tensor.shape, first.shape, strict=True)
    equal = all(size == other for place, (size, other) in enumerate(sizes) if place not in free)
    if not equal or tensor.dtype != first.dtype or tensor.device != first.device:
        raise DataError(
            f"{name} has {_described(tensor)} for {shape}, {first_name} has {_described(first)}; only lengths (L_…) "
            "may differ"
        )


def gather(
    groups: Sequence[Tensor],
    places: tuple[Indices, Indices],
    shape: Shape,
    sizes: Mapping[str, int],
    lengths: Mapping[str, Indices],
    padder: Padder,
    *,
    is_bare: bool,
) -> Tensor:
    """One group out of rows of others.

    Args:
        groups: The groups that are there, each of this shape.
        places: For each wanted sample, ``(B,)``: in which group it is, and in which row.
        shape: The dimensions of a group.
        sizes: The padded sizes of the new one.
        lengths: For each name, ``(B,)``: those of the wanted samples.
        padder: What stands on the padding.
        is_bare: Whether the groups that are there hold no padding.
    """
    of_group, of_row = places
    order = np.argsort(of_group, kind="stable")
    numbers, begins = np.unique(of_group[order], return_index=True)
    pieces = [
        _resized(_rows(groups[number], shape.batch, of_row[taken]), shape, sizes)
        for number, taken in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True)
    ]
    merged = _rows(torch.cat(pieces, shape.batch), shape.batch, np.argsort(order))
    mask = inside(shape, merged.shape, lengths, merged.device)
    if mask is None:
        return merged
    fill = padder.fill(shape, merged)
    if is_bare and not isinstance(fill, Tensor) and fill == 0:
        return merged  # nothing but zeros has been added
    return torch.where(mask, merged, fill) if isinstance(fill, Tensor) else merged.masked_fill(~mask, fill)


def cut(group: Tensor, shape: Shape, row: int, lengths: Mapping[str, int]) -> Tensor:
    """The group that one sample of another makes by itself, without padding; a view."""
    alone = group.narrow(shape.batch, row, 1)
    for place, name in shape.lengths:
        alone = alone.narrow(place, 0, lengths[name])
    return alone


def _resized(tensor: Tensor, shape: Shape, sizes: Mapping[str, int]) -> Tensor:
    """Cuts every length dimension to its size, or fills it up with zeros."""
    room = [0] * (2 * tensor.dim())
    for place, name in shape.lengths:
        missing = sizes[name] - tensor.shape[place]
        if missing < 0:
            tensor = tensor.narrow(place, 0, sizes[name])
        # F.pad counts dimensions from the last.
        room[2 * (tensor.dim() - place) - 1] = max(0, missing)
    return F.pad(tensor, room) if any(room) else tensor


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _rows(group: Tensor, dim: int, rows: Indices) -> Tensor:
    """Some rows of a group; itself where that is all of them, in order."""
    if len(rows) == group.shape[dim] and (rows == np.arange(len(rows))).all():
        return group
    return group.index_select(dim, torch.from_numpy(rows).to(group.device))


def _along(place: int, dims: int) -> list[int]:
    """To view a vector as lying along one of several dimensions."""
    return [-1 if number == place else 1 for number in range(dims)]
