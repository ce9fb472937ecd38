"""One small layer over CPU and CUDA: where a stage computes, how a packet comes to it, when things happened.

CUDA rules kept here (see also the CUDA semantics notes of PyTorch):

* Each stage has a compute stream and a copy stream of its own. Forward, backward and update run on the first;
  packets arrive on the second, so that the copy of the next packet overlaps with computing this one.
* A producer records an event when a packet is ready; whoever reads the packet waits for it on his own stream.
* A tensor used on another stream than it was allocated on is given to ``record_stream``: the caching allocator
  would otherwise hand its memory out again while it is still read.
* Nothing here waits for the device on the host, except :meth:`Device.synchronize`, a packet that goes back to the
  CPU, and :meth:`Device.limit_run_ahead`, which keeps the host a few batches ahead.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from pipeal.engine.pinned import pinned, to_pinned
from pipeal.errors import PlacementError
from pipeal.packet import Tree, map_tensors, tensors

Stamp: TypeAlias = Any
"""A moment on a device: seconds on the host's clock, or a CUDA event that will know them."""

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]

Ready: TypeAlias = "torch.cuda.Event | None"
"""When a packet may be read; None where it already may."""


RUN_AHEAD = 3
"""Batches of work that may lie before a GPU: enough that it never waits for the host to speak, and no more."""


_POLL_S = 2e-4
_NOTHING = nullcontext()


class Device:
    """A CPU: everything is ready as soon as it is returned.

    Attributes:
        lags: Whether work has yet to be done when the host has given it.
        far: Whether another process works on it, and this one only knows of it.
    """

    lags = False
    far = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._fetching: dict[torch.device, torch.cuda.Stream] = {}

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
        if source not in self._fetching:
            self._fetching[source] = torch.cuda.Stream(source)
        stream = self._fetching[source]
        if ready is not None:
            stream.wait_event(ready)
        with torch.cuda.stream(stream):
            arrived = map_tensors(lambda tensor: to_pinned(tensor) if tensor.device == source else tensor, tree)
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
        done.synchronize()  # so that the source may go as well
        return arrived

    def follow_caller(self) -> None:
        """Lets later work here wait for what the calling thread has given to its own stream, such as new weights."""

    def lead_caller(self) -> None:
        """Lets what the calling thread gives to its own stream from now on wait for the work given here."""

    def end_batch(self) -> None:
        """Marks the end of a batch's work."""

    def limit_run_ahead(self) -> None:
        """Waits, before a new batch, until the device is at most :data:`RUN_AHEAD` batches behind."""

    def stamp(self) -> Stamp:
        """Now, as this device's work goes."""
        return time.perf_counter()

    def seconds(self, stamp: Stamp) -> float | None:
        """A stamp on the host's clock; None while the device has not come to it."""
        return float(stamp)

    def between(self, begin: Stamp, end: Stamp) -> float:
        """The seconds from one stamp to another that the device has both come to."""
        return float(end - begin)

    def synchronize(self) -> None:
        """Waits until all work given to this device has ended."""

    def free_bytes(self) -> int | None:
        """The memory that nobody uses; None where the system does not say."""
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            return None

    def give_memory_back(self) -> None:
        """Gives what the allocator keeps for later back to the device."""

    def __str__(self) -> str:
        return str(self.device)


class FarDevice(Device):
    """A device that another process works on.

    Args:
        name: What it is called there, for messages.
        device: Where this process keeps what belongs to it: ``meta`` for nowhere.
    """

    far = True

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(device)
        self.name = name

    def __str__(self) -> str:
        return self.name


