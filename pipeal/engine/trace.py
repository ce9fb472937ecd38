"""What ran when: spans for a window of batches, and the time each stage was busy and why it was not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from time import perf_counter

from pipeal.engine.devices.base import Device, Stamp, Stretch
from pipeal.engine.schedule import Action

_REASONS = ("input", "space", "join")


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one layer on one batch; seconds on the clock of ``time.perf_counter``."""

    stage: int
    layer: int
    action: Action
    batch: int
    begin: float
    end: float


class Way(str, Enum):
    """The way of a layer between a device and the memory of its host (``offload='host'``)."""

    BRING = "bring"
    SEND = "send"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class CopySpan:
    """A layer on its way beside the actions, asked for during a batch; seconds as those of a :class:`Span`."""

    stage: int
    layer: int
    way: Way
    batch: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Window:
    """The batches whose spans are kept: ``first`` to ``first + count - 1``, counted within the pipeline's life."""

    first: int
    count: int

    def __contains__(self, batch: object) -> bool:
        return isinstance(batch, int) and self.first <= batch < self.first + self.count


@dataclass(frozen=True)
class StageTimes:
    """How a stage spent a stretch of time, in seconds.

    Attributes:
        busy: By action, on the stage's device. On a CPU it is wall-clock time: a stage that shares its core with
            others is busy while it waits for its turn.
        waiting: By reason: ``input`` (the stage before), ``space`` (the stage after), ``join`` (the schedule). It is
            the time of the stage's thread, which on a GPU runs ahead of the device. And ``saving``: the time in which
            the device copied the layers' states for snapshots instead.
    """

    busy: dict[Action, float]
    waiting: dict[str, float]

    @property
    def busy_s(self) -> float:
        """All actions together."""
        return sum(self.busy.values())

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(
            {action: seconds + other.busy[action] for action, seconds in self.busy.items()},
            {reason: seconds + other.waiting[reason] for reason, seconds in self.waiting.items()},
        )


class StageClock:
    """Times the actions of one stage. Written by the stage's thread, read after it has come to rest.

    Where the stage lies on several devices, which take turns, each has times as if it were a stage.

    Args:
        device: The stage's device.
        stage: The stage's number, or that of its first device.
        window: The batches whose spans are kept.
    """

    def __init__(self, device: Device, stage: int, window: Window) -> None:
        self._device = device
        self._window = window
        self._parts = [_PartClock(part, stage + number) for number, part in enumerate(device.parts)]
        self._copies: list[tuple[Way, int, int, Stamp, Stamp]] = []
        self._since = inf  # at rest, nothing counts
        self._waiting = dict.fromkeys(_REASONS, 0.0)

    def add(self, layer: int, action: Action, batch: int, sequence: int, begin: Stamp) -> None:
        """Counts an action that ends now; ``sequence`` decides whether its span is kept."""
        for stretch in self._device.stretches(action, begin):
            part = self._parts[stretch.part]
            part.pending.append(_Raw(layer, action, batch, stretch, sequence in self._window))
            part.settle(self._since)

    def add_saving(self, begin: Stamp) -> None:
        """Counts the saving of a layer's state that ends now."""
        if self._since != inf:
            for stretch in self._device.stretches(None, begin):
                self._parts[stretch.part].pending.append(_Raw(-1, None, -1, stretch, keep=False))
                self._parts[stretch.part].settle(self._since)

    def traces(self, sequence: int) -> bool:
        """Whether the spans of this batch are kept."""
        return sequence in self._window

    def add_copy(self, way: Way, layer: int, batch: int, begin: Stamp, end: Stamp) -> None:
        """Keeps a copy of a traced batch, which counts for no time of the stage."""
        self._copies.append((way, layer, batch, begin, end))

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Times a wait of the stage's thread, and so of all of its devices."""
        begin = perf_counter()
        yield
        self._waiting[reason] += max(0.0, perf_counter() - max(begin, self._since))

    def restart(self) -> None:
        """Times from now on, and leaves out what went on before: nothing had been asked of the stage."""
        self._since = perf_counter()

    def take_all_times(self) -> list[StageTimes]:
        """The times of each device since :meth:`restart`; ends them."""
        waiting, self._waiting = self._waiting, dict.fromkeys(_REASONS, 0.0)
        times = []
        for part in self._parts:
            part.settle(self._since)
            times.append(StageTimes(part.busy, waiting | {"saving": part.saving_s}))
            part.busy, part.saving_s = dict.fromkeys(Action, 0.0), 0.0
        self._since = inf
        return times

    def forget(self) -> None:
        """Drops all times and spans."""
        for part in self._parts:
            part.pending.clear()
            part.spans.clear()
        self._copies.clear()
        self.take_all_times()

    def spans(self) -> list[Span]:
        """The spans kept so far, of all devices."""
        for part in self._parts:
            part.settle(self._since)
        return [span for part in self._parts for span in part.spans]

    def copies(self) -> list[CopySpan]:
        """The copies kept so far that the device has come to the end of."""
        found = []
        for way, layer, batch, first, last in self._copies:
            begin, end = self._device.seconds(first), self._device.seconds(last)
            if begin is not None and end is not None:
                found.append(CopySpan(self._parts[0].stage, layer, way, batch, begin, end))
        return found


@dataclass(slots=True)
class _Raw:
    layer: int
    action: Action | None  # None for saving
    batch: int
    stretch: Stretch
    keep: bool


@dataclass
class _PartClock:
    """The times of one device."""

    device: Device
    stage: int
    pending: deque[_Raw] = field(default_factory=deque)
    spans: list[Span] = field(default_factory=list)
    busy: dict[Action, float] = field(default_factory=lambda: dict.fromkeys(Action, 0.0))
    saving_s: float = 0.0

    def settle(self, since: float) -> None:
        """Resolves what the device has already passed, in order; on a CPU that is everything."""
        while self.pending:
            raw = self.pending[0]
            _, first, last, (share_begin, share_end) = raw.stretch
            end = self.device.seconds(last)
            if end is None:
                return
            begin = self.device.seconds(first)
            assert begin is not None  # recorded before the end on the same stream
            self.pending.popleft()
            if raw.action is None:
                self.saving_s += max(0.0, end - max(begin, since))
                continue
            self.busy[raw.action] += self.device.between(first, last) * (share_end - share_begin)
            if raw.keep:
                begin, end = begin + (end - begin) * share_begin, begin + (end - begin) * share_end
                self.spans.append(Span(self.stage, raw.layer, raw.action, raw.batch, begin, end))
