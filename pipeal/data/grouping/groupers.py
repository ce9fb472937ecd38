"""Which samples of a batch go together: a partition, decided from their lengths or given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pipeal.core.errors import ConfigError, DataError, unknown_name

__all__ = ["Grouper", "LengthThresholdGrouper", "PredefinedConsecutiveGrouper", "PredefinedGrouper", "UniGrouper"]

Lengths: TypeAlias = Mapping[str, npt.NDArray[np.int64]]
"""For each name of a length, ``(N,)``: that of every sample."""

Partition: TypeAlias = list[list[int]]
"""The indices of the samples in each group."""


class Grouper(ABC):
    """Decides which samples form a group."""

    @abstractmethod
    def partition(self, lengths: Lengths, count: int) -> Partition:
        """Cuts a batch into groups.

        Args:
            lengths: The lengths of the samples, by name.
            count: How many samples there are.

        Returns:
            Each of ``0..count-1`` in one group. Groups without samples are left out by the collection.
        """


class UniGrouper(Grouper):
    """All samples in one group: the usual padded batch."""

    def partition(self, lengths: Lengths, count: int) -> Partition:  # noqa: ARG002
        """One group, in the order of the samples."""
        return [list(range(count))]


class LengthThresholdGrouper(Grouper):
    """Samples whose lengths lie between the same two thresholds.

    A sample belongs to the first threshold that is no smaller than its length, which is what
    :func:`pipeal.data.batching.bounds.find_thresholds` counts with; longer ones form a last group. So K thresholds make
    at most K + 1 groups; those without samples are left out.

    >>> LengthThresholdGrouper("word", [1, 4]).partition({"word": np.array([64, 1, 4, 2, 1])}, 5)
    [[1, 4], [2, 3], [0]]

    Args:
        ldim_label: The name of the length, as in ``L_name``.
        thresholds: Whole numbers of at least 1, increasing.
        above: What to do with samples longer than the last threshold: ``group`` them, or ``raise``.

    Raises:
        ConfigError: No thresholds, or such that are not whole, not increasing or below 1.
    """

    def __init__(
        self, ldim_label: str, thresholds: Sequence[int], *, above: Literal["group", "raise"] = "group"
    ) -> None:
        self.ldim_label = ldim_label
        self.thresholds = whole("thresholds", thresholds, 1)
        self.above = above
        if not self.thresholds:
            raise ConfigError("no thresholds; wanted at least one (UniGrouper makes a single group)")
        for low, high in zip(self.thresholds, self.thresholds[1:]):  # noqa: B905  neighbours
            if low >= high:
                raise ConfigError(
                    f"thresholds {self.thresholds}: {low} before {high}; wanted each larger than the last"
                )
        if above not in ("group", "raise"):
            raise ConfigError(unknown_name("value of above", above, ["group", "raise"]))

    def partition(self, lengths: Lengths, count: int) -> Partition:  # noqa: ARG002
        """The groups from short to long, each in the order of the samples.

        Raises:
            DataError: The data has no such length; or, if asked for, a sample is longer than all thresholds.
        """
        if self.ldim_label not in lengths:
            raise DataError(unknown_name("length", self.ldim_label, lengths))
        own = lengths[self.ldim_label]
        if self.above == "raise" and (own > self.thresholds[-1]).any():
            sample = int(np.argmax(own))
            raise DataError(
                f"sample {sample} has {self.ldim_label} length {own[sample]}, above the last threshold "
                f"{self.thresholds[-1]}; add a threshold, cut the sample, or let above='group' take it"
            )
        group = np.searchsorted(self.thresholds, own, side="left")
        parts = (np.flatnonzero(group == number).tolist() for number in range(len(self.thresholds) + 1))
        return [part for part in parts if part]


class PredefinedGrouper(Grouper):
    """A partition that is known already.

    Args:
        partition: The indices of each group; together every index once.

    Raises:
        ConfigError: An index that is no whole number of at least 0.
    """

    def __init__(self, partition: Sequence[Sequence[int]]) -> None:
        self._parts = [whole("partition", part, 0) for part in partition]

    def partition(self, lengths: Lengths, count: int) -> Partition:  # noqa: ARG002
        """The groups as they were given.

        Raises:
            DataError: They are for another number of samples.
        """
        covered = sum(map(len, self._parts))
        if covered != count:
            raise DataError(f"the groups hold {covered} samples, the batch has {count}; the two must be equal")
        return [list(part) for part in self._parts]


class PredefinedConsecutiveGrouper(PredefinedGrouper):
    """Groups of so many samples each, in the order of the batch.

    >>> PredefinedConsecutiveGrouper([2, 1]).partition({}, 3)
    [[0, 1], [2]]

    Args:
        nums: The sizes of the groups.

    Raises:
        ConfigError: A size that is no whole number of at least 0.
    """

    def __init__(self, nums: Sequence[int]) -> None:
        sizes = whole("nums", nums, 0)
        ends = np.cumsum([0, *sizes]).tolist()
        super().__init__([range(end - size, end) for size, end in zip(sizes, ends[1:], strict=True)])


def checked(partition: Sequence[Sequence[int]], count: int) -> Partition:
    """A partition without its empty groups.

    Raises:
        ConfigError: No list of groups, or an index that is no whole number of at least 0.
        DataError: Not every one of ``0..count-1`` is in exactly one group.
    """
    if not isinstance(partition, Iterable):
        raise ConfigError(f"a grouper gave {partition!r}; wanted a list of groups, each a list of indices")
    parts = [part for part in (whole("a group", found, 0) for found in partition) if part]
    indices = np.array([index for part in parts for index in part], dtype=np.int64)
    if (indices >= count).any():
        raise DataError(f"a group holds sample {indices.max()}; the batch has 0..{count - 1}")
    times = np.bincount(indices, minlength=count)
    if (times != 1).any():
        wrong = int(np.flatnonzero(times != 1)[0])
        raise DataError(f"sample {wrong} is in {times[wrong]} groups; wanted every sample in exactly one")
    return parts


def whole(name: str, numbers: Iterable[Any], least: int) -> list[int]:
    """The numbers as they are, of a list, an array or a tensor.

    Raises:
        ConfigError: They are no list, or not whole, or below ``least``.
    """
    if not isinstance(numbers, Iterable):
        raise ConfigError(f"{name} is {numbers!r}; wanted a list of whole numbers")
    found = numbers.tolist() if isinstance(numbers, (np.ndarray, Tensor)) else list(numbers)
    for number in found:
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < least:
            raise ConfigError(f"{name}: {number!r} found; wanted whole numbers of at least {least}")
    return list(map(int, found))
