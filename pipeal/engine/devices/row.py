"""Several devices as the place of one layer: backpropagation climbs them, and comes down again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from pipeal.core.spread import Spreads, told_of_handovers
from pipeal.core.tree import Tree, tensors
from pipeal.engine.devices.base import Device, Ready, Stamp, Stretch
from pipeal.engine.schedule import Action


class DeviceRow(Device):
    """The parts of a stage whose one layer lies on several devices. They take turns: one works at a time.

    Input is received on the first; losses, and what comes out, are on the last, which is its ``device``.

    Args:
        parts: The devices in order; one may come more than once.
        sizes: How many blocks of the layer are on each.

    Attributes:
        parameters: How many are on each.
        moves: Since the last stamp: whether work arrived or left, at which part, and when.
    """

    def __init__(self, parts: Sequence[Device], sizes: Sequence[int]) -> None:
        super().__init__(parts[-1].device)
        self._parts = list(parts)
        self.sizes = list(sizes)
        self.lags = any(part.lags for part in parts)
        self.parameters = [1] * len(parts)
        self.moves: list[tuple[bool, int, Stamp]] = []

    @property
    def parts(self) -> Sequence[Device]:
        """As given."""
        return self._parts

    def take(self, layer: nn.Module) -> None:
        """Spreads the layer."""
        assert isinstance(layer, Spreads)
        self.parameters = layer.spread([part.device for part in self.parts], self.sizes)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, on this thread, work goes to each part's own stream, and this row hears of hand-overs."""
        with ExitStack() as stack:
            for part in reversed(self.parts):  # the first one's is the current device
                stack.enter_context(part.active())
            stack.enter_context(told_of_handovers(self))
            yield

    def left(self, part: int) -> None:
        """Notes when."""
        self.moves.append((False, part, self.parts[part].stamp()))

    def arrived(self, part: int) -> None:
        """Notes when."""
        self.moves.append((True, part, self.parts[part].stamp()))

    def mark_ready(self, tree: Tree) -> Ready:
        """A mark on the device that the tree is on."""
        found = tensors(tree)
        return self._at(found[0]).mark_ready(tree) if found else None

    def mark(self) -> Ready:
        """A mark after the work of all parts."""
        lagging = [part for part in self.parts if part.lags]
        if not lagging:
            return None
        *others, last = lagging
        for other in others:
            last.wait_for(other.mark())
        return last.mark()

    def snapshot(self, tensor: Tensor) -> Tensor:
        """As the device does that the tensor is on."""
        return self._at(tensor).snapshot(tensor)

    def receive(self, tree: Tree, ready: Ready) -> Tree:
        """Brings it to the first part."""
        return self.parts[0].receive(tree, ready)

    def follow_caller(self) -> None:
        """Each part does."""
        for part in self.parts:
            part.follow_caller()

    def lead_caller(self) -> None:
        """Each part does."""
        for part in self.parts:
            part.lead_caller()

    def end_batch(self) -> None:
        """Each part does."""
        for part in self.parts:
            part.end_batch()

    def limit_run_ahead(self) -> None:
        """Each part does."""
        for part in self.parts:
            part.limit_run_ahead()

    def stamp(self) -> Stamp:
        """A stamp of each part; forgets the moves before it."""
        self.moves.clear()
        return tuple(part.stamp() for part in self.parts)

    def stretches(self, action: Action | None, begin: Stamp) -> Iterator[Stretch]:
        """Of a forward and a backward between their hand-overs.

        An update is one call of one optimizer: each part is taken to have the share of it that it has of the
        parameters.
        """
        if action in (Action.FORWARD, Action.BACKWARD):
            at = self.moves[0][1] if self.moves else 0 if action is Action.FORWARD else len(self.parts) - 1
            since = begin[at]
            for arrives, part, stamp in self.moves:
                if arrives:
                    at, since = part, stamp
                else:
                    yield Stretch(part, since, stamp)
            yield Stretch(at, since, self.parts[at].stamp())
            self.moves.clear()
            return
        shares = _shares(self.parameters) if action is Action.UPDATE else [(0.0, 1.0)] * len(self.parts)
        for number, (device, since, share) in enumerate(zip(self.parts, begin, shares, strict=True)):
            yield Stretch(number, since, device.stamp(), share)

    def synchronize(self) -> None:
        """Waits for all parts."""
        for part in self.parts:
            part.synchronize()

    def free_bytes(self) -> int | None:
        """Of the fullest part, as far as that is known."""
        return min((free for part in self.parts if (free := part.free_bytes()) is not None), default=None)

    def give_memory_back(self) -> None:
        """Each part does."""
        for part in self.parts:
            part.give_memory_back()

    def _at(self, tensor: Tensor) -> Device:
        """The last part there, where what was computed last is; any will do for what is nowhere here."""
        here = [part for part in self.parts if _same(part.device, tensor.device)]
        return here[-1] if here else self.parts[-1]

    def __str__(self) -> str:
        return " + ".join(self.names)


def _shares(weights: Sequence[int]) -> list[tuple[float, float]]:
    """Where the shares of a whole begin and end.

    >>> _shares([1, 3])
    [(0.0, 0.25), (0.25, 1.0)]
    """
    ends = [0, *accumulate(weights)]
    whole = ends[-1] or 1
    return [(begin / whole, end / whole) for begin, end in pairwise(ends)]


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.type == "cpu" or one.index == other.index)
