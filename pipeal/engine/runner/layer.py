"""One layer's forward, backward and update: the innermost runner, and the two kinds of wrappers around it.

A wrapper is a file beside this one and a line of :mod:`pipeal.engine.runner.build`, which says where it stands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeal.core.errors import LayerError, ScheduleError
from pipeal.core.modules import module_of
from pipeal.core.packet import Packet
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree, copied, detach_alone, map_tensors, tensors, versions
from pipeal.engine.schedule import Action


@dataclass(frozen=True)
class Passed:
    """What a forward gave.

    Attributes:
        onward: What the next layer gets.
        losses: The layer's losses, detached; None where it reports none.
    """

    onward: tuple[Tree, Tree]
    losses: list[Tensor] | None


@dataclass(eq=False)
class Runner:
    """Runs one layer by another runner of it: what a wrapper does not override goes straight on.

    For each batch it is asked for ``forward``, ``backward``, ``learns`` and ``update``, in this order.

    Attributes:
        inner: What is wrapped.
    """

    inner: Runner

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """Goes forward.

        Args:
            packet: The batch; its own tensors may be gone.
            x: The layer's input.
            y: Its target.
            rows: Which samples these are, where they are a part of the batch.
        """
        return self.inner.forward(packet, x, y, rows)

    def backward(self, packet: Packet, rows: range | None = None) -> None:
        """Goes back through what the last forward kept."""
        self.inner.backward(packet, rows)

    def learns(self) -> bool:
        """Whether the layer learns from this batch; else it is as if the batch had never been."""
        return self.inner.learns()

    def update(self, packet: Packet) -> None:
        """Updates the layer. Not asked for after every batch."""
        self.inner.update(packet)

    def forget(self) -> None:
        """Drops what an earlier, perhaps failed, life of the pipeline left behind."""
        self.inner.forget()


class Around(Runner, ABC):
    """A wrapper that does the same around all three actions."""

    @abstractmethod
    def around(self, action: Action, packet: Packet, rows: range | None) -> AbstractContextManager[None]:
        """Within it, the action on a batch, or on some rows of it, goes on."""

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`."""
        with self.around(Action.FORWARD, packet, rows):
            return self.inner.forward(packet, x, y, rows)

    def backward(self, packet: Packet, rows: range | None = None) -> None:
        """As :meth:`Runner.backward`."""
        with self.around(Action.BACKWARD, packet, rows):
            self.inner.backward(packet, rows)

    def update(self, packet: Packet) -> None:
        """As :meth:`Runner.update`."""
        with self.around(Action.UPDATE, packet, None):
            self.inner.update(packet)


class Plain(Runner):
    """The layer itself: the innermost runner, with none within it."""

    def __init__(self, layer: TrainableLayer) -> None:
        self._layer = layer
        self._kept = [kept for part in module_of(layer).modules() for kept in (part._parameters, part._buffers)]

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:  # noqa: ARG002
        """Calls the layer.

        Raises:
            DataError: What came was written to by its caller.
            ScheduleError: It changed its input in place.
            LayerError: It returns no pair, or a tensor of a graph, through which the next layer's gradient would come.
        """
        _require_unchanged(packet)
        before = versions((x, y))
        onward = self._layer(x, y)
        losses = self._layer.loss()
        if versions((x, y)) != before:
            raise ScheduleError(
                "the forward changed its input in place, which the layer before still needs for its backward; "
                "use operators that do not (such as inplace=False) on what a layer receives; or what made the batch "
                "filled its tensors again meanwhile: hand over new ones for each, or clones"
            )
        if not isinstance(onward, tuple | list) or len(onward) != 2:
            raise LayerError(
                f"the forward returned {_called(onward)}; expected a pair: what the next layer gets, and its target"
            )
        found = tensors(onward)
        if any(tensor.requires_grad for tensor in found):
            raise LayerError(
                "the forward returned a tensor that is not detached: a gradient of the next layer would flow back into "
                "this one; return detach(out), y (pipeal.core.tree.detach, for a tensor or any nesting of them)"
            )
        # A user's own loss() may hold a graph, be numbers already, or hold nothing.
        detached = [detach_alone(_as_tensor(loss)) for loss in (() if losses is None else losses)]
        is_own = self._is_own()
        if any(map(is_own, found)):
            onward = map_tensors(lambda one: copied(one) if is_own(one) else one, onward)
        return Passed(onward, [one.clone() if is_own(one) else one for one in detached] or None)

    def _is_own(self) -> Callable[[Tensor], bool]:
        """Whether a tensor lies in the memory of a weight or buffer of the layer, into which its update writes while
        others still read. Memory may be another in each forward, as with an offload."""
        own = [one for kept in self._kept if kept for one in kept.values() if one is not None]
        try:
            places = sorted(map(Tensor.data_ptr, own))
        except _NO_MEMORY:
            places = sorted(map(_place, own))

        def is_own(tensor: Tensor) -> bool:
            try:
                memory = tensor.untyped_storage()
                begin = memory.data_ptr()
            except _NO_MEMORY:
                return False
            first = bisect_left(places, begin)
            return first < len(places) and places[first] < begin + memory.nbytes()

        return is_own

    def backward(self, packet: Packet, rows: range | None = None) -> None:  # noqa: ARG002
        """Backward of its losses.

        Raises:
            DataError: What the forward has seen was written to by its caller.
        """
        _require_unchanged(packet)
        self._layer.backward()

    def learns(self) -> bool:
        """By itself, from every batch."""
        return True

    def update(self, packet: Packet) -> None:
        """Its optimizers' step, at the learning rate of this batch."""
        self._layer.scale_lr(packet.lr_scale)
        self._layer.update()

    def forget(self) -> None:
        """A layer keeps what it has."""


_NO_MEMORY = (RuntimeError, ValueError)
"""What is raised where a tensor has none of its own to point at: sparse, without a shape yet, or only looked at."""


def _place(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except _NO_MEMORY:
        return 0


def _called(found: object) -> str:
    """In a few words, what a forward returned in the place of a pair."""
    return f"a tuple of {len(found)}" if isinstance(found, tuple) else f"an object of the class {type(found).__name__}"


def _as_tensor(loss: Any) -> Tensor:
    """Where it is, whatever the default device of this thread."""
    return loss if isinstance(loss, Tensor) else torch.as_tensor(loss, device="cpu")


def _require_unchanged(packet: Packet) -> None:
    if packet.handed_over is not None:
        packet.handed_over.require_unchanged(packet.batch)
