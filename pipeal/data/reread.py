"""Sources that can be read again from where they stood."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar, runtime_checkable

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


class Reread(Iterator[T]):
    """An iterable that is read from the beginning again, passing over what was read before."""

    def __init__(self, source: Iterable[T], position: int) -> None:
        if isinstance(source, Sequence):
            self._iterator: Iterator[T] = (source[place] for place in range(position, len(source)))
        else:
            self._iterator = islice(source, position, None)

    def __next__(self) -> T:
        return next(self._iterator)


def reader_at(source: Iterable[T], place: Any) -> Iterator[T]:
    """Reads on from a place that :func:`place_of` gave; None is the beginning.

    A plain iterator has no places: it is read on from where it stands.
    """
    if isinstance(source, CheckpointableSource):
        source.setstate(place)
        return source
    iterator = iter(source)
    return iterator if iterator is source else Reread(source, place or 0)


def place_of(reader: Iterator[T], read: int) -> Any:
    """Where a reader stands that has given so many samples."""
    return reader.getstate() if isinstance(reader, CheckpointableSource) else read
