"""Data sets of every kind as iterables, and sources that can be read again from where they stood."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from pipeal.errors import DataError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class MapStyle(Protocol[T_co]):
    """A data set whose samples have numbers, as most ``torch.utils.data.Dataset`` are; it need not be iterable.

    Iterated over, it has ``len(dataset)`` samples, whatever it gives for numbers beyond. One without ``__len__`` ends
    where it raises ``IndexError``, as in a ``for`` loop.
    """

    def __getitem__(self, index: int, /) -> T_co:
        """A sample, by its number from 0."""
        ...


Samples: TypeAlias = Iterable[T] | MapStyle[T]
"""What a data set can be: an iterable, or map-style."""


def as_iterable(data: Samples[T], wrong: type[Exception], name: str = "dataset") -> Iterable[T]:
    """``data`` if it is an iterable, else one over its samples: a sequence if it has ``__len__``.

    Args:
        data: The data set.
        wrong: Is raised for anything else.
        name: What a message calls it.

    >>> class Squares:
    ...     def __len__(self):
    ...         return 3
    ...     def __getitem__(self, index):
    ...         return index**2
    >>> list(as_iterable(Squares(), TypeError))
    [0, 1, 4]
    """
    kind = type(data)
    if isinstance(data, Iterable):
        return data
    if not hasattr(kind, "__getitem__"):
        raise wrong(
            f"{name} is a {kind.__name__}; wanted something to iterate over: an iterable, or a data set with "
            "__getitem__ and __len__"
        )
    return _Numbered(data) if hasattr(kind, "__len__") else _Unnumbered(data)


@runtime_checkable
class CheckpointableSource(Protocol):
    """An iterator that can say where it stands, and go back there."""

    def __next__(self) -> Any:
        """The next sample."""
        ...

    def getstate(self) -> Any:
        """Where it stands."""
        ...

    def setstate(self, checkpoint: Any) -> None:
        """Goes where a state was taken; None is the beginning."""
        ...


def read_from(source: Iterable[T], start: int) -> Iterator[T]:
    """The items from ``start`` on: of a sequence at once; of anything else, those before are read again.

    Raises:
        DataError: From ``next``: the source ends before ``start``.
    """
    if isinstance(source, Sequence):
        passed = min(start, len(source))
        items: Iterator[T] = (source[place] for place in range(start, len(source)))
    else:
        items = iter(source)
        passed = sum(1 for _ in islice(items, start))
    if passed < start:
        raise DataError(f"the data ends before item {start}, where the state was taken; wanted the same data")
    yield from items


def reader_at(source: Samples[T], place: Any) -> Iterator[T]:
    """Reads on from a place that :func:`place_of` gave; None is the beginning.

    A plain iterator has no places: it is read on from where it stands.

    Raises:
        DataError: The source is nothing to iterate over.
    """
    if isinstance(source, CheckpointableSource):
        source.setstate(place)
        return source  # type: ignore[return-value]  # read with next() alone
    samples = as_iterable(source, DataError, "source")
    iterator = iter(samples)
    return iterator if iterator is samples else read_from(samples, place or 0)


def place_of(reader: Iterator[T], read: int) -> Any:
    """Where a reader stands that has given so many samples."""
    return reader.getstate() if isinstance(reader, CheckpointableSource) else read


class _Numbered(Sequence[T]):
    """A map-style data set as a sequence."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        return self._data[index]

    def __iter__(self) -> Iterator[T]:
        # A Sequence would take an IndexError in the middle, such as that of a bug, for the end.
        return (self._data[index] for index in range(len(self._data)))


class _Unnumbered(Iterable[T]):
    """A map-style data set without ``__len__``, again and again."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[T]:
        return iter(self._data)
