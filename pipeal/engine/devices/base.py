"""What a stage asks of its device, and how a CPU does it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipeal.core.tree import Tree, carried, map_tensors, tensors
from pipeal.engine.devices.copies import to_pinned
from pipeal.engine.schedule import Action

Stamp: TypeAlias = Any
"""A moment on a device: seconds on the host's clock, or a CUDA event that will know them."""

Ready: TypeAlias = "torch.cuda.Event | None"
"""When a packet may be read; None where it already may."""

RUN_AHEAD = 3
"""Batches of work that may lie before a stage alone on its GPU: enough that this never waits for the host to speak, and
no more."""

RUN_AHEAD_SHARED = 2
"""The same for a stage that shares its GPU with others."""

_NOTHING = nullcontext()


class Stretch(NamedTuple):
    """Work of one part of a device, from stamp to stamp.

    Attributes:
        part: Its number.
        begin: The first stamp.
        end: The second.
        share: Where between them the part's own work begins and ends.
    """

    part: int
    begin: Stamp
    end: Stamp
    share: tuple[float, float] = (0.0, 1.0)


class Lane:
    """Copies between a device and its host, one after the other, beside the work of the device. On a CPU there is
    nothing beside: each is made at once."""

    def wait_for(self, ready: Ready) -> None:
        """Lets later copies wait for a mark."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copies; the host does not wait. On the host both are in memory of :meth:`Device.locked`."""
        into.copy_(source)

    def mark(self) -> Ready:
        """A mark after the copies given so far."""
        return None

    def stamp(self) -> Stamp:
        """Now, as the copies go."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Waits until the copies given so far are made: on the host they may then be read, and written over."""


class Device:
    """A CPU: everything is ready as soon as it is returned.

    Attributes:
        lags: Whether work has yet to be done when the host has given it.
        far: Whether another process works on it, and this one only knows of it.
        run_ahead: Batches of this stage's work that may lie before it; with 1 its host waits for each to end.
    """

    lags = False
    far = False
    run_ahead = RUN_AHEAD

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._far_streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def parts(self) -> Sequence[Device]:
        """The single devices that it consists of: itself, unless it is a row of them."""
        return (self,)

    @cached_property  # asked for by every action
    def types(self) -> list[str]:
        """The kinds of its parts, ``cpu`` or ``cuda``."""
        return sorted({part.device.type for part in self.parts})

    @property
    def names(self) -> list[str]:
        """What to call its parts."""
        return [str(part) for part in self.parts]

    def take(self, layer: nn.Module) -> None:
        """Brings a layer here."""
        layer.to(self.device)

    def wait_for(self, ready: Ready) -> None:
        """Lets later work here wait for a mark."""

    def active(self) -> AbstractContextManager[None]:
        """Within it, on this thread, work goes to this device."""
        return _NOTHING

    def mark_ready(self, tree: Tree) -> Ready:  # noqa: ARG002
        """A mark after the work given so far, for the reader of ``tree``."""
        return None

    def mark(self) -> Ready:
        """A mark after the work given so far."""
        return None

    def snapshot(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU of a tensor, as the work given so far leaves it; there once a later mark has passed."""
        return tensor.detach().to("cpu", copy=True)

    def receive(self, tree: Tree, ready: Ready) -> Tree:
        """Brings what another stage (or a loader) produced to this device, ready to be used here."""
        sources = {tensor.device for tensor in tensors(tree) if tensor.is_cuda}
        for source in sources:
            tree = self._fetch(tree, source, ready)
        return tree

    def _fetch(self, tree: Tree, source: torch.device, ready: Ready) -> Tree:
        """Copies what lies on a GPU, on a stream of this stage's own. The host waits for it: a CPU has no stream that
        would on its behalf."""
        stream = self._stream_on(source)
        if ready is not None:
            stream.wait_event(ready)
        with torch.cuda.stream(stream):
            arrived = map_tensors(lambda one: carried(one, to_pinned) if one.device == source else one, tree)
            done = stream.record_event(torch.cuda.Event(blocking=True))
        done.synchronize()  # so that the source may go as well
        return arrived

    def _stream_on(self, source: torch.device) -> torch.cuda.Stream:
        """This stage's own stream on the GPU where a packet comes from."""
        if source not in self._far_streams:
            self._far_streams[source] = torch.cuda.Stream(source)
        return self._far_streams[source]

    def follow_caller(self) -> None:
        """Lets later work here wait for what the calling thread has given to its own stream, such as new weights."""

    def lead_caller(self) -> None:
        """Lets what the calling thread gives to its own stream from now on wait for the work given here."""

    def lane(self) -> Lane:
        """A further lane for copies, of its own."""
        return Lane()

    def room(self, size: int) -> Tensor:
        """So many bytes of its memory, as a tensor ``(size,)`` of ``uint8``, for work given here from now on."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def locked(self, size: int) -> Tensor:
        """So many bytes of the host's memory, as :meth:`room`, which lanes copy from and to."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def end_batch(self) -> None:
        """Marks the end of a batch's work."""

    def limit_run_ahead(self) -> None:
        """Waits, before a new batch, until the device is fewer than ``run_ahead`` batches behind."""

    def stamp(self) -> Stamp:
        """Now, as this device's work goes."""
        return time.perf_counter()

    def stretches(self, action: Action | None, begin: Stamp) -> Iterable[Stretch]:  # noqa: ARG002
        """The work of an action that began at a stamp and ends now, on each part; None for what is no action."""
        return (Stretch(0, begin, self.stamp()),)

    def seconds(self, stamp: Stamp) -> float | None:
        """A stamp on the host's clock; None while the device has not come to it."""
        return float(stamp)

    def tie_clock(self) -> None:
        """Ties its clock to the host's from now on; it has nothing to do meanwhile. A CPU's is the host's."""

    def error_s(self, stamp: Stamp) -> float:  # noqa: ARG002
        """How far off :meth:`seconds` may be, to either side."""
        return 0.0

    def reuse(self, *stamps: Stamp) -> None:
        """Lets stamps that no one will ask about any more be made into others."""

    def between(self, begin: Stamp, end: Stamp) -> float:
        """The seconds from one stamp to another that the device has both come to."""
        return float(end - begin)

    def synchronize(self) -> None:
        """Waits until all work given to this device has ended."""

    def free_bytes(self) -> int | None:
        """The free memory; None where the system does not say."""
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            return None

    def give_memory_back(self) -> None:
        """Gives what the allocator keeps for later back to the device."""

    def __str__(self) -> str:
        return str(self.device)


class RemoteDevice(Device):
    """A device that another process works on; what belongs to it stays here as it is.

    Args:
        name: What it is called there, for messages.
    """

    far = True

    def __init__(self, name: str) -> None:
        super().__init__(torch.device("cpu"))
        self.name = name

    def take(self, layer: nn.Module) -> None:
        """Does nothing."""

    def __str__(self) -> str:
        return self.name
