"""Shuffling through a buffer, with a state that holds no items.

Each item goes to a random slot and drives out the one that sat there. An item that has not been driven out after
four buffers' worth of input (1.8 % of them) leaves then. So what the buffer holds follows from the last ``4 ×
buffer_size`` inputs, and a restored iterator fills it by reading those again, each once.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TypeVar

from pipeal.data.checks import at_least
from pipeal.data.iterators.base import CheckpointableIterator, Stage, State
from pipeal.data.iterators.checks import shorter

__all__ = ["BufferedShuffleIterator"]

T = TypeVar("T")

AGE = 4
"""After how many buffers' worth of input an item leaves at the latest."""


class BufferedShuffleIterator(Stage[T]):
    """The items in a random order, through a buffer of ``buffer_size`` slots.

    Args:
        source_iterator: The items.
        buffer_size: At least 1; 1 changes nothing.
        seed: At least 0. None draws one, which the state remembers.

    >>> from pipeal.data.iterators import NativeCheckpointableIterator
    >>> sorted(BufferedShuffleIterator(NativeCheckpointableIterator(range(5)), buffer_size=3))
    [0, 1, 2, 3, 4]
    """

    setup = ("buffer_size", "seed")
    fields = ("block", "read", "served")
    _resume: tuple[int, int] | None
    _read: int
    _block: int
    _outputs_of: int
    _served: int
    _outputs: list[T]
    _flushing: bool

    def __init__(self, source_iterator: CheckpointableIterator[T], buffer_size: int, seed: int | None = 0) -> None:
        super().__init__(source_iterator)
        self._buffer_size = at_least("buffer_size", buffer_size, 1)
        self._take_seed(seed)
        self._finish()

    def _next(self) -> T:
        if self._resume is not None:
            (read, served), self._resume = self._resume, None
            while self._read < read:
                self._step()
                if self._flushing:
                    raise shorter(type(self).__name__, f"item {read}")
            self._outputs, self._served = [], 0
            while self._served < served:
                self._advance()
        return self._advance()

    def _advance(self) -> T:
        """The next output: the state says which input made it, and how many of the outputs of that were served."""
        while self._served == len(self._outputs):
            if self._flushing:
                raise StopIteration
            self._outputs_of, self._served = self._read, 0
            self._step()
        output = self._outputs[self._served]
        self._served += 1
        return output

    def _step(self) -> None:
        """Takes one input, which makes up to two outputs, or all that are left."""
        index, block = self._read, self._read // self._buffer_size
        if block != self._block:
            self._block, self._draws = block, self._random(block)
            self._marks.append((block, self._sources[0].getstate()))
            while len(self._marks) > 1 and self._marks[1][0] * self._buffer_size <= max(
                0, index - AGE * self._buffer_size
            ):
                self._marks.popleft()
        self._outputs = list(self._held.pop(index - AGE * self._buffer_size, ()))
        for item in islice(self._sources[0], 1):
            slot = self._draws.randrange(self._buffer_size)
            self._outputs += self._held.pop(self._by_slot.get(slot, -1), ())
            self._by_slot[slot] = index
            self._held[index] = (item,)
            self._read += 1
            return
        self._flushing = True
        # By slot, which is a random order.
        for _, held in sorted(self._by_slot.items()):
            self._outputs += self._held.pop(held, ())

    def _begin(self, state: State | None) -> None:
        first, read, served = (state["block"], state["read"], state["served"]) if state else (0, 0, 0)
        self._resume = (read, served)
        self._read, self._block, self._draws = first * self._buffer_size, first, self._random(first)
        self._outputs_of, self._served = read, served
        self._flushing = False
        self._outputs = []
        self._held: dict[int, tuple[T]] = {}
        self._by_slot: dict[int, int] = {}
        # Beginnings of blocks; from the first of them the buffer can be filled again.
        self._marks: deque[tuple[int, State]] = deque([(first, self._sources[0].getstate())])

    def _source_states(self) -> list[State]:
        return [self._marks[0][1]]

    def _progress(self) -> State:
        return {"block": self._marks[0][0], "read": self._outputs_of, "served": self._served}
