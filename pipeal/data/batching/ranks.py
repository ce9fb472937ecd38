"""The same number of steps for every rank: decided by the list of batches alone, without communication.

Two ways: every rank takes batches of its own (:func:`even_batches`; the steps are fewer, and one step learns from more
samples the more ranks there are), or its part of every batch (:class:`Share`; steps and samples are those of one rank).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, pairwise
from typing import Literal, TypeAlias

import numpy as np

from pipeal.core.errors import ConfigError

__all__ = ["WHOLE", "EvenBatches", "Share", "even_batches", "steps_of"]

Uneven: TypeAlias = Literal["split", "repeat", "drop"]
"""What becomes of a number of batches that the ranks do not divide.

``split`` halves the batches of most samples until they do: each sample still goes to exactly one rank. Only where every
batch is down to one sample, the first batches are repeated. ``repeat`` gives the first batches again at the end;
``drop`` leaves the last ones out.
"""


@dataclass(frozen=True)
class Share:
    """A rank's part of every batch.

    Averaged over the ranks by their samples, the gradients of means are those of the whole batch. So the number of
    ranks changes neither how many steps an epoch has nor what a step learns from: a training may go on with another.

    Attributes:
        rank: From 0.
        size: The number of ranks.

    >>> [Share(rank, 2).of([7, 4, 2]) for rank in range(2)]
    [[7, 2], [4]]
    >>> [Share(rank, 3).of([7, 4]) for rank in range(3)]
    [[7, 4], [7, 4], [7, 4]]
    """

    rank: int = 0
    size: int = 1

    def of(self, batch: list[int]) -> list[int]:
        """Its samples: every ``size``-th, so that all parts of a batch sorted by length are alike.

        Of a batch with fewer samples than ranks every rank takes all, which gives the same average; but not among
        several batches to one update, where it weighs as many times its samples as there are ranks.
        """
        return batch if len(batch) < self.size else batch[self.rank :: self.size]


WHOLE = Share()
"""The share of a single rank: every batch whole."""


@dataclass(frozen=True)
class EvenBatches:
    """Batches whose number the ranks divide; rank ``r`` of ``W`` takes ``batches[r::W]``.

    Attributes:
        batches: The batches.
        repeated: The samples that come twice, in the order of their second coming.
        left_out: The samples that come not at all.
    """

    batches: list[list[int]]
    repeated: list[int]
    left_out: list[int]


def even_batches(batches: Sequence[list[int]], world_size: int, uneven: Uneven = "split") -> EvenBatches:
    """Splits, repeats or drops batches until ``world_size`` divides their number.

    >>> even_batches([[0, 1, 2, 3], [4], [5, 6]], world_size=2).batches
    [[0, 1], [2, 3], [4], [5, 6]]
    >>> even_batches([[0, 1, 2, 3], [4], [5, 6]], world_size=2, uneven="repeat").repeated
    [0, 1, 2, 3]
    """
    found = list(batches)
    missing = -len(found) % world_size
    if not missing or not found:
        return EvenBatches(found, [], [])
    if uneven == "drop":
        kept = len(found) // world_size * world_size
        return EvenBatches(found[:kept], [], list(chain.from_iterable(found[kept:])))
    if uneven == "split":
        found = _split(found, missing)
        missing = -len(found) % world_size
    again = [list(batch) for batch in islice(cycle(found), missing)]
    return EvenBatches(found + again, list(chain.from_iterable(again)), [])


def steps_of(batches: int, world_size: int, uneven: Uneven = "split") -> int:
    """How many steps each rank has of so many batches.

    >>> steps_of(7, 2), steps_of(7, 2, "drop")
    (4, 3)
    """
    return batches // world_size if uneven == "drop" else -(-batches // world_size)


def check_ranks(rank: int, world_size: int, uneven: str) -> None:
    """Refuses what cannot be a rank.

    Raises:
        ConfigError: ``world_size`` below 1, ``rank`` not below it, or an unknown way to even out.
    """
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise ConfigError(f"{name} is {value!r}; wanted a whole number")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of world_size {world_size}; wanted 0 <= rank < world_size")
    if uneven not in ("split", "repeat", "drop"):
        raise ConfigError(f"uneven is {uneven!r}; wanted 'split', 'repeat' or 'drop'")


def _split(batches: list[list[int]], missing: int) -> list[list[int]]:
    """Up to ``missing`` more batches, by halving the one of most samples each time; the order is kept."""
    # (-samples, place of the batch, place within it): of equal ones the first is taken, on every rank the same.
    heap = [(-len(batch), place, 0) for place, batch in enumerate(batches)]
    heapq.heapify(heap)
    cuts: dict[int, list[int]] = {}
    for _ in range(missing):
        size, place, start = heap[0]
        if size > -2:
            break
        half = -(size // 2)
        heapq.heapreplace(heap, (-half, place, start))
        heapq.heappush(heap, (size + half, place, start + half))
        cuts.setdefault(place, []).append(start + half)
    parts: list[list[int]] = []
    for place, batch in enumerate(batches):
        edges = [0, *sorted(cuts.get(place, [])), len(batch)]
        parts.extend(batch[begin:end] for begin, end in pairwise(edges))
    return parts
