"""One rank's share of a stream that all ranks compute alike: equal numbers of items without any communication."""

from __future__ import annotations

from itertools import islice
from typing import TypeVar

from pipeal.data.checks import one_of
from pipeal.data.iterators.base import CheckpointableIterator, Stage
from pipeal.data.iterators.checks import check_instance
from pipeal.data.iterators.sources import Uneven

__all__ = ["ShardIterator"]

T = TypeVar("T")


class ShardIterator(Stage[T]):
    """Items ``instance_rank``, ``instance_rank + num_instances``, ... of the source.

    Sharing out the input leaves every rank with a number of batches of its own, and data-parallel training hangs
    where one rank has none left. Here each rank cuts all batches, from lengths say, and takes its share; costly
    work on the batches belongs behind this iterator.

    Args:
        source_iterator: The same stream on every rank.
        num_instances: How many ranks there are.
        instance_rank: Which one this is.
        uneven: What to do when the stream ends within a round. ``"drop"``: leave the round out. ``"repeat"``: the
            ranks that would go empty repeat items of this round. ``"keep"``: they end one item earlier.

    >>> from pipeal.data.iterators import NativeCheckpointableIterator
    >>> [list(ShardIterator(NativeCheckpointableIterator(range(5)), 2, rank, "repeat")) for rank in (0, 1)]
    [[0, 2, 4], [1, 3, 4]]
    """

    setup = ("num_instances", "instance_rank", "uneven")

    def __init__(
        self,
        source_iterator: CheckpointableIterator[T],
        num_instances: int,
        instance_rank: int,
        uneven: Uneven = "drop",
    ) -> None:
        super().__init__(source_iterator)
        self._num_instances, self._instance_rank = check_instance(num_instances, instance_rank)
        self._uneven = one_of("uneven", uneven, Uneven)
        self._finish()

    def _next(self) -> T:
        items = list(islice(self._sources[0], self._num_instances))
        if not items:
            raise StopIteration
        lacking = len(items) < self._num_instances
        if lacking and (self._uneven == "drop" or (self._uneven == "keep" and self._instance_rank >= len(items))):
            raise StopIteration
        return items[self._instance_rank % len(items)]
