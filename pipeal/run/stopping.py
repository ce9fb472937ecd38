"""The first Ctrl-C, or SIGTERM, asks a run to end at a good place; the second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, ClassVar

from pipeal.core.errors import Interrupted
from pipeal.data import Batch, EpochBatches
from pipeal.data.loading.workers import worker_failure
from pipeal.training.trainer import Leave

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Listens to both signals within its ``with`` block, until the first; then they do again what they did before.

    Used from the main thread; in any other it hears nothing. Nor does it hear a signal that is ignored (SIGINT is in
    what a script starts in the background), or one for which code in another language has a handler of its own, which
    could not be given back.

    Args:
        heard: Called with the first signal, in its handler.

    Attributes:
        signal: The signal that came first; None while none has come.
        any_heard: Whether any of them has heard one, in this process.
    """

    any_heard: ClassVar[bool] = False

    def __init__(self, heard: Callable[[int], None] | None = None) -> None:
        self._on_first = heard
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def code(self) -> int | None:
        """The exit code of a process that ends by the signal; None while none has come."""
        return None if self.signal is None else 128 + self.signal

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before is not None and before != signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._heard)
            if self.signal is not None:  # it came before there was a handler for both
                self._give_back()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _heard(self, number: int, _: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        StopRequest.any_heard = True
        if self._on_first is not None:
            self._on_first(number)
        self._give_back()

    def _give_back(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


class Stoppable:
    """Batches that are wanted no longer than the run goes on: what signals a whole machine may end their workers first.

    Args:
        batches: What is trained on.
        stop: Asked when a batch cannot be had.
        at_once: Whether none comes after the request; else it is up to who trains on them.
    """

    def __init__(self, batches: EpochBatches, stop: StopRequest, *, at_once: bool = False) -> None:
        self._batches = batches
        self._stop = stop
        self._at_once = at_once

    def __iter__(self) -> Iterator[Batch]:
        """The batches; raises :class:`Leave` where they fail after the request."""
        try:
            yield from Unless(self._stop, self._batches) if self._at_once else self._batches
        except Exception as error:
            if self._stop.signal is None:
                raise
            raise Leave from error

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Chooses the epoch, and the batch that iterators begin with."""
        self._batches.set_epoch(epoch, first)

    def close(self) -> None:
        """Ends what prepares the batches."""
        self._batches.close()


@dataclass(frozen=True)
class Unless:
    """Batches to predict, or other steps; where the run is to end, :class:`Leave` is raised before the next one."""

    stop: StopRequest
    batches: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self.stop.signal is not None:
                raise Leave
            yield batch


@contextmanager
def worker_failures(stop: StopRequest, way_back: str) -> Iterator[None]:
    """Names the failure of a worker process, in the errors that PyTorch and Python have for it.

    Args:
        stop: Whether the end was asked for.
        way_back: What goes on with the run then, in words.

    Raises:
        WorkerError: There was one.
        Interrupted: There was one after the request: the end that was asked for.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        failure, code = worker_failure(error), stop.code()
        if failure is None:
            raise
        if code is not None:
            raise Interrupted(f"interrupted; {way_back} goes on from the last checkpoint", code) from error
        raise failure from error
