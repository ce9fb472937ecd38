"""Batches that a thread makes ready before they are wanted."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipeal.data.iterators.reading_thread import ReadingThread
from pipeal.data.loading.loader import Batch, EpochBatches

__all__ = ["ReadAhead"]

_ON_GPU = 2
"""Batches prepared ahead by default where the training runs on a GPU."""


class ReadAhead:
    """The same batches in the same order, made (and pinned) by a thread of their own.

    The thread begins with an iterator's first batch and ends with the last of the epoch, with the next iterator, with
    another epoch and with :meth:`close`, which any thread may call. What fails in it is raised in its turn, as it is.

    Args:
        loader: Makes them; nothing else may iterate over it from now on.
        batches: How many are ready at most; 0 makes each where it is wanted, without a thread. None: two where there
            is a GPU, whose copies and kernels the thread's work hides behind; none on a CPU, which has its cores full.
    """

    def __init__(self, loader: EpochBatches, batches: int | None) -> None:
        self._loader = loader
        self._size = (_ON_GPU if torch.cuda.is_available() else 0) if batches is None else batches
        self._under_way: ReadingThread[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        if not self._size:
            return iter(self._loader)
        self._end()
        self._under_way = ReadingThread(self._loader, self._size)
        return self._under_way

    def __len__(self) -> int:
        """How many batches the chosen epoch has."""
        return len(self._loader)

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Chooses the epoch, and the batch that iterators begin with; ends the iterator that is under way."""
        self._end()
        self._loader.set_epoch(epoch, first)

    def close(self) -> None:
        """Ends the thread, and what the loader has started. A batch that takes long is not waited for."""
        self._end(patient=False)
        self._loader.close()

    def _end(self, *, patient: bool = True) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.close(patient=patient)
