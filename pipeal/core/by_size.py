"""Batches whose samples differ in size, as texts padded to lengths do: some are looked at, for a mean over all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from pipeal.core.tree import Tree, batch_size, tensors

T = TypeVar("T")

LOOKED_AT = 8
"""Of the sizes that occur, evenly spread."""


class BySize(Generic[T]):
    """Batches by how large a sample in them is, padding included, on which hangs what it costs.

    Of each size the first batch stands for all.
    """

    def __init__(self) -> None:
        self._batches: dict[float, T] = {}
        self._samples = Counter[float]()

    def add(self, batch: T, x: Tree) -> None:
        """Takes a batch in, with its input; one without samples has no part."""
        if samples := batch_size(x):
            size = sum(tensor.numel() for tensor in tensors(x)) / samples
            self._batches.setdefault(size, batch)
            self._samples[size] += samples

    def some(self) -> list[T]:
        """A few of the batches, from the smallest samples to the largest."""
        return [self._batches[size] for size in self._sizes()]

    def mean(self, each: Sequence[float]) -> float:
        """The mean over all samples of what is known of those of each of :meth:`some`; between two sizes it is taken
        to grow evenly.

        >>> import torch
        >>> batches = BySize[None]()
        >>> for samples, length in ((1, 10), (3, 20)):
        ...     batches.add(None, torch.zeros(samples, length))
        >>> batches.mean([100.0, 200.0])
        175.0
        """
        found = np.interp(list(self._samples), self._sizes(), each)
        return float(np.average(found, weights=list(self._samples.values())))

    def _sizes(self) -> Sequence[float]:
        return even_sample(sorted(self._batches), LOOKED_AT)


def even_sample(items: Sequence[T], most: int) -> Sequence[T]:
    """At most so many of some things, evenly over all of them: the first, the last, and those between.

    >>> even_sample(range(10), 4), even_sample("abc", 4)
    ([0, 3, 6, 9], 'abc')
    """
    steps = most - 1
    return items if len(items) <= most else [items[step * (len(items) - 1) // steps] for step in range(most)]
