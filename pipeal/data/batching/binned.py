"""Batches out of a stream whose lengths are not known beforehand: one bin for each length bound, a bounded buffer.

A sample waits in the bin of its bound until the bin holds a batch that fills the budget. All batches of a bin have one
shape, which suits compiled kernels, and the padding is little more than what rounding up to the bounds makes; good
bounds come from a sample of the lengths, by :func:`pipeal.data.batching.bounds.length_bounds`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pipeal.core.errors import ConfigError, DataError, ScheduleError, a_type
from pipeal.core.samples import Samples
from pipeal.data.batching.bins import first_of_the_rest, least_wasteful
from pipeal.data.batching.bounds import checked_bounds
from pipeal.data.batching.budget import BatchCost, fitting
from pipeal.data.batching.packing import Oversize, as_number
from pipeal.data.batching.reread import CheckpointableSource, place_of, reader_at
from pipeal.data.batching.samplers import Lengths
from pipeal.data.checks import at_least, one_of

__all__ = ["BinnedBatchIterator", "StreamBatch"]

T = TypeVar("T")
PadTo = Literal["bound", "longest"]
_VERSION = 1
_STATE = frozenset(("version", "fingerprint", "read", "waiting", "dropped", "mark", "source"))


@dataclass(frozen=True)
class StreamBatch(Generic[T]):
    """Samples that are to be padded to one length.

    Attributes:
        samples: The samples, as the source gave them.
        positions: Their numbers in the source, counted from 0.
        padded_length: What to pad them to.
    """

    samples: list[T]
    positions: list[int]
    padded_length: int

    def __len__(self) -> int:
        return len(self.samples)


class BinnedBatchIterator(Iterator[StreamBatch[T]]):
    """Collects samples of similar length from a stream into batches that fill a budget.

    When the buffer is full, or a sample has waited for too long, a batch is filled up with the next shorter samples,
    where that wastes least. At the end of the stream, what is left in the bins becomes as few batches as possible.

    States hold positions in the source, not samples: to restore one, the source is read again from a place before the
    oldest sample that was waiting, at most ``max_wait`` samples and one mark back.

    An error, of the source or of a sample, is raised again at every further step, until a state is restored.

    Args:
        source: What can be read again: an iterator with ``getstate`` and ``setstate``, a sequence, a map-style data
            set, or any other iterable that gives the same samples each time. Of an iterator that is none of these no
            state can be taken.
        bounds: ``(K,)`` whole numbers, rising.
        budget: The most that a batch may cost: padded tokens, ``n × bound``, or what ``cost`` counts.
        length: The length of a sample.
        cost: ``cost(n, longest)``, which falls with neither.
        max_samples: The most samples in a batch.
        buffer_samples: The most samples that wait at a time.
        max_wait: The most samples that are read while one waits; eight buffers by default.
        pad_to: The ``bound`` of the longest sample, for few shapes, or the ``longest`` sample itself.
        oversize: What to do with samples above the last bound: ``raise`` an error, ``drop`` them
            (:attr:`dropped`), or make each a ``single`` batch over the budget.

    Attributes:
        dropped: How many over-size samples were left out so far.

    Raises:
        DataError: Bounds that do not rise; while iterating, a length that is no whole number, or an over-size sample
            under ``raise``.
        ConfigError: An option out of range, or a budget that does not hold one sample of the last bound.

    >>> [batch.samples for batch in BinnedBatchIterator(["a", "bbbb", "cc", "d"], [2, 4], budget=4)]
    [['bbbb'], ['a', 'cc'], ['d']]
    """

    _failure: BaseException | None

    def __init__(
        self,
        source: Samples[T],
        bounds: Lengths,
        budget: float,
        *,
        length: Callable[[T], int] = len,  # type: ignore[assignment]
        cost: BatchCost | None = None,
        max_samples: int | None = None,
        buffer_samples: int = 10_000,
        max_wait: int | None = None,
        pad_to: PadTo = "bound",
        oversize: Oversize = "raise",
    ) -> None:
        self.bounds = checked_bounds(bounds)
        self.buffer_samples = at_least("buffer_samples", buffer_samples, 1)
        self.max_wait = 8 * self.buffer_samples if max_wait is None else at_least("max_wait", max_wait, 1)
        most = self.buffer_samples
        if max_samples is not None:
            most = min(most, at_least("max_samples", max_samples, 1))
        self._fits = fitting(self.bounds, budget, cost, most)
        if not self._fits.all():
            raise ConfigError(
                f"one sample of the last bound, {self.bounds[-1]}, is over the budget of {budget:g}; "
                "raise the budget or give lower bounds"
            )
        self.pad_to: PadTo = one_of("pad_to", pad_to, PadTo)
        self.oversize: Oversize = one_of("oversize", oversize, Oversize)
        self._length = length
        self._source = source
        self._can_return = isinstance(source, CheckpointableSource) or not isinstance(source, Iterator)
        self._bound_list = self.bounds.tolist()
        self._fits_list = self._fits.tolist()
        self._mark_every = max(1, self.buffer_samples // 8)
        options = f"{self._bound_list} {self._fits_list} {self.buffer_samples} {self.max_wait} {pad_to} {oversize}"
        self._fingerprint = hashlib.blake2b(options.encode(), digest_size=16).hexdigest()
        self.dropped = self._read = 0
        self._ended = False
        self.setstate(None)

    def __next__(self) -> StreamBatch[T]:
        if isinstance(self._failure, Exception):
            raise self._failure
        if self._failure is not None:
            raise ScheduleError("interrupted within a batch or a restore; restore a state taken before")
        try:
            return self._next()
        except StopIteration:
            raise
        except BaseException as failure:
            # The sample that was read last may be in no bin: going on would leave it out.
            self._failure = failure
            raise

    def _next(self) -> StreamBatch[T]:
        while not self._ended:
            # Before the next one is read: a batch of a full bin may have gone first.
            oldest = next(iter(self._waiting), self._read)
            if self._read - oldest >= self.max_wait:
                return self._take(*least_wasteful(self._held(), self.bounds, self._fits, self._waiting[oldest]))
            self._mark()
            try:
                sample = next(self._reader)
            except StopIteration:
                self._ended = True
                break
            position, self._read = self._read, self._read + 1
            length, number = self._queued(sample, position)
            if number == len(self.bounds):
                if self.oversize == "single":
                    return StreamBatch([sample], [position], length)
                self.dropped += 1
                continue
            if len(self._bins[number]) >= self._fits_list[number]:
                return self._take(number, self._fits_list[number])
            if len(self._waiting) >= self.buffer_samples:
                return self._take(*least_wasteful(self._held(), self.bounds, self._fits))
        if not self._waiting:
            raise StopIteration
        return self._take(*first_of_the_rest(self._held(), self.bounds, self._fits))

    def getstate(self) -> dict[str, Any]:
        """Where the consumer stands: positions of the samples that wait, and where the source can be read again.

        Raises:
            ConfigError: The source is an iterator without ``getstate``: it cannot be read again.
            ScheduleError: An error ended the stream.
        """
        if self._failure is not None:
            raise ScheduleError(
                f"no state after a failure ({type(self._failure).__name__}) in a batch or a restore; "
                "use one taken before it"
            )
        self._check_return()
        self._forget_marks()
        mark, place = self._marks[0] if self._marks else (self._read, place_of(self._reader, self._read))
        return {
            "version": _VERSION,
            "fingerprint": self._fingerprint,
            "read": self._read,
            "waiting": list(self._waiting),
            "dropped": self.dropped,
            "mark": mark,
            "source": place,
        }

    def setstate(self, checkpoint: Mapping[str, Any] | None) -> None:
        """Goes where a state was taken; None is the beginning. The source is read again in between.

        Raises:
            DataError: A state of another version or of other options, or a source that ends too early for it.
            ConfigError: The source is an iterator without ``setstate``, which stands where it stands.
        """
        state = checkpoint or {"read": 0, "waiting": [], "dropped": 0, "mark": 0, "source": None}
        if checkpoint is not None and not (isinstance(checkpoint, Mapping) and set(checkpoint) == _STATE):
            raise DataError(f"a state with {checkpoint!r:.200}; wanted {', '.join(sorted(_STATE))}, or None")
        if checkpoint and (checkpoint["version"] != _VERSION or checkpoint["fingerprint"] != self._fingerprint):
            raise DataError(
                f"a state of version {checkpoint['version']} and options {checkpoint['fingerprint']}; wanted "
                f"version {_VERSION} and options {self._fingerprint}: bounds, budget or another option differ"
            )
        if checkpoint or self._read:
            self._check_return()
        self._bins: list[deque[tuple[int, int, T]]] = [deque() for _ in self._bound_list]
        # By falling age: samples are added in the order of their positions.
        self._waiting: dict[int, int] = {}
        self._marks: deque[tuple[int, Any]] = deque()
        self._ended = False
        self._failure = None
        self.dropped = int(state["dropped"])
        self._read = int(state["mark"])
        try:
            self._reader = reader_at(self._source, state["source"])
            self._read_again(state["read"], set(state["waiting"]))
        except BaseException as failure:
            self._failure = failure  # it stands nowhere: neither at this state nor at the beginning
            raise

    def _read_again(self, end: int, wanted: set[int]) -> None:
        """Reads on to ``end``, and puts what waited into its bins."""
        while self._read < end:
            self._mark()
            try:
                sample = next(self._reader)
            except StopIteration:
                raise DataError(
                    f"the source ended after {self._read} samples, but the state was taken after {end}; "
                    "is it the same source?"
                ) from None
            if self._read in wanted:
                self._queued(sample, self._read, has_waited=True)
            self._read += 1

    def _check_return(self) -> None:
        if not self._can_return:
            raise ConfigError(
                f"the source, {a_type(self._source)}, cannot be read again; wanted an iterable that is not "
                "its own iterator, or an iterator with getstate and setstate"
            )

    def close(self) -> None:
        """Closes the source, where it can be closed."""
        close = getattr(self._source, "close", None)
        if callable(close):
            close()

    def _queued(self, sample: T, position: int, *, has_waited: bool = False) -> tuple[int, int]:
        """Puts a sample into its bin; its length, and the bin's number: behind the last one where it is over-size."""
        found = self._length(sample)
        length = as_number(found)
        if not isinstance(length, int) or length < 0:
            raise DataError(f"sample {position} of the stream has length {found!r}; wanted a whole number")
        number = bisect_left(self._bound_list, length)
        if number < len(self._bins):
            self._bins[number].append((position, length, sample))
            self._waiting[position] = number
        elif has_waited or self.oversize == "raise":
            found = f"sample {position} of the stream has length {length}, above the last bound {self._bound_list[-1]}"
            if has_waited:
                raise DataError(f"{found}, but was within it when the state was taken; is it the same source?")
            raise DataError(f"{found}; cut it, add a bound, or choose oversize drop or single")
        return length, number

    def _take(self, number: int, count: int) -> StreamBatch[T]:
        """So many samples, those that waited longest, from this bin and then from the ones below it."""
        top = number
        taken: list[tuple[int, int, T]] = []
        while len(taken) < count and number >= 0:
            waiting = self._bins[number]
            taken += [waiting.popleft() for _ in range(min(count - len(taken), len(waiting)))]
            number -= 1
        for position, _, _ in taken:
            del self._waiting[position]
        longest = self._bound_list[top] if self.pad_to == "bound" else max(length for _, length, _ in taken)
        return StreamBatch([sample for *_, sample in taken], [position for position, *_ in taken], longest)

    def _held(self) -> npt.NDArray[np.int64]:
        """``(K,)``: how many samples wait in each bin."""
        return np.array([len(waiting) for waiting in self._bins])

    def _mark(self) -> None:
        """Notes where the source stands, now and then, beginning with its first sample."""
        if self._can_return and not self._read % self._mark_every:
            self._marks.append((self._read, place_of(self._reader, self._read)))
            self._forget_marks()

    def _forget_marks(self) -> None:
        """Keeps the last mark before the oldest sample that waits, and all behind it."""
        oldest = next(iter(self._waiting), self._read)
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            self._marks.popleft()