class CudaDevice(Device):
    """One stage's share of a GPU. Several may live on one GPU."""

    lags = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.compute = torch.cuda.Stream(device)
        self.copy = torch.cuda.Stream(device)
        self._ends: deque[torch.cuda.Event] = deque()
        self._far_copy: dict[torch.device, torch.cuda.Stream] = {}
        zero = torch.cuda.Event(enable_timing=True)
        zero.record(self.compute)
        zero.synchronize()
        self._zero = (zero, time.perf_counter())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, on this thread, work goes to this stage's compute stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.compute):
            yield

    def mark_ready(self, tree: Tree) -> Ready:
        """Records an event on the compute stream."""
        return self.mark() if any(tensor.is_cuda for tensor in tensors(tree)) else None

    def mark(self) -> Ready:
        """Records an event on the compute stream."""
        event = torch.cuda.Event()
        event.record(self.compute)
        return event

    def snapshot(self, tensor: Tensor) -> Tensor:
        """Copies to pinned memory on the compute stream, so before any later update; the host waits for nothing."""
        return to_pinned(tensor) if tensor.is_cuda else super().snapshot(tensor)

    def receive(self, tree: Tree, ready: Ready) -> Tree:
        """Copies on the copy stream and lets the compute stream wait for it; the host waits for nothing."""
        here = all(tensor.device == self.device for tensor in tensors(tree))
        if here:
            if ready is not None:
                self.compute.wait_event(ready)
            for tensor in tensors(tree):
                tensor.record_stream(self.compute)
            return tree
        with self._copying(tree, ready):
            arrived = map_tensors(self._copy, tree)
            done = torch.cuda.Event()
            done.record(self.copy)
        self.compute.wait_event(done)
        for tensor in tensors(arrived):
            tensor.record_stream(self.compute)
        return arrived

    @contextmanager
    def _copying(self, tree: Tree, ready: Ready) -> Iterator[None]:
        """Makes the copy streams of both ends current: a copy between GPUs synchronises with both."""
        sources = {tensor.device for tensor in tensors(tree) if tensor.is_cuda and tensor.device != self.device}
        if len(sources) > 1:
            raise PlacementError(f"one packet lies on several devices: {sorted(map(str, sources))}")
        if ready is not None:
            self.copy.wait_event(ready)
        source = next(iter(sources), None)
        if source is None:
            with torch.cuda.device(self.device), torch.cuda.stream(self.copy):
                yield
            return
        theirs = self._stream_on(source)
        if ready is not None:
            theirs.wait_event(ready)
        with torch.cuda.stream(theirs), torch.cuda.device(self.device), torch.cuda.stream(self.copy):
            for tensor in tensors(tree):
                if tensor.device == source:
                    tensor.record_stream(theirs)
            yield

    def _stream_on(self, source: torch.device) -> torch.cuda.Stream:
        """This stage's copy stream on the GPU where a packet comes from."""
        if source not in self._far_copy:
            self._far_copy[source] = torch.cuda.Stream(source)
        return self._far_copy[source]

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            tensor = pinned(tensor)  # the host allocator keeps the block until the copy has passed
        return tensor.to(self.device, non_blocking=True)

    def follow_caller(self) -> None:
        """Waits, on the compute stream, for an event on the caller's."""
        with torch.cuda.device(self.device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
        self.compute.wait_event(event)

    def lead_caller(self) -> None:
        """Waits, on the caller's stream, for an event on each of this stage's; the host waits for nothing."""
        with torch.cuda.device(self.device):
            for stream in (self.copy, self.compute):
                event = torch.cuda.Event()
                event.record(stream)
                torch.cuda.current_stream(self.device).wait_event(event)

    def end_batch(self) -> None:
        """Records an event on the compute stream."""
        # One that lets its waiter sleep: a core that each stage's host spins on would be taken from those with work.
        event = torch.cuda.Event(blocking=True)
        event.record(self.compute)
        self._ends.append(event)

    def limit_run_ahead(self) -> None:
        """Bounds memory: the host gives work much faster than the device does it, and the packets that lie
        between two devices would grow with the distance between their hosts and them."""
        if len(self._ends) >= RUN_AHEAD:
            self._ends.popleft().synchronize()

    def stamp(self) -> Stamp:
        """An event on the compute stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.compute)
        return event

    def seconds(self, stamp: Stamp) -> float | None:
        """The event's time on the host's clock, from a first event whose time is known on both."""
        if not stamp.query():
            return None
        event, seconds = self._zero
        return seconds + event.elapsed_time(stamp) / 1e3

    def between(self, begin: Stamp, end: Stamp) -> float:
        """By the device's own clock, which is finer than the way over the host's."""
        return float(begin.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Waits for both streams, in steps that Ctrl-C can end."""
        while not (self.copy.query() and self.compute.query()):
            time.sleep(_POLL_S)

    def free_bytes(self) -> int | None:
        """As the driver has it."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def give_memory_back(self) -> None:
        """Waits for both streams: what they still use cannot be given back."""
        self.synchronize()
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()


def ready_now(tree: Tree) -> Ready:
    """A mark after the work that the calling thread has given so far on its own streams, for a tree it made."""
    devices = {tensor.device for tensor in tensors(tree) if tensor.is_cuda}
    if not devices:
        return None
    if len(devices) > 1:
        raise PlacementError(f"one packet lies on several devices: {sorted(map(str, devices))}")
    device = devices.pop()
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
    return event


def take_over(tree: Tree, ready: Ready) -> Tree:
    """Lets the calling thread's own streams wait for what a stage made, and keeps its memory until they have."""
    for tensor in tensors(tree):
        if tensor.is_cuda:
            stream = torch.cuda.current_stream(tensor.device)
            if ready is not None:
                stream.wait_event(ready)
            tensor.record_stream(stream)
    return tree


def parse_device(name: str | torch.device) -> torch.device:
    """A device that exists here.

    Raises:
        PlacementError: The name is no device, the kind is not supported, or this machine has none such.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PlacementError(f"{name!r} is not a device; expected 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise PlacementError(f"device {str(device)!r} is not supported; expected 'cpu', 'cuda' or 'cuda:N'")
    count = torch.cuda.device_count()
    # Of the name: torch keeps eight bits of a number, and makes cuda:0 of 'cuda:256', and cuda:-25 of 'cuda:999'.
    index = int(str(name).partition(":")[2] or 0)
    if not 0 <= index < count:
        has = f"{count} CUDA device(s): cuda:0 to cuda:{count - 1}" if count else "no CUDA device; use 'cpu'"
        raise PlacementError(f"device 'cuda:{index}' does not exist; this machine has {has}")
    return torch.device("cuda", index)


def fastest_precision(name: str | torch.device) -> Precision:
    """``bf16`` where a device has matrix units for it, which make it several times faster; else ``fp32``."""
    device = parse_device(name)
    if device.type == "cuda":
        # Emulated before compute capability 8.0.
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    # Without these units (AMX) a CPU spends what it gains in products on casting. Private, and so may be missing.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return "bf16" if has_amx() else "fp32"


def open_device(name: str | torch.device) -> Device:
    """A stage's own handle on a device, with streams of its own where the device has streams."""
    device = parse_device(name)
    return CudaDevice(device) if device.type == "cuda" else Device(device)
