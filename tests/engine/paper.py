"""GPUs on paper: streams and events that order work, and do none, so that the stream rules are checked without a GPU.

Every stream has a vector clock, as PyTorch's own sanitizer of streams has. Work on a stream ticks it; an event carries
a stream's clock to the stream that waits for it; a host that has waited passes on what it knows to the work it gives
next. Three rules follow, whatever the timing of the moment:

* who reads a tensor on a stream comes after who wrote it, and who writes it after all who used it;
* the host reads what was copied to it after it has waited for the copy;
* a tensor that is freed has no readers left on another stream than its own, unless it was given to ``record_stream``
  for that stream: the allocator would otherwise hand its memory out under them.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal.core.protocols import Path
from pipeal.core.tree import Tree, map_tensors, tensors

Clock = defaultdict[int, int]


def _clock() -> Clock:
    return defaultdict(int)


def _merge(into: Clock, other: Mapping[int, int]) -> None:
    for stream, tick in other.items():
        into[stream] = max(into[stream], tick)


class World:
    """The GPUs of a machine, and what went wrong on them."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.broken: list[str] = []
        self.copies: list[tuple[str, str]] = []
        self.lock = threading.RLock()
        self.done = _clock()  # what some host has seen to be over
        self.streams = 0
        self.default = [PaperStream(torch.device("cuda", index), self) for index in range(gpus)]
        self._local = threading.local()

    @property
    def host(self) -> Clock:
        """What the calling thread has waited for."""
        if not hasattr(self._local, "clock"):
            self._local.clock = _clock()
        return self._local.clock

    @property
    def current(self) -> list[Any]:
        """The calling thread's current streams, by GPU; and its current GPU, last."""
        if not hasattr(self._local, "current"):
            self._local.current = [*self.default, 0]
        return self._local.current

    def stream_on(self, device: Any = None) -> PaperStream:
        index = self.current[-1] if device is None else torch.device(device).index
        return self.current[self.current[-1] if index is None else index]

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before, self.current[-1] = self.current[-1], torch.device(device).index or 0
        try:
            yield
        finally:
            self.current[-1] = before

    @contextmanager
    def on_stream(self, stream: PaperStream) -> Iterator[None]:
        index = stream.device.index
        before, self.current[index] = self.current[index], stream
        try:
            with self.on_device(stream.device):
                yield
        finally:
            self.current[index] = before

    def make(self, device: Any) -> PaperTensor:
        """A tensor, written by work on the current stream of its device, as that of the allocator."""
        made = PaperTensor(self, torch.device(device))
        if made.is_cuda:
            self.write(made)
        return made

    def write(self, tensor: PaperTensor) -> None:
        with self.lock:
            stream = self.stream_on(tensor.device)
            tensor.memory.written = stream.tick()
            for user, tick in tensor.memory.uses.items():
                if stream.clock[user] < tick:
                    self.broken.append(f"a tensor is written on stream {stream.number} while stream {user} uses it")
            tensor.memory.uses[stream.number] = tensor.memory.written[1]

    def read(self, tensor: PaperTensor, stream: PaperStream | None = None) -> None:
        """Has work on a stream, the current one of its device by default, read a tensor."""
        if not tensor.is_cuda:
            arrives, when = tensor.arrives
            if self.done[arrives] < when:
                self.broken.append(f"the host reads what stream {arrives} copies before it is there")
            return
        with self.lock:
            stream = stream or self.stream_on(tensor.device)
            number, tick = stream.tick()
            writer, written = tensor.memory.written
            if stream.clock[writer] < written:
                self.broken.append(f"a tensor of stream {writer} is read on stream {stream.number} before it is there")
            tensor.memory.uses[number] = tick

    def freed(self, memory: _Memory) -> None:
        with self.lock:
            for stream, tick in memory.uses.items():
                over = max(memory.home.clock[stream], self.done[stream]) >= tick
                if not (over or stream == memory.home.number or stream in memory.recorded):
                    self.broken.append(f"memory of stream {memory.home.number} is freed while stream {stream} uses it")

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Puts these GPUs in the place of the machine's."""
        patch.setattr(torch.cuda, "device_count", lambda: self.gpus)
        patch.setattr(torch.cuda, "synchronize", lambda _=None: self.synchronize())
        patch.setattr(torch.cuda, "Stream", lambda device: PaperStream(torch.device(device), self))
        patch.setattr(torch.cuda, "Event", lambda **_: PaperEvent(self))
        patch.setattr(torch.cuda, "stream", self.on_stream)
        patch.setattr(torch.cuda, "device", self.on_device)
        patch.setattr(torch.cuda, "current_stream", self.stream_on)

    def synchronize(self) -> None:
        """The calling thread has waited for everything."""
        with self.lock:
            for number, tick in self.ticks.items():
                self.done[number] = self.host[number] = tick

    @property
    def ticks(self) -> Clock:
        if not hasattr(self, "_ticks"):
            self._ticks = _clock()
        return self._ticks


