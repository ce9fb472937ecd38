"""Streams cut into windows. The state is where the window began and how much of it was served.

source   a b c d | e f g h | i j          a restored iterator reads the window in which it stood once more,
served   ■ ■ ■ ■   ■ ■ □ □                and nothing before it
                 └ state: source at e, 2 served
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import ClassVar, TypeVar

from pipeal.core.errors import DataError
from pipeal.core.samples import Samples, as_iterable
from pipeal.data.checks import at_least
from pipeal.data.iterators.base import CheckpointableIterator, Stage, State
from pipeal.data.iterators.checks import a_function, apply, shorter
from pipeal.data.iterators.sources import InfinitePermutationSourceIterator

__all__ = ["BlockwiseShuffleIterator", "FixedBatchIterator", "SelectManyIterator", "WindowedIterator"]

T = TypeVar("T")
In = TypeVar("In")


class WindowStage(Stage[T]):
    """What reads a window, makes something of it and serves that; with the bookkeeping that all of them need."""

    fields: ClassVar[tuple[str, ...]] = ("window", "served")
    _starts: list[State]
    _window: int
    _served: int
    _outputs: Iterator[T] | None

    @abstractmethod
    def _read(self) -> Iterable[T]:
        """Reads the window ``self._window`` and returns what it serves; StopIteration when nothing is left."""

    def _next(self) -> T:
        while True:
            if self._outputs is None:
                self._outputs = iter(self._read())
                skipped = sum(1 for _ in islice(self._outputs, self._served))
                if skipped < self._served:
                    raise DataError(
                        f"{type(self).__name__} stood at output {self._served} of a window that now has {skipped}; "
                        "restore a state with the data and functions it was taken with"
                    )
            for output in self._outputs:
                self._served += 1
                return output
            self._turn()

    def _turn(self) -> None:
        """Goes to the next window."""
        self._starts = super()._source_states()
        self._window, self._served, self._outputs = self._window + 1, 0, None

    def _begin(self, state: State | None) -> None:
        super()._begin(state)
        self._starts, self._outputs = super()._source_states(), None

    def _source_states(self) -> list[State]:
        return list(self._starts)


class SelectManyIterator(WindowStage[T]):
    """The items of the collections that the items of the source are, or that ``collection_selector`` makes of them.

    Args:
        source_iterator: The items; a path, say.
        collection_selector: Gives an iterable (or a map-style data set) for each item, read once and as it is
            needed: the lines of that file. None: the items are iterables themselves.

    Over permutations without end, collections of which none holds anything are a ``DataError``.

    >>> from pipeal.data.iterators import NativeCheckpointableIterator
    >>> list(SelectManyIterator(NativeCheckpointableIterator(["ab", "", "c"])))
    ['a', 'b', 'c']
    """

    _empty: int

    def __init__(
        self,
        source_iterator: CheckpointableIterator[In],
        collection_selector: Callable[[In], Samples[T]] | None = None,
    ) -> None:
        super().__init__(source_iterator)
        self._selector = None if collection_selector is None else a_function("collection_selector", collection_selector)
        self._round_trip = (
            source_iterator.round_trip if isinstance(source_iterator, InfinitePermutationSourceIterator) else None
        )
        self._finish()

    def _read(self) -> Iterable[T]:
        item = next(self._sources[0])
        collection: Samples[T] = item if self._selector is None else apply(self._selector, item)
        return as_iterable(collection, DataError, "a collection of SelectManyIterator")

    def _turn(self) -> None:
        self._empty = 0 if self._served else self._empty + 1
        if self._empty == self._round_trip:
            raise DataError(
                f"{self._empty} collections in a row were empty, which is all that there are; wanted at least one with "
                "items: is it the right folder, and what reads it?"
            )
        super()._turn()

    def _begin(self, state: State | None) -> None:
        super()._begin(state)
        self._empty = 0


class BlockwiseShuffleIterator(WindowStage[T]):
    """Blocks of ``block_size`` items, each shuffled in itself.

    The order in block ``n`` follows from the seed and ``n``. Compare :class:`BufferedShuffleIterator`, which mixes
    across such borders.

    Args:
        source_iterator: The items.
        block_size: At least 1.
        seed: At least 0. None draws one, which the state remembers.

    >>> from pipeal.data.iterators import NativeCheckpointableIterator
    >>> shuffled = list(BlockwiseShuffleIterator(NativeCheckpointableIterator(range(5)), block_size=3))
    >>> sorted(shuffled[:3]), sorted(shuffled[3:])
    ([0, 1, 2], [3, 4])
    """

    setup = ("block_size", "seed")

    def __init__(self, source_iterator: CheckpointableIterator[T], block_size: int, seed: int | None = 0) -> None:
        super().__init__(source_iterator)
        self._block_size = at_least("block_size", block_size, 1)
        self._take_seed(seed)
        self._finish()

    def _read(self) -> Iterable[T]:
        block = list(islice(self._sources[0], self._block_size))
        if not block:
            raise StopIteration
        self._random(self._window).shuffle(block)
        return block


class FixedBatchIterator(Stage[list[T]]):
    """Lists of ``batch_size`` items; the last one may be shorter.

    >>> from pipeal.data.iterators import NativeCheckpointableIterator
    >>> list(FixedBatchIterator(NativeCheckpointableIterator(range(5)), batch_size=2))
    [[0, 1], [2, 3], [4]]
    """

    setup = ("batch_size",)

    def __init__(self, source_iterator: CheckpointableIterator[T], batch_size: int) -> None:
        super().__init__(source_iterator)
        self._batch_size = at_least("batch_size", batch_size, 1)
        self._finish()

    def _next(self) -> list[T]:
        batch = list(islice(self._sources[0], self._batch_size))
        if not batch:
            raise StopIteration
        return batch


class WindowedIterator(Stage[tuple[T, ...]]):
    """Every ``width`` consecutive items, as a window that slides by one; nothing if there are fewer items.

    >>> from pipeal.data.iterators import NativeCheckpointableIterator
    >>> list(WindowedIterator(NativeCheckpointableIterator([1, 2, 3, 4]), width=3))
    [(1, 2, 3), (2, 3, 4)]
    """

    setup = ("width",)
    fields = ("skip",)
    _skip: int

    def __init__(self, source_iterator: CheckpointableIterator[T], width: int) -> None:
        super().__init__(source_iterator)
        self._width = at_least("width", width, 1)
        self._finish()

    def _next(self) -> tuple[T, ...]:
        while self._skip:
            try:
                self._take()
            except StopIteration:
                raise shorter(type(self).__name__, f"item {self._first} of a stretch") from None
            self._skip -= 1
        while len(self._held) < self._width:
            self._take()
        window = tuple(self._held)
        self._held.popleft()
        self._first += 1
        # The oldest mark must stay at or before the first item of the next window.
        if len(self._marks) > 1 and self._marks[1][0] <= self._first:
            self._marks.popleft()
        return window

    def _take(self) -> None:
        if self._read % self._width == 0 and self._read > self._marks[-1][0]:
            self._marks.append((self._read, self._sources[0].getstate()))
        item = next(self._sources[0])
        self._read += 1
        if not self._skip:
            self._held.append(item)

    def _begin(self, state: State | None) -> None:
        super()._begin(state)
        self._first = self._skip  # of the next window, counted from the first mark
        self._read = 0
        self._held: deque[T] = deque()
        self._marks: deque[tuple[int, State]] = deque([(0, self._sources[0].getstate())])

    def _source_states(self) -> list[State]:
        return [self._marks[0][1]]

    def _progress(self) -> State:
        return {"skip": self._first - self._marks[0][0]}
