"""A stand-in for CUDA graphs on a CPU: operators on a tape, with the addresses that they had.

As on a GPU, recording leaves nothing computed; a replay reads what lies at those addresses by then, runs no Python of
the layer, and writes over what earlier replays left in the memory that the graphs share. What is recorded wrongly,
such as a number that changes, is replayed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipeal.engine.gate import GATE

T = TypeVar("T")


class Tape(TorchDispatchMode):
    """Records the operators that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        for tensor in leaves((args, kwargs)):
            if place_of(tensor) not in self._made:
                whole = all_of(tensor, torch.uint8)
                self._before.setdefault(place_of(tensor), (whole, whole.clone()))
        made = func(*args, **kwargs)
        for tensor in leaves(made):
            if place_of(tensor) not in self._before:
                self._made.setdefault(place_of(tensor), all_of(tensor, tensor.dtype))
        self._steps.append((func, args, kwargs, made))
        return made

    def put_back(self) -> None:
        """After the recording: what was there before is as it was."""
        for whole, before in self._before.values():
            whole.copy_(before)

    def spoil(self) -> None:
        """Leaves garbage in all memory of its own."""
        for whole in self._made.values():
            whole.fill_(torch.nan if whole.is_floating_point() else 1)

    def replay(self) -> None:
        """Runs the operators again, on the tensors that they had."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, made in self._steps:
                args, kwargs = pytree.tree_map(data_of, (args, kwargs))
                for own, new in zip(leaves(made), leaves(func(*args, **kwargs)), strict=True):
                    if own.data_ptr() != new.data_ptr():
                        own.data.copy_(new)


class TapeRecorder:
    """In the place of :class:`pipeal.engine.cudagraph.CudaRecorder`.

    Attributes:
        recorded: How many recordings all recorders made.
        alone: Whether each was made alone behind the gate.
    """

    recorded = 0
    alone = True

    def __init__(self) -> None:
        self._tapes: list[Tape] = []

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        TapeRecorder.recorded += 1
        TapeRecorder.alone &= GATE.busy()
        tape = Tape()
        with tape:
            result = work()
        tape.put_back()
        tape.spoil()
        self._tapes.append(tape)
        is_forward = len(self._tapes) % 2 == 1  # they take turns

        def replay() -> None:
            if is_forward:
                for other in self._tapes:
                    other.spoil()
            tape.replay()

        return replay, result

    def drop(self) -> None:
        self._tapes.clear()


def leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def all_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """All of the memory that a tensor is a part of."""
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())


def data_of(leaf: Any) -> Any:
    """A tensor's data alone: a GPU's graph does not tell autograd that it writes, either."""
    return leaf.data if isinstance(leaf, Tensor) else leaf
