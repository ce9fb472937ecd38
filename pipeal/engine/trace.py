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

BY_LAYER_EVERY = 16
"""Of the batches on a GPU that are not traced, one in so many has each layer's actions timed by themselves, for the
shares that these have; the others are timed as a whole. Each stamp of a GPU takes some microseconds of its host."""


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one layer on one batch; seconds on the clock of ``time.perf_counter``.

    On a GPU it begins when the GPU has come to it, and that is as soon as the host opens it, if nothing lies before it.
    Whether there are kernels to run all the time depends on how fast the host gives them.

    Attributes:
        given: When the host had given all of it to a GPU, and later by as much as the clocks of both may differ; from
            then on, at the latest, there were kernels to run all the time. None on a CPU.
    """

    stage: int
    layer: int
    action: Action
    batch: int
    begin: float
    end: float
    given: float | None = None


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
            others is busy while it waits for its turn. On a GPU it is the time in which the host had the action open
            there (host-open), with kernels to run or without. By action it is then, where a stage has several layers
            one after the other, as in the last batch that was timed layer by layer (:data:`BY_LAYER_EVERY`).
        waiting: By reason: ``input`` (the stage before), ``space`` (the stage after), ``join`` (the schedule). It is
            the time of the stage's thread, which on a GPU runs ahead of the device. And ``saving``: the time in which
            the device copied the layers' states for snapshots instead.
        kernels_s: On a GPU, how much of ``busy`` had kernels to run for certain (kernel-busy, at least): what the host
            had given completely, less what the clocks of both may differ by. That grows between two reports: in a long
            stretch it says less. None on a CPU.
    """

    busy: dict[Action, float]
    waiting: dict[str, float]
    kernels_s: float | None = None

    @property
    def busy_s(self) -> float:
        """All actions together."""
        return sum(self.busy.values())

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(
            {action: seconds + other.busy[action] for action, seconds in self.busy.items()},
            {reason: seconds + other.waiting[reason] for reason, seconds in self.waiting.items()},
            None if None in (self.kernels_s, other.kernels_s) else (self.kernels_s or 0.0) + (other.kernels_s or 0.0),
        )


class StageClock:
    """Times the actions of one stage. Written by the stage's thread, read after it has come to rest.

    Where the stage lies on several devices, which take turns, each has times as if it were a stage.

    Args:
        device: The stage's device.
        stage: The stage's number, or that of its first device.
        window: The batches whose spans are kept.

    Attributes:
        times_whole: Whether, on a device that lags, most batches are timed as a whole: nothing within them waits.
    """

    def __init__(self, device: Device, stage: int, window: Window) -> None:
        self._device = device
        self._window = window
        self._parts = [_PartClock(part, stage + number) for number, part in enumerate(device.parts)]
        self._at_once = len(self._parts) == 1 and not device.lags
        self.times_whole = False
        self._copies: list[tuple[Way, int, int, Stamp, Stamp]] = []
        self._since = inf  # at rest, nothing counts
        self._waiting = dict.fromkeys(_REASONS, 0.0)

    def add(self, layer: int, action: Action, batch: int, sequence: int, begin: Stamp) -> None:
        """Counts an action that ends now.

        Args:
            layer: The layer's number.
            action: Which.
            batch: The batch's number.
            sequence: Decides whether its span is kept.
            begin: The stamp before it.
        """
        if self._at_once:
            part, end = self._parts[0], self._device.stamp()
            part.busy[action] += end - begin
            if sequence in self._window:
                part.spans.append(Span(part.stage, layer, action, batch, begin, end))
        else:
            self._add(_Raw(layer, action, batch, keep=sequence in self._window), begin)

    def by_layer(self, sequence: int) -> bool:
        """Whether each layer's actions on a batch are timed by themselves; else the stage's are, as a whole."""
        return not self.times_whole or sequence % BY_LAYER_EVERY == 0 or sequence in self._window

    def add_whole(self, action: Action | None, begin: Stamp) -> None:
        """Counts what all layers did, up to now, with a batch that is timed as a whole; None for several actions."""
        self._add(_Raw(-1, action, -1, is_whole=True), begin)

    def _add(self, raw: _Raw, begin: Stamp) -> None:
        for stretch in self._device.stretches(raw.action, begin):
            part = self._parts[stretch.part]
            part.pending.append((raw, stretch, perf_counter()))
            part.settle(self._since)

    def add_saving(self, begin: Stamp) -> None:
        """Counts the saving of a layer's state that ends now."""
        if self._since != inf:
            self._add(_Raw(-1, None, -1), begin)

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
        for part in self._parts:
            part.device.tie_clock()
        self._since = perf_counter()

    def take_all_times(self) -> list[StageTimes]:
        """The times of each device since :meth:`restart`; ends them."""
        waiting, self._waiting = self._waiting, dict.fromkeys(_REASONS, 0.0)
        times = []
        for part in self._parts:
            part.settle(self._since)
            times.append(part.taken(waiting))
        self._since = inf
        return times

    def forget(self) -> None:
        """Drops all times and spans."""
        for part in self._parts:
            part.forget()
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
    """What a stretch of time went to.

    Attributes:
        layer: The layer's number.
        action: None for several, of a whole batch, and for saving.
        batch: The batch's number.
        keep: Whether its span is kept.
        is_whole: Whether it is of all layers.
    """

    layer: int
    action: Action | None
    batch: int
    keep: bool = False
    is_whole: bool = False


