"""Single samples of a batch, checked against their annotation, and the first groups made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pipeal.core.errors import DataError
from pipeal.data.grouping import forming
from pipeal.data.grouping.annotation import Layout, Shape, length_names, shapes_of, tensors_of
from pipeal.data.grouping.groupers import Lengths, Partition
from pipeal.data.grouping.groups import Groups, padded_sizes
from pipeal.data.grouping.nesting import mapped
from pipeal.data.grouping.padders import Padder


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples, each with tensors of its own.

    Attributes:
        layout: The dimensions of each tensor, with the batch where a group shall have it.
        tensors: For each sample, its tensors in the order of the layout.
        lengths: For each name, ``(N,)``: the lengths of the samples.
    """

    layout: Layout
    tensors: list[list[Tensor]]
    lengths: Lengths

    @classmethod
    def checked(cls, layout: Layout, data: Sequence[Any]) -> Samples:
        """Samples as a user gives them.

        Raises:
            DataError: No samples; one that does not fit the layout, has two lengths of one name, or differs from
                the first in anything but lengths.
        """
        if not len(data):
            raise DataError("a collection of no samples; wanted at least one")
        single = mapped(lambda shape: shape.sample, layout)
        tensors = [tensors_of(single, sample, f"sample {number}") for number, sample in enumerate(data)]
        shapes = shapes_of(single)
        for number, sample in enumerate(tensors):
            for tensor, first, shape in zip(sample, tensors[0], shapes, strict=True):
                forming.check_alike(tensor, f"sample {number}", first, "sample 0", shape)
        found = [_lengths(sample, shapes, number) for number, sample in enumerate(tensors)]
        names = length_names(layout)
        return cls(layout, tensors, {name: np.array([own[name] for own in found], dtype=np.int64) for name in names})

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.tensors)

    def formed(self, partition: Partition, padders: Sequence[Padder], at_least: Mapping[str, int]) -> Groups:
        """Groups of the samples, each padded to its longest, or to ``at_least`` where that is more."""
        shapes, made = shapes_of(self.layout), []
        for part in partition:
            sizes = padded_sizes({name: lengths[part] for name, lengths in self.lengths.items()}, at_least)
            made.append(
                [
                    forming.stack([self.tensors[sample][leaf] for sample in part], shape, sizes, padder)
                    for leaf, (shape, padder) in enumerate(zip(shapes, padders, strict=True))
                ]
            )
        return Groups(self.layout, made, partition, self.lengths)


def _lengths(sample: Sequence[Tensor], shapes: Sequence[Shape], number: int) -> dict[str, int]:
    own: dict[str, int] = {}
    for tensor, shape in zip(sample, shapes, strict=True):
        for place, name in shape.lengths:
            if own.setdefault(name, tensor.shape[place]) != tensor.shape[place]:
                raise DataError(
                    f"sample {number} has the length {name!r} twice, as {own[name]} and as {tensor.shape[place]}; "
                    "give lengths that differ names that differ"
                )
    return own
