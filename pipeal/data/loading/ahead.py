"""Batches that a thread makes ready before they are wanted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pipeal.data.iterators.channel import Channel
from pipeal.data.loading.loader import Batch, EpochBatches

__all__ = ["ReadAhead"]

_ON_GPU = 2
"""Batches prepared ahead by default where the training runs on a GPU."""

_PATIENCE_S = 5.0
"""How long a close waits for the batch being made; after that the thread, a daemon, ends by itself."""


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
        self._under_way: _Pass | None = None

    def __iter__(self) -> Iterator[Batch]:
        if not self._size:
            return iter(self._loader)
        self._end()
        self._under_way = _Pass(self._loader, self._size)
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
        self._end(_PATIENCE_S)
        self._loader.close()

    def _end(self, patience_s: float | None = None) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.close(patience_s)


@dataclass(frozen=True)
class _End:
    """What comes after the last batch: why there are no more, unless they are all there."""

    failure: BaseException | None


class _Pass(Iterator[Batch]):
    """One iterator over a loader's epoch. Who drops it ends the thread, which therefore does not know it."""

    def __init__(self, loader: EpochBatches, size: int) -> None:
        self._channel: Channel[Batch | _End] = Channel(size)
        self._thread = threading.Thread(target=_make, args=(loader, self._channel), name="pipeal-prefetch", daemon=True)
        self._end: _End | None = None
        weakref.finalize(self, _close, self._channel, self._thread, _PATIENCE_S)

    def __next__(self) -> Batch:
        if self._end is None:
            if self._thread.ident is None:
                self._thread.start()
            found = self._channel.get()
            if not isinstance(found, _End):
                return found
            self._end = found
        if self._end.failure is not None:
            raise self._end.failure
        raise StopIteration

    def close(self, patience_s: float | None = _PATIENCE_S) -> None:
        """Ends the thread, and waits for it, at most so long; None for no limit."""
        _close(self._channel, self._thread, patience_s)


def _make(loader: EpochBatches, channel: Channel[Batch | _End]) -> None:
    """Runs in the thread until the epoch ends, the loader fails, or the channel is closed."""
    if channel.closed:
        return
    failure = None
    try:
        for batch in loader:
            if not channel.put(batch):
                return
    except BaseException as error:  # noqa: BLE001  raised where the batches are taken
        failure = error
    channel.put(_End(failure))


def _close(channel: Channel[Batch | _End], thread: threading.Thread, patience_s: float | None) -> None:
    channel.close()
    # Garbage may be collected anywhere, on that very thread too.
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(patience_s)