def _nothing() -> dict[Action, float]:
    return dict.fromkeys(Action, 0.0)


@dataclass
class _PartClock:
    """The times of one device.

    Attributes:
        device: It.
        stage: Its number, of a row the first one's and so on.
        pending: What it has not come to the end of, as far as is known, and when the host had given it.
        spans: Those kept.
        busy: By action.
        mixed_s: Seconds of several actions.
        sample: By action, those of the last batch that was timed layer by layer.
        kernels_s: As in :class:`StageTimes`.
        saving_s: Seconds of saving.
    """

    device: Device
    stage: int
    pending: deque[tuple[_Raw, Stretch, float]] = field(default_factory=deque)
    spans: list[Span] = field(default_factory=list)
    busy: dict[Action, float] = field(default_factory=_nothing)
    mixed_s: float = 0.0
    sample: dict[Action, float] = field(default_factory=_nothing)
    kernels_s: float = 0.0
    saving_s: float = 0.0
    _sampled: int = -1

    def settle(self, since: float) -> None:
        """Resolves what the device has already passed, in order; on a CPU that is everything."""
        device = self.device
        while self.pending:
            raw, (_, first, last, (share_begin, share_end)), given = self.pending[0]
            end = device.seconds(last)
            if end is None:
                return
            self.pending.popleft()
            length = device.between(first, last)
            given += device.error_s(last)
            if raw.action is None and not raw.is_whole:
                self.saving_s += max(0.0, min(length, end - since))
            else:
                self._count(raw, length * (share_end - share_begin))
                if device.lags:
                    self.kernels_s += max(0.0, min(length, end - given)) * (share_end - share_begin)
            if raw.keep:
                self._keep(raw, device.seconds(first), length, (share_begin, share_end), given)
            device.reuse(first, last)

    def forget(self) -> None:
        """Drops what is pending, all spans, and the shares of actions."""
        self.pending.clear()
        self.spans.clear()
        self._sampled, self.sample = -1, _nothing()

    def _count(self, raw: _Raw, seconds: float) -> None:
        if raw.action is None:
            self.mixed_s += seconds
            return
        self.busy[raw.action] += seconds
        if not raw.is_whole:
            if raw.batch != self._sampled:
                self._sampled, self.sample = raw.batch, _nothing()
            self.sample[raw.action] += seconds

    def _keep(self, raw: _Raw, begin: float | None, length: float, share: tuple[float, float], given: float) -> None:
        assert raw.action is not None
        assert begin is not None  # recorded before the end on the same stream
        first, last = (begin + length * part for part in share)
        self.spans.append(
            Span(self.stage, raw.layer, raw.action, raw.batch, first, last, given if self.device.lags else None)
        )

    def taken(self, waiting: dict[str, float]) -> StageTimes:
        """All times so far, with those of the stage's thread; begins anew. Of what was timed as a whole each action has
        the share that it had in the last batch that was timed layer by layer."""
        whole = sum(self.sample.values())
        for action, seconds in self.sample.items():
            self.busy[action] += self.mixed_s * (seconds / whole if whole else 1 / len(self.sample))
        kernels_s = self.kernels_s if self.device.lags else None
        found = StageTimes(self.busy, waiting | {"saving": self.saving_s}, kernels_s)
        self.busy, self.mixed_s, self.kernels_s, self.saving_s = _nothing(), 0.0, 0.0, 0.0
        return found
