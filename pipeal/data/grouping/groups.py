"""Padded groups as plain values: checked, regrouped for another partition, taken apart into groups of one sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeal.core.errors import DataError, unknown_name
from pipeal.data.grouping import forming
from pipeal.data.grouping.annotation import Dim, Layout, Shape, length_names, shapes_of, tensors_of
from pipeal.data.grouping.forming import Indices
from pipeal.data.grouping.groupers import Lengths, Partition, checked, in_order
from pipeal.data.grouping.nesting import build, mapped
from pipeal.data.grouping.padders import Padder


@dataclass(frozen=True, eq=False)
class Groups:
    """Samples in groups.

    Attributes:
        layout: The dimensions of each tensor.
        tensors: For each group, its tensors in the order of the layout.
        partition: For each group, which samples its rows are.
        lengths: For each name, ``(N,)``: the lengths of the samples.
        is_bare: Whether no group holds padding, as those of one sample.
    """

    layout: Layout
    tensors: list[list[Tensor]]
    partition: Partition
    lengths: Lengths
    is_bare: bool = False

    @classmethod
    def of_samples(cls, layout: Layout, data: Sequence[Any]) -> Groups:
        """A group for each sample that a user gives.

        Raises:
            DataError: No samples; one that does not fit the layout, has two lengths of one name, or differs from
                the first in anything but lengths.
        """
        if not len(data):
            raise DataError("a collection of no samples; wanted at least one")
        single = mapped(lambda shape: shape.sample, layout)
        tensors = [tensors_of(single, sample, f"sample {number}") for number, sample in enumerate(data)]
        lengths = {name: np.zeros(len(data), dtype=np.int64) for name in length_names(layout)}
        for number, sample in enumerate(tensors):
            own: dict[str, int] = {}
            for tensor, first, shape in zip(sample, tensors[0], shapes_of(single), strict=True):
                forming.check_alike(tensor, f"sample {number}", first, "sample 0", shape)
                for place, name in shape.lengths:
                    if own.setdefault(name, tensor.shape[place]) != tensor.shape[place]:
                        raise DataError(
                            f"sample {number} has the length {name!r} twice, as {own[name]} and as "
                            f"{tensor.shape[place]}; give lengths that differ names that differ"
                        )
                    lengths[name][number] = own[name]
        batches = [shape.batch for shape in shapes_of(layout)]
        alone = [[tensor.unsqueeze(at) for tensor, at in zip(sample, batches, strict=True)] for sample in tensors]
        return cls(layout, alone, in_order([1] * len(data)), lengths, is_bare=True)

    @classmethod
    def checked(
        cls,
        layout: Layout,
        groups: Sequence[Any],
        length_info: Mapping[str, Sequence[Sequence[int]]],
        partition: Sequence[Sequence[int]] | None,
    ) -> Groups:
        """Groups that someone else has made.

        Raises:
            DataError: No samples, a tensor that does not fit the layout, or lengths that do not fit the groups.
        """
        tensors = [tensors_of(layout, group, f"group {number}") for number, group in enumerate(groups)]
        batch = shapes_of(layout)[0].batch
        counts = [group[0].shape[batch] for group in tensors]
        if not counts or not all(counts):
            raise DataError(f"groups of {counts} samples; wanted at least one group, and at least one sample in each")
        parts = in_order(counts) if partition is None else checked(partition, sum(counts))
        if [len(part) for part in parts] != counts:
            raise DataError(
                f"the partition has groups of {[len(part) for part in parts]} samples, the tensors {counts}"
            )
        lengths = {}
        for name in length_names(layout):
            if name not in length_info:
                raise DataError(f"length_info: {unknown_name('length', name, length_info)}")
            lengths[name] = np.zeros(sum(counts), dtype=np.int64)
            for part, own in zip(parts, _whole_lists(name, length_info[name], counts), strict=True):
                lengths[name][part] = own
        made = cls(layout, tensors, parts, lengths)
        for number, group in enumerate(tensors):
            made.check(group, tensors[0], layout, number, f"group {number}")
        return made

    @property
    def count(self) -> int:
        """The number of samples."""
        return sum(map(len, self.partition))

    def sizes(self, i: int) -> dict[str, int]:
        """The padded sizes of a group, by the names of the lengths."""
        shapes = shapes_of(self.layout)
        pairs = zip(self.tensors[i], shapes, strict=True)
        return {name: tensor.shape[place] for tensor, shape in pairs for place, name in shape.lengths}

    def own_lengths(self, i: int) -> dict[str, Indices]:
        """The lengths of the samples of a group, ``(B,)`` each, by name."""
        return {name: lengths[self.partition[i]] for name, lengths in self.lengths.items()}

    def check(self, tensors: Sequence[Tensor], first: Sequence[Tensor], layout: Layout, i: int, who: str) -> None:
        """Makes sure that tensors have the rows and the padded sizes of a group, and the type of the first group's.

        Raises:
            DataError: They have not, or a sample is longer than its group.
        """
        sizes, rows = self.sizes(i), len(self.partition[i])
        for tensor, other, shape in zip(tensors, first, shapes_of(layout), strict=True):
            wanted = {shape.batch: rows} | {place: sizes[name] for place, name in shape.lengths}
            if any(tensor.shape[place] != size for place, size in wanted.items()):
                raise DataError(
                    f"{who} has the shape {tuple(tensor.shape)} for {shape}, in a group of {rows} samples padded to "
                    f"{sizes}; the two must agree"
                )
            forming.check_alike(tensor, who, other, "group 0", shape)
        for name, own in self.own_lengths(i).items():
            if own.max() > sizes[name]:
                raise DataError(f"{who} has {sizes[name]} positions of {name!r}, but a sample of {own.max()}")

    def mask(self, i: int, hint: str | Sequence[str]) -> Any:
        """See :meth:`DataCollection.get_mask <pipeal.data.grouping.DataCollection.get_mask>`."""
        own, group = self.own_lengths(i), self.tensors[i]
        if hint == "copy":
            pairs = zip(group, shapes_of(self.layout), strict=True)
            return build(self.layout, (_mask(shape, tensor.shape, own, tensor.device) for tensor, shape in pairs))
        names, sizes = [hint] if isinstance(hint, str) else list(hint), self.sizes(i)
        for name in names:
            if name not in sizes:
                raise DataError(unknown_name("length", name, sizes))
        shape = Shape((Dim("batch"), *(Dim("length", name) for name in names)))
        return _mask(shape, [len(self.partition[i]), *(sizes[name] for name in names)], own, group[0].device)

    def formed(self, partition: Partition, padders: Sequence[Padder], at_least: Mapping[str, int]) -> Groups:
        """Other groups of the same samples, each padded to its longest, or to ``at_least`` where that is more."""
        of_group, of_row = self._places()
        columns, made = list(zip(*self.tensors, strict=True)), []
        for part in partition:
            own = {name: lengths[part] for name, lengths in self.lengths.items()}
            sizes = {name: max(int(lengths.max()), at_least.get(name, 0)) for name, lengths in own.items()}
            places = of_group[part], of_row[part]
            made.append(
                [
                    forming.gather(groups, places, shape, sizes, own, padder, is_bare=self.is_bare)
                    for groups, shape, padder in zip(columns, shapes_of(self.layout), padders, strict=True)
                ]
            )
        return Groups(self.layout, made, partition, self.lengths)

    def renumbered(self) -> Groups:
        """The same groups, their samples numbered in their order."""
        order = [sample for part in self.partition for sample in part]
        lengths = {name: lengths[order] for name, lengths in self.lengths.items()}
        return Groups(self.layout, self.tensors, in_order([len(part) for part in self.partition]), lengths)

    def apart(self) -> Groups:
        """A group for each sample, in order, without padding."""
        of_group, of_row = self._places()
        shapes, alone = shapes_of(self.layout), []
        for sample, (number, row) in enumerate(zip(of_group.tolist(), of_row.tolist(), strict=True)):
            own = {name: int(lengths[sample]) for name, lengths in self.lengths.items()}
            pairs = zip(self.tensors[number], shapes, strict=True)
            alone.append([forming.cut(tensor, shape, row, own) for tensor, shape in pairs])
        return Groups(self.layout, alone, in_order([1] * self.count), self.lengths, is_bare=True)

    def _places(self) -> tuple[Indices, Indices]:
        """In which group each sample is, and in which row of it."""
        of_group, of_row = np.zeros(self.count, dtype=np.int64), np.zeros(self.count, dtype=np.int64)
        for number, part in enumerate(self.partition):
            of_group[part], of_row[part] = number, np.arange(len(part))
        return of_group, of_row


def _mask(shape: Shape, size: Sequence[int], lengths: Lengths, device: torch.device) -> Tensor:
    mask = forming.inside(shape, size, lengths, device)
    return torch.ones(*size, dtype=torch.bool, device=device) if mask is None else mask.expand(*size)


def _whole_lists(name: str, lists: Sequence[Sequence[int]], counts: Sequence[int]) -> list[Indices]:
    """Lengths as arrays, one for each group and as long as it."""
    found = [np.asarray(lengths) for lengths in lists]
    if [lengths.shape for lengths in found] != [(count,) for count in counts]:
        raise DataError(
            f"length_info[{name!r}] is {lists!r}; wanted as many lengths as the groups have samples: {counts}"
        )
    for lengths in found:
        if lengths.size and (not np.issubdtype(lengths.dtype, np.integer) or lengths.min() < 0):
            raise DataError(f"length_info[{name!r}] holds {lengths.tolist()}; wanted whole numbers, not negative")
    return found
