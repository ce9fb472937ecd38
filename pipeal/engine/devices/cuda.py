"""One stage's share of a GPU, and the rules by which streams and hosts wait for each other.

CUDA rules kept here (see also the CUDA semantics notes of PyTorch):

* Each stage has a compute stream and a copy stream of its own. Forward, backward and update run on the first;
  packets arrive on the second, so that the copy of the next packet overlaps with computing this one.
* A producer records an event when a packet is ready; its reader waits for it on his own stream.
* A tensor used on another stream than it was allocated on is given to ``record_stream``: the caching allocator
  would otherwise hand its memory out again while it is still read.
* Nothing here waits for the device on the host, except :meth:`Device.synchronize`, a packet that goes back to the
  CPU, :meth:`Device.limit_run_ahead`, which keeps the host a few batches ahead, and :meth:`Device.tie_clock`, before
  a run and after each report.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeal.core.errors import PlacementError
from pipeal.core.tree import Tree, carried, map_tensors, tensors
from pipeal.engine.devices.base import Device, Lane, Ready, Stamp
from pipeal.engine.devices.copies import pinned, to_pinned
from pipeal.engine.devices.locked import locked_memory

_POLL_S = 2e-4

CLOCK_DRIFT = 1e-4
"""How much faster or slower than the host's a GPU's clock is taken to be, at most. Crystals are within some 50
millionths, each; that a time is a float32 of milliseconds is a thousandth of this."""


class CudaDevice(Device):
    """One stage's share of a GPU. Several may live on one GPU."""

    lags = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.compute = torch.cuda.Stream(device)
        self.copy = torch.cuda.Stream(device)
        self._ends: deque[torch.cuda.Event] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._zero = torch.cuda.Event(enable_timing=True)
        self.tie_clock()

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
        return self.compute.record_event()

    def wait_for(self, ready: Ready) -> None:
        """Waits on the compute stream."""
        if ready is not None:
            self.compute.wait_event(ready)

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
            arrived = map_tensors(lambda tensor: carried(tensor, self._copy), tree)
        self.compute.wait_stream(self.copy)
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

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            tensor = pinned(tensor)  # the host allocator keeps the block until the copy has passed
        return tensor.to(self.device, non_blocking=True)

    def follow_caller(self) -> None:
        """Waits, on the compute stream, for an event on the caller's."""
        self.compute.wait_stream(torch.cuda.current_stream(self.device))

    def lead_caller(self) -> None:
        """Waits, on the caller's stream, for an event on each of this stage's; the host waits for nothing."""
        for stream in (self.copy, self.compute):
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def lane(self) -> Lane:
        """A stream."""
        return CudaLane(self.device)

    def locked(self, size: int) -> Tensor:
        """Page-locked, of exactly this size; raises as :func:`~pipeal.engine.devices.locked.locked_memory`."""
        return locked_memory(size, self.device)

    def end_batch(self) -> None:
        """Records an event on the compute stream."""
        # One that lets its waiter sleep: a core that each stage's host spins on would be taken from those with work.
        self._ends.append(self.compute.record_event(torch.cuda.Event(blocking=True)))

    def limit_run_ahead(self) -> None:
        """Bounds memory: the host gives work much faster than the device does it, and the packets that lie
        between two devices would grow with the distance between their hosts and them."""
        if len(self._ends) >= self.run_ahead:
            self._ends.popleft().synchronize()

    def stamp(self) -> Stamp:
        """An event on the compute stream."""
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        return self.compute.record_event(event)

    def reuse(self, *stamps: Stamp) -> None:
        """Keeps the events: to make and free one takes longer than to record it."""
        self._spare += stamps

    def seconds(self, stamp: Stamp) -> float | None:
        """The event's time on the host's clock, from an event whose time is known on both."""
        return self._zero_s + self._since_zero(stamp) if stamp.query() else None

    def tie_clock(self) -> None:
        """By an event that passes between two looks at the host's clock; nothing lies before it."""
        self.synchronize()
        before = time.perf_counter()
        self.compute.record_event(self._zero)
        self._zero.synchronize()
        after = time.perf_counter()
        self._zero_s, self._zero_error_s = (before + after) / 2, (after - before) / 2

    def error_s(self, stamp: Stamp) -> float:
        """Of that event, and what the clocks have drifted apart since then."""
        return self._zero_error_s + CLOCK_DRIFT * abs(self._since_zero(stamp))

    def _since_zero(self, stamp: Stamp) -> float:
        return float(self._zero.elapsed_time(stamp)) / 1e3

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


class CudaLane(Lane):
    """A stream for copies between a GPU and page-locked memory of the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def wait_for(self, ready: Ready) -> None:
        """Waits on the stream."""
        if ready is not None:
            self._stream.wait_event(ready)

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copies on the stream."""
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)

    def mark(self) -> Ready:
        """Records an event on the stream."""
        return self._stream.record_event()

    def stamp(self) -> Stamp:
        """As :meth:`mark`, with a time."""
        return self._stream.record_event(torch.cuda.Event(enable_timing=True))

    def synchronize(self) -> None:
        """Waits in steps that Ctrl-C can end."""
        while not self._stream.query():
            time.sleep(_POLL_S)


def ready_now(tree: Tree) -> Ready:
    """A mark after the work that the calling thread has given so far on its own streams, for a tree it made."""
    devices = {tensor.device for tensor in tensors(tree) if tensor.is_cuda}
    if not devices:
        return None
    if len(devices) > 1:
        raise PlacementError(f"one packet lies on several devices: {sorted(map(str, devices))}")
    return torch.cuda.current_stream(devices.pop()).record_event()


def take_over(tree: Tree, ready: Ready) -> Tree:
    """Lets the calling thread's own streams wait for what a stage made, and keeps its memory until they have."""
    for tensor in tensors(tree):
        if tensor.is_cuda:
            stream = torch.cuda.current_stream(tensor.device)
            if ready is not None:
                stream.wait_event(ready)
            tensor.record_stream(stream)
    return tree
