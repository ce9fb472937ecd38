"""A device that makes copies as late as anything waits for them, and tells who did not wait.

It is a CPU in the place of a GPU: the layers' work is real, and made at once. What lanes copy is real as well, but made
only when the work, another copy or the host waits for it: what is read too early has other values, and what is written
over too early is lost. And by the vector clocks of :mod:`tests.engine.paper`, whatever the moment, every use of a slot
or of a layer's home comes after all that it must come after.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeal.core import options
from pipeal.engine import pipeline, stage
from pipeal.engine.devices import Device, Lane

from .paper import PaperEvent, PaperStream, World

CPU = torch.device("cpu")


class LateMark:
    """After it is what a stream was given before it."""

    def __init__(self, event: PaperEvent, make: Callable[[], None]) -> None:
        self.event, self.make = event, make

    def query(self) -> bool:
        self.make()
        return True


class Stretch:
    """A slot, or a layer's home: who has used it, and when last."""

    def __init__(self, kind: str, flat: Tensor) -> None:
        self.kind, self.begin, self.end = kind, flat.data_ptr(), flat.data_ptr() + flat.nbytes
        self.uses: dict[int, int] = {}
        self.writes: dict[int, int] = {}


class Late:
    """All such devices of a test.

    Attributes:
        broken: What did not wait.
        copies: What lanes were given, as (from, into, bytes).
        now: Numbers the moments.
        opened: The devices.
    """

    def __init__(self) -> None:
        self.world = World(0)
        self.broken = self.world.broken
        self.copies: list[tuple[str, str, int]] = []
        self.now = count()
        self.opened: list[LateDevice] = []
        self.limit: int | None = None
        self._stretches: list[Stretch] = []

    def install(self, patch: pytest.MonkeyPatch, *, slots: int = 0) -> None:
        """Puts such a device in the place of each CPU, and has stages of more than so many layers use the host."""
        patch.setitem(options._OFFLOADS, "host", ("", "cpu", "disk"))
        patch.setattr(pipeline, "open_device", lambda _: LateDevice(self))
        patch.setattr(stage, "SLOTS", slots)

    def made(self, kind: str, flat: Tensor) -> Tensor:
        made = Stretch(kind, flat)
        with self.world.lock:
            self._stretches.append(made)
        return flat

    def of(self, tensor: Tensor) -> Stretch | None:
        if tensor.layout is not torch.strided:
            return None
        place = tensor.untyped_storage().data_ptr()
        with self.world.lock:
            return next((one for one in self._stretches if one.begin <= place < one.end), None)

    def use(self, stream: PaperStream, tensor: Tensor, *, writes: bool) -> None:
        found = self.of(tensor)
        if found is None:
            return
        with self.world.lock:
            number, tick = stream.tick()
            for other, when in (found.uses if writes else found.writes).items():
                if stream.clock[other] < when:
                    does = "written" if writes else "read"
                    self.broken.append(f"a {found.kind} is {does} on stream {number} while stream {other} uses it")
            found.uses[number] = tick
            if writes:
                found.writes[number] = tick

    def read_on_host(self, tensor: Tensor) -> None:
        found = self.of(tensor)
        for stream, tick in ({} if found is None else found.writes).items():
            if self.world.done[stream] < tick:
                self.broken.append(f"the host reads what stream {stream} writes")

    def gone(self, flat: Tensor, passed: Callable[[int, int], bool]) -> None:
        """Has it looked at, when that memory goes, whether all that used it is over."""
        found = self.of(flat)
        assert found is not None

        def freed() -> None:
            with self.world.lock:
                self._stretches.remove(found)
                if not all(passed(stream, tick) for stream, tick in found.uses.items()):
                    self.broken.append(f"a {found.kind} is freed while it is used")

        weakref.finalize(flat, freed).atexit = False


