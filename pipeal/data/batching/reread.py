"""Sources that can be read again from where they stood."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar, runtime_checkable

from pipeal.core.errors import DataError
from pipeal.core.samples import Samples, as_iterable

__all__ = ["CheckpointableSource"]

T = TypeVar("T")


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
