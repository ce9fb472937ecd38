"""Batches that a thread makes ready before they are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from pipeal.data.iterators import NativeCheckpointableIterator, PrefetchIterator
from pipeal.data.loader import Batch

_ON_GPU = 2
"""Batches ahead of a training that waits for its GPU, where nobody says how many."""


class Loader(Protocol):
    """What is read ahead: :class:`pipeal.data.BatchLoader`, :class:`pipeal.data.RandomBlocks` and their like."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the chosen epoch."""
        ...

    def __len__(self) -> int:
        """How many they are."""
        ...

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Chooses the epoch, and the batch that iterators begin with."""
        ...

    def close(self) -> None:
        """Ends what prepares batches, if anything does."""
        ...


class ReadAhead:
    """The same batches in the same order, made (and pinned) by a thread of their own.

    The thread begins with the first batch of an epoch and ends with its last, with the next iterator and with
    :meth:`close`. What fails in it is raised in its turn, as its own type.

    Args:
        loader: Makes them; from now on nobody else iterates over it.
        batches: How many are ready at most; 0 makes each where it is wanted, without a thread. None: two where there
            is a GPU, whose copies and kernels the thread's work hides behind; none on a CPU, which has its cores full.
    """

    def __init__(self, loader: Loader, batches: int | None) -> None:
        self.loader = loader
        self.batches = (_ON_GPU if torch.cuda.is_available() else 0) if batches is None else batches
        self._under_way: PrefetchIterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        if not self.batches:
            return iter(self.loader)
        self._end()
        self._under_way = PrefetchIterator(NativeCheckpointableIterator(self.loader), self.batches)
        return self._under_way

    def __len__(self) -> int:
        """How many batches the chosen epoch has."""
        return len(self.loader)

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Chooses the epoch, and the batch that iterators begin with; ends the iterator that is under way."""
        self._end()
        self.loader.set_epoch(epoch, first)

    def close(self) -> None:
        """Ends the thread."""
        self._end()
        self.loader.close()

    def _end(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.close()