class PaperStream:
    def __init__(self, device: torch.device, world: World) -> None:
        self.device, self.world = device, world
        self.number = world.streams
        world.streams += 1
        self.clock = _clock()

    def tick(self) -> tuple[int, int]:
        """Gives it a piece of work."""
        _merge(self.clock, self.world.host)
        self.clock[self.number] += 1
        self.world.ticks[self.number] = self.clock[self.number]
        return self.number, self.clock[self.number]

    def record_event(self, event: PaperEvent | None = None) -> PaperEvent:
        event = event or PaperEvent(self.world)
        event.record(self)
        return event

    def wait_stream(self, stream: PaperStream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: PaperEvent) -> None:
        with self.world.lock:
            _merge(self.clock, event.clock)

    def query(self) -> bool:
        """Nothing takes time; who asks has waited."""
        with self.world.lock:
            _merge(self.world.done, self.clock)
            _merge(self.world.host, self.clock)
        return True


class PaperEvent:
    def __init__(self, world: World) -> None:
        self.world = world
        self.clock: Mapping[int, int] = {}

    def record(self, stream: PaperStream) -> None:
        with self.world.lock:
            stream.tick()
            self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        with self.world.lock:
            _merge(self.world.done, self.clock)
            _merge(self.world.host, self.clock)

    def query(self) -> bool:
        return True  # teaches nothing: it might have been false

    def elapsed_time(self, other: PaperEvent) -> float:
        return 0.0


class _Memory:
    """What stays of a tensor that is no more: who used it."""

    def __init__(self, home: PaperStream) -> None:
        self.home = home
        self.written = (home.number, 0)
        self.uses: dict[int, int] = {}
        self.recorded: set[int] = set()


class PaperTensor(Tensor):
    """A tensor with a device and no values."""

    world: World
    memory: _Memory
    pinned: bool
    arrives: tuple[int, int]

    @staticmethod
    def __new__(cls, world: World, device: torch.device) -> PaperTensor:
        return Tensor._make_wrapper_subclass(cls, (4, 2), dtype=torch.float32, device=device)

    def __init__(self, world: World, device: torch.device) -> None:
        super().__init__()
        self.world, self.pinned, self.arrives = world, False, (0, 0)
        if device.type == "cuda":
            self.memory = _Memory(world.stream_on(device))
            weakref.finalize(self, world.freed, self.memory).atexit = False

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        name, here = str(func), args[0]
        if name == "aten.empty_like.default":
            if kwargs["device"] == torch.device("meta"):
                return torch.empty(here.shape, device="meta")
            assert kwargs["device"] == torch.device("cpu")
            assert kwargs["pin_memory"]
            return here.world.make("cpu").pin_memory()
        if name == "aten.copy_.default" and here.pinned:
            source, world = args[1], here.world
            with world.lock:
                stream = world.stream_on(source.device)
                world.read(source)
                here.arrives = stream.number, stream.clock[stream.number]
            return here
        raise NotImplementedError(f"{func} on paper")

    def detach(self) -> PaperTensor:
        return self

    def record_stream(self, stream: PaperStream) -> None:
        assert stream.device == self.device
        self.memory.recorded.add(stream.number)

    def is_pinned(self, device: Any = None) -> bool:
        return self.pinned

    def pin_memory(self, device: Any = None) -> PaperTensor:
        assert not self.is_cuda
        copy = self.world.make("cpu")
        copy.pinned = True
        return copy

    def to(self, device: torch.device, *, non_blocking: bool) -> PaperTensor:  # type: ignore[override]
        """As PyTorch copies: between GPUs on the source's current stream, with a barrier before and after."""
        if device == self.device:
            return self
        assert device.type == "cuda"
        assert non_blocking
        assert self.is_cuda or self.pinned, "a copy from pageable memory"
        world, there = self.world, self.world.stream_on(device)
        with world.lock:
            world.copies.append((str(self.device), str(device)))
            if self.is_cuda:
                here, ready, done = world.stream_on(self.device), PaperEvent(world), PaperEvent(world)
                ready.record(there)
                here.wait_event(ready)
                world.read(self, here)
                made = PaperTensor(world, device)
                made.memory.written = here.tick()
                made.memory.uses[here.number] = made.memory.written[1]
                done.record(here)
                there.wait_event(done)
                return made
            return world.make(device)


class PaperLayer(nn.Module):
    """A layer that reads and writes what a real one does, where the current streams are."""

    draws_from_default = False

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.home: torch.device | None = None
        self.weight: PaperTensor | None = None
        self.kept: list[Tensor] = []

    def _apply(self, fn: Any, recurse: bool = True) -> PaperLayer:
        return self

    def to(self, device: Any) -> PaperLayer:  # type: ignore[override]
        """By the caller, on his own stream."""
        self.home = torch.device(device)
        self.weight = self.world.make(self.home)
        return self

    def _through(self, *trees: Tree) -> list[Tree]:
        assert self.weight is not None
        for tensor in (self.weight, *tensors(trees)):
            assert tensor.device == self.home
            self.world.read(tensor)  # type: ignore[arg-type]
        return [map_tensors(lambda _: self.world.make(self.home), tree) for tree in trees]

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        self.kept = tensors((x, y))
        x, y = self._through(x, y)
        return x, y

    def backward(self) -> None:
        self._through(self.kept)
        self.kept = []

    def update(self) -> None:
        assert self.weight is not None
        self.world.read(self.weight)
        if self.weight.is_cuda:
            self.world.write(self.weight)

    def loss(self) -> None:
        return None

    def scale_lr(self, factor: float) -> None:
        pass

    def inference(self, x: Tree, path: Path) -> Tree:
        return self._through(x)[0]