class LateLane(Lane):
    def __init__(self, late: Late) -> None:
        self.late = late
        self.stream = PaperStream(CPU, late.world)
        self._todo: deque[Callable[[], Any]] = deque()
        self._given = self._made = 0
        self._loose = False

    def wait_for(self, ready: Any) -> None:
        if ready is not None:
            self.stream.wait_event(ready.event)
            self._give(ready.make)

    def copy(self, into: Tensor, source: Tensor) -> None:
        late = self.late
        kinds = [one.kind if (one := late.of(tensor)) is not None else "memory" for tensor in (source, into)]
        late.copies.append((kinds[0], kinds[1], source.nbytes))
        late.use(self.stream, source, writes=False)
        late.use(self.stream, into, writes=True)
        if kinds[0] == "memory":
            self._loose = True  # the host may let go of it
        self._give(lambda: into.copy_(source))

    def mark(self) -> LateMark:
        if self._loose:  # what is given next does not know of it
            self.late.broken.append("memory of the allocator that is copied may be gone")
        upto = self._given
        return LateMark(self.stream.record_event(), lambda: self._make(upto))

    def stamp(self) -> float:
        return float(next(self.late.now))

    def synchronize(self) -> None:
        self._make(self._given)
        self.stream.query()
        self._loose = False

    def _give(self, work: Callable[[], Any]) -> None:
        self._todo.append(work)
        self._given += 1

    def _make(self, upto: int) -> None:
        while self._made < upto:
            self._made += 1
            with unwatched():
                self._todo.popleft()()


class LateDevice(Device):
    """One stage's: its own stream does all at once."""

    def __init__(self, late: Late) -> None:
        super().__init__(CPU)
        self.late = late
        self.compute = PaperStream(CPU, late.world)
        self.active_on: list[int] = []
        late.opened.append(self)

    def lane(self) -> LateLane:
        return LateLane(self.late)

    def room(self, size: int) -> Tensor:
        flat = self.late.made("slot", torch.full((size,), 255, dtype=torch.uint8))
        self.late.use(self.compute, flat, writes=True)  # what had that memory before
        clock, done = self.compute.clock, self.late.world.done
        self.late.gone(flat, lambda stream, tick: max(clock[stream], done[stream]) >= tick)
        return flat

    def locked(self, size: int) -> Tensor:
        if self.late.limit is not None:
            self.late.limit -= size
            if self.late.limit < 0:
                from pipeal import PlacementError

                raise PlacementError("no more locked memory")
        flat = self.late.made("home", torch.full((size,), 255, dtype=torch.uint8))
        done = self.late.world.done
        self.late.gone(flat, lambda stream, tick: done[stream] >= tick)
        return flat

    @contextmanager
    def active(self) -> Iterator[None]:
        with Watch(self):
            yield

    def mark(self) -> Any:
        return LateMark(self.compute.record_event(), lambda: None)

    def wait_for(self, ready: Any) -> None:
        if ready is not None:
            ready.make()
            self.compute.wait_event(ready.event)

    def snapshot(self, tensor: Tensor) -> Tensor:
        self.late.read_on_host(tensor)
        with unwatched():
            return super().snapshot(tensor)

    def stamp(self) -> float:
        return float(next(self.late.now))

    def synchronize(self) -> None:
        self.compute.query()


class Watch(TorchDispatchMode):
    """Every operator of a layer's work that uses a slot does so on the stage's stream; none may use a home."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not views and not getattr(_LOCAL, "unwatched", 0):
            late = self.device.late
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and (found := late.of(tensor)) is not None:
                    if found.kind == "home":
                        late.broken.append(f"{func} works with what lies at home")
                    late.use(self.device.compute, tensor, writes=True)
        return func(*args, **(kwargs or {}))


_LOCAL = threading.local()


@contextmanager
def unwatched() -> Iterator[None]:
    """Within it, this thread does what is no layer's work."""
    _LOCAL.unwatched = getattr(_LOCAL, "unwatched", 0) + 1
    try:
        yield
    finally:
        _LOCAL.unwatched -= 1
