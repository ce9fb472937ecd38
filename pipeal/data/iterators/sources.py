"""Where a pipeline begins: iterators over data, over a share of it, over permutations of it, over random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from pipeal.core.errors import ConfigError, a_type
from pipeal.core.samples import Samples, as_iterable
from pipeal.data.batching.reread import read_from
from pipeal.data.checks import one_of
from pipeal.data.iterators.base import CheckpointableIterator, Stage, State
from pipeal.data.iterators.checks import check_instance

__all__ = [
    "ChunkedSourceIterator",
    "InfinitePermutationSourceIterator",
    "NativeCheckpointableIterator",
    "RandomIterator",
    "create_source_iterator",
]

T = TypeVar("T")
Uneven: TypeAlias = Literal["keep", "drop", "repeat"]


class NativeCheckpointableIterator(Stage[T]):
    """Any iterable or map-style data set with a state.

    A sequence, or what has ``__getitem__`` and ``__len__`` only, is restored in constant time; of anything else the
    start is read again.

    Args:
        iterable: The data. An iterator is refused: it cannot start over. So is a set: another process would
            have it in another order.

    Raises:
        ConfigError: An iterator, a set, or no iterable at all.

    >>> it = NativeCheckpointableIterator("abc")
    >>> next(it), it.getstate()["yielded"], list(it)
    ('a', 1, ['b', 'c'])
    """

    setup: ClassVar[tuple[str, ...]] = ("items",)
    fields = ("yielded",)
    _yielded: int
    _reader: Iterator[T] | None

    def __init__(self, iterable: Samples[T]) -> None:
        super().__init__()
        iterable = as_iterable(iterable, ConfigError, "iterable")
        if isinstance(iterable, (set, frozenset)):
            raise ConfigError(
                f"iterable is {a_type(iterable)}, whose order differs between processes; "
                "wanted a list, such as sorted(iterable)"
            )
        if iter(iterable) is iterable:
            raise ConfigError(
                f"iterable is an iterator ({type(iterable).__name__}), which cannot start over; "
                "wanted a list or another iterable that can"
            )
        self._iterable = iterable
        self._items = len(iterable) if isinstance(iterable, Sequence) else None
        self._finish()

    def _next(self) -> T:
        if self._reader is None:
            self._reader = read_from(self._iterable, self._yielded)
        item = next(self._reader)
        self._yielded += 1
        return item

    def _begin(self, state: State | None) -> None:
        super()._begin(state)
        self._reader = None


class ChunkedSourceIterator(NativeCheckpointableIterator[T]):
    """The share of one instance: the list is cut into consecutive parts, one per instance. Ends; does not shuffle.

    Args:
        source_items: All items; they are not copied and must not change.
        num_instances: How many instances there are.
        instance_rank: Which one this is.
        uneven: What to do when the list does not divide evenly. ``"keep"``: the first parts have one item more.
            ``"drop"``: all parts have ``len // num_instances`` items, and the last items of the list are left out.
            ``"repeat"``: all have as many as the longest, and the shorter ones end with the last item once more (in
            a list that is shorter than ``num_instances``, the last of all).

    Raises:
        ConfigError: A rank that does not exist, another word for ``uneven``, or no list.

    >>> [list(ChunkedSourceIterator([1, 2, 3, 4, 5], 2, rank)) for rank in (0, 1)]
    [[1, 2, 3], [4, 5]]
    >>> [list(ChunkedSourceIterator([1, 2, 3, 4, 5], 2, rank, uneven="repeat")) for rank in (0, 1)]
    [[1, 2, 3], [4, 5, 5]]
    """

    setup = ("items", "num_instances", "instance_rank", "uneven")

    def __init__(
        self, source_items: Sequence[T], num_instances: int = 1, instance_rank: int = 0, *, uneven: Uneven = "keep"
    ) -> None:
        self._num_instances, self._instance_rank = instances, rank = check_instance(num_instances, instance_rank)
        self._uneven = one_of("uneven", uneven, Uneven)
        items = _sequence(source_items)
        each, more = divmod(len(items), instances)
        if uneven == "drop":
            more = 0
        begin = rank * each + min(rank, more)
        # One by one: a data set has places, but need not have slices.
        part = [items[place] for place in range(begin, begin + each + (rank < more))]
        if uneven == "repeat" and more and rank >= more:
            part.append(part[-1] if part else items[len(items) - 1])
        super().__init__(part)
        self._items = len(items)  # of the whole list: a state of another part, or of another list, is refused


class InfinitePermutationSourceIterator(Stage[T]):
    """The items of a list without end, in a new order on each pass; instances take every n-th, together each item.

    The order follows from the seed and the number of the pass, so that a state is two numbers.

    Args:
        source_items: At least one item; the list is copied, the items are not.
        seed: At least 0. None draws one, which the state remembers.
        shuffle: False keeps the order of the list.
        num_instances: How many instances share the items.
        instance_rank: Which one this is.

    Raises:
        ConfigError: No items, a rank that does not exist, or ``seed=None`` with several instances: each would draw
            its own, and their shares would overlap.

    >>> it = InfinitePermutationSourceIterator([1, 2, 3], seed=0)
    >>> [sorted(next(it) for _ in range(3)) for _ in range(2)]
    [[1, 2, 3], [1, 2, 3]]
    """

    setup = ("items", "seed", "shuffle", "num_instances", "instance_rank")
    fields = ("yielded",)
    _yielded: int
    _pass: int
    _order: list[int]

    def __init__(
        self,
        source_items: Sequence[T],
        seed: int | None = 0,
        shuffle: bool = True,
        num_instances: int = 1,
        instance_rank: int = 0,
    ) -> None:
        super().__init__()
        self._num_instances, self._instance_rank = check_instance(num_instances, instance_rank)
        if shuffle and seed is None and self._num_instances > 1:
            raise ConfigError(
                f"seed is None with {self._num_instances} instances, whose shares would overlap; "
                "pass one seed, the same to all of them"
            )
        items = _sequence(source_items)
        self._data = [items[place] for place in range(len(items))]
        self._items = len(self._data)
        if not self._data:
            raise ConfigError("source_items is empty; wanted at least one item")
        self._shuffle = bool(shuffle)
        self._take_seed(seed)
        self._finish()

    @property
    def round_trip(self) -> int:
        """Among so many items in a row each one is; of a share of permutations, but for one time in 10**17."""
        return self._items * (2 if self._num_instances == 1 else 40)

    def _next(self) -> T:
        number, index = divmod(self._instance_rank + self._yielded * self._num_instances, self._items)
        self._yielded += 1
        if not self._shuffle:
            return self._data[index]
        if number != self._pass:
            self._order = list(range(self._items))
            self._random(number).shuffle(self._order)
            self._pass = number
        return self._data[self._order[index]]

    def _begin(self, state: State | None) -> None:
        super()._begin(state)
        self._pass, self._order = -1, []


class RandomIterator(Stage[float]):
    """Random numbers in [0, 1) without end; number ``n`` follows from the seed and ``n``.

    Args:
        seed: At least 0. None draws one, which the state remembers.
    """

    setup = ("seed",)
    fields = ("yielded",)
    _yielded: int

    def __init__(self, seed: int | None = 0) -> None:
        super().__init__()
        self._take_seed(seed)
        self._finish()

    def _next(self) -> float:
        number = self._keyed(self._yielded)
        self._yielded += 1
        return (number >> 10) * 2.0**-53  # of 63 bits, the 53 that a float holds


def create_source_iterator(
    source_items: Sequence[T],
    train: bool = True,
    seed: int | None = None,
    shuffle: bool = True,
    num_instances: int = 1,
    instance_rank: int = 0,
    *,
    uneven: Uneven = "keep",
) -> CheckpointableIterator[T]:
    """Permutations without end to train on; without ``train`` the share of one instance, once and in order.

    Raises:
        ConfigError: ``shuffle`` without ``train``, or what the two iterators refuse.
    """
    if train:
        return InfinitePermutationSourceIterator(source_items, seed, shuffle, num_instances, instance_rank)
    if shuffle:
        raise ConfigError("shuffle=True with train=False; wanted shuffle=False: without train the order is kept")
    return ChunkedSourceIterator(source_items, num_instances, instance_rank, uneven=uneven)


def _sequence(items: Any) -> Sequence[Any]:
    if isinstance(items, Mapping) or not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        raise ConfigError(f"source_items is of type {type(items).__name__}; wanted a list")
    return items
