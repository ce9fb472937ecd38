"""A layer that lies on several devices: what it must be able to do, and who hears when its work passes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Spreads(Protocol):
    """A layer that trains itself and may lie on several devices, as backpropagation through a row of blocks."""

    def block_count(self) -> int:
        """Into how many parts it can be divided at most; 1 where it cannot."""
        ...

    def spread(self, devices: Sequence[torch.device], sizes: Sequence[int]) -> list[int]:
        """Puts its first ``sizes[0]`` blocks on ``devices[0]``, the next ``sizes[1]`` on ``devices[1]``, and so on.

        Optimizer states follow their weights; losses are taken on the last device. A forward moves what blocks hand on
        between devices within autograd, so that gradients come back the same way.

        Returns:
            How many parameters are on each.

        Raises:
            PipealError: Two parts share a parameter or a buffer.
        """
        ...


def blocks_of(layer: object) -> int:
    """How many devices a layer can be spread over: the number of its blocks; 1 for a layer that cannot be spread."""
    return layer.block_count() if isinstance(layer, Spreads) else 1


class Handovers(Protocol):
    """Hears of each part of a layer when its work on a batch begins and ends, in both directions."""

    def left(self, part: int) -> None:
        """The part has done all it has to do for now."""
        ...

    def arrived(self, part: int) -> None:
        """What the part needs is on its device."""
        ...


class _Local(threading.local):
    heard_by: Handovers | None = None


_local = _Local()


@contextmanager
def told_of_handovers(to: Handovers) -> Iterator[None]:
    """Within it, on this thread, ``to`` hears of hand-overs."""
    before, _local.heard_by = _local.heard_by, to
    try:
        yield
    finally:
        _local.heard_by = before


def handovers() -> Handovers | None:
    """Who hears of hand-overs on this thread, if any."""
    return _local.heard_by
