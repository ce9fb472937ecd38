"""What users give as data: batches as pairs of inputs and targets, data sets to iterate over or map-style."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from pipeal.core.errors import DataError, a_type, name_of
from pipeal.core.tree import Tree, describe, shapes_of, tensors

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


def pair_of(batch: Any) -> tuple[Tree, Tree]:
    """The inputs and the targets of a batch: an object with attributes ``x`` and ``y``, or a pair.

    >>> pair_of((1, 2))
    (1, 2)

    Raises:
        DataError: It is something else.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if hasattr(batch, "x") and hasattr(batch, "y"):
        return batch.x, batch.y
    raise DataError(f"found {_in_words(batch)}")


def require_samples(number: int, x: Tree) -> None:
    """Asks that not all tensors of a batch's inputs are empty: a graph may be without edges.

    Raises:
        DataError: All are; no loss of them is a number.
    """
    inputs = tensors(x)
    if inputs and all(tensor.dim() and not len(tensor) for tensor in inputs):
        raise DataError(f"batch {number} has no samples ({describe(shapes_of(x))}); expected one at least")


def iterate(batches: Samples[T]) -> Iterator[T]:
    """An iterator over batches, of an iterable or by their numbers.

    Raises:
        DataError: They are nothing to iterate over.
    """
    if not isinstance(batches, Iterable) and not hasattr(type(batches), "__getitem__"):
        call = "; call it" if callable(batches) else ""
        raise DataError(f"the batches are given as {name_of(batches)}; expected an iterable of pairs (x, y){call}")
    return iter(as_iterable(batches, DataError, "batches"))


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
            f"{name} is {a_type(data)}; wanted something to iterate over: an iterable, or a data set with "
            "__getitem__ and __len__"
        )
    return _Numbered(data) if hasattr(kind, "__len__") else _Unnumbered(data)


def _in_words(batch: Any) -> str:
    """Says what a batch is, what was expected, and what to do.

    >>> _in_words({"text": torch.zeros(8, 5), "label": torch.zeros(8)})
    "a dict with 'text': (8, 5) float32, 'label': (8,) float32; expected a pair (x, y) of inputs and targets, or an \
object with attributes x and y: pass ((b['text'], b['label']) for b in batches)"
    """
    expected = "; expected a pair (x, y) of inputs and targets, or an object with attributes x and y"
    found, hint = name_of(batch), ""
    if isinstance(batch, torch.Tensor):
        found, hint = f"tensor {_shape(batch)}", "zip(inputs, targets) joins batches of both; a single one is [(x, y)]"
    elif isinstance(batch, Mapping):
        found = f"{found} with {', '.join(f'{name!r}: {_shape(part)}' for name, part in batch.items())}"
        if len(batch) > 1:
            x, y, *_ = batch
            hint = f"pass ((b[{x!r}], b[{y!r}]) for b in batches)"
    elif isinstance(batch, tuple | list):
        found = f"{found} of {len(batch)}: {', '.join(map(_shape, batch[:4]))}{', …' if len(batch) > 4 else ''}"
        hint = "several inputs are joined as ((a, b), y)" if len(batch) > 2 else "the targets are missing"
    return f"a {found}{expected}{hint and f': {hint}'}"


def _shape(part: Any) -> str:
    return describe(shapes_of(part)) if isinstance(part, torch.Tensor) else type(part).__name__


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
