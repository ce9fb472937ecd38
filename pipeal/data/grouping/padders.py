"""What stands where a sample has ended and its group goes on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pipeal.core.errors import ConfigError, DataError, a_type
from pipeal.data.grouping.annotation import Annotation, Layout, Shape
from pipeal.data.grouping.nesting import at, leaves

__all__ = ["CDimPadder", "Padder", "ValuePadder", "ZeroPadder"]


class Padder(ABC):
    """Says what a tensor holds on padding. Subclass it for fillings of your own."""

    @abstractmethod
    def fill(self, shape: Shape, like: Tensor) -> float | Tensor:
        """What to fill with.

        Args:
            shape: The dimensions of ``like``.
            like: A group that is to be padded.

        Returns:
            A number, or a tensor that broadcasts to ``like``.
        """


class ValuePadder(Padder):
    """Pads with one number: the index of a padding token, or minus infinity before a maximum."""

    def __init__(self, value: float) -> None:
        self.value = value

    def fill(self, shape: Shape, like: Tensor) -> float | Tensor:  # noqa: ARG002
        """The number.

        Raises:
            DataError: The tensor's type has no such number.
        """
        if not _holds(like.dtype, self.value):
            raise DataError(
                f"padding with {self.value} does not fit a tensor of {like.dtype}, which has no such number; "
                "choose another number, or another type"
            )
        return self.value


class ZeroPadder(ValuePadder):
    """Pads with zeros (False in masks). What is used where nothing else is asked for."""

    def __init__(self) -> None:
        super().__init__(0)


class CDimPadder(Padder):
    """Pads with one value for all fixed dimensions together: identity matrices where rotations have ended.

    Args:
        value: Its shape is that of the fixed sizes in the annotation: ``(3, 3)`` for ``"(B, L_residue, 3, 3)"``.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def fill(self, shape: Shape, like: Tensor) -> float | Tensor:
        """The value, with a size of 1 in all other dimensions.

        Raises:
            DataError: The fixed sizes are not those of the value.
        """
        fixed = dict(shape.fixed)
        if tuple(fixed.values()) != tuple(self.value.shape):
            raise DataError(
                f"padding of shape {tuple(self.value.shape)} for {shape}, whose fixed sizes are "
                f"{tuple(fixed.values())}; the two must be equal"
            )
        value = self.value.to(like.device, like.dtype)
        return value.reshape([fixed.get(place, 1) for place in range(len(shape.dims))])


def padders_of(layout: Layout, padding: Annotation) -> list[Padder]:
    """One padder for each shape of a layout.

    Args:
        layout: The shapes.
        padding: A padder, or a dict of paddings nested as the data is; zeros where nothing is said.

    Raises:
        ConfigError: Something that is no padder.
        DataError: A name that the data does not have.
    """
    _check_names(layout, padding)
    found = []
    for keys, _ in leaves(layout):
        chosen = padding
        for key in keys:
            chosen = chosen.get(key) if isinstance(chosen, dict) else chosen
        found.append(ZeroPadder() if chosen is None else chosen)
    return found


def _holds(dtype: torch.dtype, value: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    limits = None if dtype == torch.bool else torch.iinfo(dtype)
    low, high = (limits.min, limits.max) if limits else (0, 1)
    return low <= value <= high and value == int(value)


def _check_names(layout: Layout, padding: Annotation) -> None:
    if isinstance(padding, dict):
        for key, part in padding.items():
            _check_names(at(layout, (key,), "padding"), part)
    elif padding is not None and not isinstance(padding, Padder):
        raise ConfigError(f"padding is {a_type(padding)}; wanted a Padder, or a dict of them")
