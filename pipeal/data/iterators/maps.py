"""Item by item: functions over a stream, with memory or with random numbers, and streams side by side."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pipeal.core.errors import ConfigError, DataError
from pipeal.data.iterators.base import CheckpointableIterator, Stage, State
from pipeal.data.iterators.checks import a_function, apply

__all__ = ["MapIterator", "MultiplexIterator", "RecurrentIterator", "SamplingRandomMapIterator", "ZipIterator"]

In = TypeVar("In")
Out = TypeVar("Out")
T = TypeVar("T")
Memory = TypeVar("Memory")


class MapIterator(Stage[Out]):
    """``transform(item)`` of each item.

    >>> from pipeal.data.iterators import NativeCheckpointableIterator
    >>> list(MapIterator(NativeCheckpointableIterator([1, 2]), str))
    ['1', '2']
    """

    def __init__(self, source_iterator: CheckpointableIterator[In], transform: Callable[[In], Out]) -> None:
        super().__init__(source_iterator)
        self._transform = a_function("transform", transform)
        self._finish()

    def _next(self) -> Out:
        return apply(self._transform, next(self._sources[0]))


class RecurrentIterator(Stage[Out]):
    """A function with a memory: ``step_function(memory, item)`` returns the next memory and what to yield.

    The memory is part of the state: it should be a JSON value.

    Args:
        source_iterator: The items.
        step_function: May change the memory in place.
        initial_state: The memory before the first item; copied.

    >>> from pipeal.data.iterators import NativeCheckpointableIterator
    >>> list(RecurrentIterator(NativeCheckpointableIterator([1, 2, 3]), lambda total, n: (total + n, total + n), 0))
    [1, 3, 6]
    """

    _memory: Any

    def __init__(
        self,
        source_iterator: CheckpointableIterator[In],
        step_function: Callable[[Memory, In], tuple[Memory, Out]],
        initial_state: Any = None,
    ) -> None:
        super().__init__(source_iterator)
        self._step = a_function("step_function", step_function)
        self._initial = copy.deepcopy(initial_state)
        self._finish()

    def _next(self) -> Out:
        self._memory, output = apply(self._step, self._memory, next(self._sources[0]))
        return output

    def _begin(self, state: State | None) -> None:
        if state is not None and "memory" not in state:
            raise DataError("a damaged state of RecurrentIterator: it holds no memory")
        self._memory = copy.deepcopy(self._initial) if state is None else state["memory"]

    def _progress(self) -> State:
        return {"memory": copy.deepcopy(self._memory)}


class SamplingRandomMapIterator(Stage[Out]):
    """``transform(random, item)`` of each item, with a ``random.Random`` that follows from the seed and the place.

    Args:
        source_iterator: The items.
        transform: Draws from ``random`` only while it is called.
        seed: At least 0. None draws one, which the state remembers.
    """

    setup = ("seed",)
    fields = ("yielded",)
    _yielded: int

    def __init__(
        self,
        source_iterator: CheckpointableIterator[In],
        transform: Callable[[random.Random, In], Out],
        seed: int | None = 0,
    ) -> None:
        super().__init__(source_iterator)
        self._transform = a_function("transform", transform)
        self._take_seed(seed)
        self._finish()

    def _next(self) -> Out:
        item = next(self._sources[0])
        output = apply(self._transform, self._random(self._yielded), item)
        self._yielded += 1
        return output


class ZipIterator(Stage[tuple[Any, ...]]):
    """Tuples of one item from each source; ends with the shortest.

    >>> from pipeal.data.iterators import NativeCheckpointableIterator
    >>> list(ZipIterator(NativeCheckpointableIterator("ab"), NativeCheckpointableIterator([1, 2, 3])))
    [('a', 1), ('b', 2)]
    """

    def __init__(self, *source_iterators: CheckpointableIterator[Any]) -> None:
        super().__init__(*source_iterators)
        if not source_iterators:
            raise ConfigError("no source_iterators; wanted at least one: without any the stream would not end")
        self._finish()

    def _next(self) -> tuple[Any, ...]:
        # A list: inside a generator expression the end of a source would be an error.
        return tuple([next(source) for source in self._sources])


class MultiplexIterator(Stage[T]):
    """The next item of the source whose index ``control_iterator`` gives. Ends when either of the two ends.

    >>> from pipeal.data.iterators import NativeCheckpointableIterator as Data
    >>> list(MultiplexIterator(Data([0, 1, 1, 0]), [Data("abc"), Data("xyz")]))
    ['a', 'x', 'y', 'b']
    """

    def __init__(
        self,
        control_iterator: CheckpointableIterator[int],
        source_iterators: Sequence[CheckpointableIterator[T]],
    ) -> None:
        super().__init__(control_iterator, *source_iterators)
        self._finish()

    def _next(self) -> T:
        index = next(self._sources[0])
        count = len(self._sources) - 1
        if not hasattr(index, "__index__") or not 0 <= index < count:
            raise DataError(f"control_iterator gave the index {index!r}; wanted one of 0 to {count - 1}")
        return next(self._sources[1 + index])
