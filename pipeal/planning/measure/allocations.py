"""Watches every allocation of tensors, those within operators included, and tells gradients from all else."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from pipeal.core.tree import Tree, tensors

_MARK, _GRADIENT = "pipeal mark: ", "pipeal gradient: "


@dataclass(frozen=True, slots=True)
class Levels:
    """Bytes within a span of time, against what was there when watching began.

    Attributes:
        before: At its start.
        after: At its end.
        most: The most within it.
        most_beside_gradients: The most of all that is no gradient of a parameter.
        most_gradients: The most of gradients.
    """

    before: int
    after: int
    most: int
    most_beside_gradients: int
    most_gradients: int


class Allocations:
    """What a ``with`` block allocates on a device and frees, by the marks set in it; read after the block.

    It is PyTorch's profiler that watches: it sees what convolutions need for a moment, where tensors do not show.

    Args:
        device: Of which device.
        parameters: Whose gradients are told apart; they must be those that a backward in the block fills.
    """

    def __init__(self, device: torch.device, parameters: Iterable[nn.Parameter]) -> None:
        self._kind = 1 if device.type == "cuda" else 0
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._events: list[dict[str, Any]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Allocations:
        self._stack.enter_context(_unheard())
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._stack.enter_context(self._profile)
        for parameter in self._parameters:
            self._stack.callback(parameter.register_post_accumulate_grad_hook(_told).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"  # the only form in which it gives away single allocations in public
            self._profile.export_chrome_trace(str(path))
            self._events = json.loads(path.read_text())["traceEvents"]

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """Marks a span of time, to be asked for by its name."""
        with record_function(_MARK + name):
            yield

    def levels(self) -> dict[str, Levels]:
        """By the name of each mark, what was allocated meanwhile; under ``""``, in all of the block."""
        marks = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in self._events if e.get("cat") == "user_annotation"]
        told = [(begin, int(name[len(_GRADIENT) :])) for name, begin, _ in marks if name.startswith(_GRADIENT)]
        taken = self._taken(told)
        found = {"": _within(taken, float("-inf"), float("inf"))}
        for name, begin, end in marks:
            if name.startswith(_MARK):
                found[name[len(_MARK) :]] = _within(taken, begin, end)
        return found

    def _taken(self, told: Sequence[tuple[float, int]]) -> list[tuple[float, int, int]]:
        """Time, all bytes and those of gradients after each allocation and each release."""
        moments = sorted(
            (
                (event["ts"], event["args"]["Addr"], event["args"]["Bytes"])
                for event in self._events
                if event.get("name") == "[memory]" and event["args"]["Device Type"] == self._kind
            ),
            key=lambda moment: moment[0],
        )
        by_place: dict[int, list[int]] = defaultdict(list)
        for number, (_, place, size) in enumerate(moments):
            if size > 0:
                by_place[place].append(number)
        gradients: set[int] = set()  # which of the allocations
        for time, place in told:
            before = [number for number in by_place[place] if moments[number][0] <= time]
            gradients.update(before[-1:])
        level = own = 0
        taken = []
        lies: set[int] = set()  # where gradients are
        for number, (time, place, size) in enumerate(moments):
            if number in gradients:
                lies.add(place)
            level += size
            own += size if place in lies else 0
            if size < 0:
                lies.discard(place)
            taken.append((time, level, own))
        return taken


@contextmanager
def _unheard() -> Iterator[None]:
    """Within it, what C++ writes to standard error is dropped: the profiler tells of each start, of missing GPUs, and
    of memory from before it began, which no one can act upon."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _within(taken: Sequence[tuple[float, int, int]], begin: float, end: float) -> Levels:
    before = own_before = 0
    inside: list[tuple[int, int]] = []
    for time, level, own in taken:
        if time < begin:
            before, own_before = level, own
        elif time <= end:
            inside.append((level, own))
    all_of_it = [(before, own_before), *inside]
    return Levels(
        before,
        all_of_it[-1][0],
        max(level for level, _ in all_of_it),
        max(level - own for level, own in all_of_it),
        max(own for _, own in all_of_it),
    )


def _told(parameter: Tensor) -> None:
    """Notes in the trace where a gradient lies; of one of few rows, its indices and values."""
    assert parameter.grad is not None
    grad = parameter.grad
    for part in (grad._indices(), grad._values()) if grad.is_sparse else (grad,):
        with record_function(f"{_GRADIENT}{part.untyped_storage().data_ptr()}"):
            pass


def bytes_by_place(tree: Tree) -> dict[int, int]:
    """The memory that the tensors of a tree lie in, by its address."""
    found = {}
    for tensor in tensors(tree):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found
