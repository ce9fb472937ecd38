"""Batches of similar items out of a window that is read ahead: sorted, cut longest first, shuffled as batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from operator import itemgetter
from typing import Any, TypeVar

from pipeal.core.errors import DataError
from pipeal.data.checks import at_least
from pipeal.data.iterators.base import CheckpointableIterator, State
from pipeal.data.iterators.checks import a_function, apply, shorter
from pipeal.data.iterators.windows import WindowStage

__all__ = ["BucketedReadaheadBatchIterator"]

T = TypeVar("T")

ATTEMPTS = 4
"""How often a window is cut again to make its last batch full; nearly always the second cut has it."""


class BucketedReadaheadBatchIterator(WindowStage[list[T]]):
    """Reads ``read_ahead`` items, sorts them by falling ``key`` and cuts batches off from the largest item on.

    The sort is stable, so an earlier shuffling stays where keys are equal.

    A window rarely ends with a full batch. The items too many, the smallest of those just read, wait and join the
    next window; none waits twice, so none starves, and a state needs their number only: a restored iterator reads
    the window in which it stood and, where items waited, the one before. With ``carry=False`` each window ends with
    a part-filled batch, which is the method of Marian's batch generator and of infinibatch.

    Args:
        source_iterator: The items.
        read_ahead: How many to read at a time, at least 1.
        key: What to sort by, the length say; None sorts nothing. Called once for each item that is read.
        batch_size: Items in a batch: a number, or a function of the first item of a batch, which has its largest
            key. ``lambda longest: budget // len(longest)`` keeps a padded budget.
        boundary_key: A batch also ends where the value of this function changes in the sorted order.
        shuffle: Put the batches of a window into a random order that follows from the seed and the window's number.
        seed: At least 0. None draws one, which the state remembers.
        carry: Let the items that do not fill a window's last batch join the next window.

    Raises:
        ConfigError: A setting out of range.
        DataError: From ``next``: the function gave no whole number of at least 1; 0 is what a budget gives for an
            item that is larger than it.

    >>> from pipeal.data.iterators import NativeCheckpointableIterator
    >>> words = NativeCheckpointableIterator(["aaa", "b", "cc", "dd", "e", "f"])
    >>> list(BucketedReadaheadBatchIterator(words, 6, key=len, batch_size=lambda w: 4 // len(w), shuffle=False))
    [['aaa'], ['cc', 'dd'], ['b', 'e', 'f']]
    """

    setup = ("read_ahead", "batch_size", "shuffle", "carry", "seed")
    fields = ("window", "served", "carried")
    _here: State
    _carried: int
    _wait: int
    _waiting: list[tuple[Any, T]] | None

    def __init__(
        self,
        source_iterator: CheckpointableIterator[T],
        read_ahead: int,
        key: Callable[[T], Any] | None,
        batch_size: int | Callable[[T], int],
        boundary_key: Callable[[T], Any] | None = None,
        shuffle: bool = True,
        seed: int | None = 0,
        *,
        carry: bool = True,
    ) -> None:
        super().__init__(source_iterator)
        self._read_ahead = at_least("read_ahead", read_ahead, 1)
        self._key = None if key is None else a_function("key", key)
        self._size_of = batch_size if callable(batch_size) else None
        self._batch_size = None if callable(batch_size) else at_least("batch_size", batch_size, 1)
        self._boundary_key = None if boundary_key is None else a_function("boundary_key", boundary_key)
        self._shuffle, self._carry = bool(shuffle), bool(carry)
        self._take_seed(seed)
        self._finish()

    def _read(self) -> Iterable[list[T]]:
        waited = self._waiting
        if waited is None:  # restored: read the window before, which left them
            before = self._read_window()
            if len(before) < self._read_ahead:
                raise shorter(type(self).__name__, f"window {self._window}")
            _, waited = self._split(before, self._carried)
        self._here = self._sources[0].getstate()
        fresh = self._read_window()
        if not fresh and not waited:
            raise StopIteration
        last = len(fresh) < self._read_ahead
        batches, wait = self._cut_full(waited, fresh) if self._carry and not last else (self._cut(waited, fresh)[0], 0)
        self._wait, (_, self._waiting) = wait, self._split(fresh, wait)
        if self._shuffle:
            self._random(self._window).shuffle(batches)
        return batches

    def _read_window(self) -> list[tuple[Any, T]]:
        """Each item behind its key: a window may be cut several times, and a key may be costly."""
        items = islice(self._sources[0], self._read_ahead)
        return [(0 if self._key is None else apply(self._key, item), item) for item in items]

    def _split(self, items: list[tuple[Any, T]], count: int) -> tuple[list[tuple[Any, T]], list[tuple[Any, T]]]:
        """The items without the ``count`` last ones of the sorted order, and those; both as they came."""
        places = sorted(range(len(items)), key=lambda place: items[place][0], reverse=True)
        cut = len(items) - count
        return [items[place] for place in sorted(places[:cut])], [items[place] for place in sorted(places[cut:])]

    def _cut_full(self, waited: list[tuple[Any, T]], fresh: list[tuple[Any, T]]) -> tuple[list[list[T]], int]:
        """Cuts so that the last batch is full, if leaving out some of the fresh items does it; and how many those are.

        Items that have waited stay in: the next window gets fresh ones only.
        """
        plain, lacking = self._cut(waited, fresh)
        cut, wait = plain, 0
        for _ in range(ATTEMPTS):
            if not lacking:
                return cut, wait
            wait += len(cut[-1])
            if wait > len(fresh):
                break
            cut, lacking = self._cut(waited, self._split(fresh, wait)[0])
        return (cut, wait) if not lacking else (plain, 0)

    def _cut(self, waited: list[tuple[Any, T]], fresh: list[tuple[Any, T]]) -> tuple[list[list[T]], bool]:
        """The batches of a window, and whether the last one is part-filled."""
        items = sorted(waited + fresh, key=itemgetter(0), reverse=True)
        batches: list[list[T]] = []
        room, boundary = 0, None
        for key, item in items:
            here = None if self._boundary_key is None else apply(self._boundary_key, item)
            if not room or here != boundary:
                batches.append([])
                room, boundary = self._size_for(item, key), here
            batches[-1].append(item)
            room -= 1
        return batches, room > 0

    def _size_for(self, first: T, key: Any) -> int:
        size: Any = self._batch_size if self._size_of is None else apply(self._size_of, first)
        if isinstance(size, bool) or not hasattr(size, "__index__") or size.__index__() < 1:
            of = "" if self._key is None else f" for an item with key {key!r}"
            raise DataError(
                f"batch_size gave {size!r}{of} in window {self._window}; wanted a whole number of at least 1: "
                "drop or cut items that are larger than the budget, or raise the budget"
            )
        return int(size.__index__())

    def _turn(self) -> None:
        super()._turn()
        self._carried = self._wait
        if self._carried:
            # To find those that wait, a restored iterator must begin with the window that left them.
            self._starts = [self._here]

    def _begin(self, state: State | None) -> None:
        super()._begin(state)
        self._waiting = None if self._carried else []
        self._wait = 0
