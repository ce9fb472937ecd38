"""What ran when: spans for a window of batches, and the time each stage was busy and why it was not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from time import perf_counter

from pipeal.engine.devices import Device, DeviceRow, Stamp
from pipeal.engine.schedule import Action

_REASONS = ("input", "space", "join", "saving")


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one layer on one batch; seconds on the clock of ``time.perf_counter``."""

    stage: int
    layer: int
    action: Action
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


@dataclass(slots=True)
class _Raw:
    layer: int
    action: Action | None  # None for saving
    batch: int
    begin: Stamp
    end: Stamp
    keep: bool
    share: tuple[float, float] = (0.0, 1.0)  # where within it the part of this device begins and ends


@dataclass
class StageClock:
    """Times the actions of one stage. Written by the stage's thread, read after it has come to rest."""

    device: Device
    stage: int
    window: Window
    _since: float = inf  # at rest, nothing counts
    _pending: deque[_Raw] = field(default_factory=deque)
    _spans: list[Span] = field(default_factory=list)
    _busy: dict[Action, float] = field(default_factory=lambda: dict.fromkeys(Action, 0.0))
    _waiting: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0.0))

    def add(self, layer: int, action: Action, batch: int, sequence: int, begin: Stamp) -> None:
        """Counts an action that ends now; ``sequence`` decides whether its span is kept."""
        self.add_stretch(layer, action, batch, sequence, begin, self.device.stamp())

    def add_stretch(
        self,
        layer: int,
        action: Action,
        batch: int,
        sequence: int,
        begin: Stamp,
        end: Stamp,
        share: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        """Counts an action, or a part of one, from stamp to stamp; of it, this device has only a ``share``."""
        self._pending.append(_Raw(layer, action, batch, begin, end, sequence in self.window, share))
        self._settle()

    def add_saving(self, begin: Stamp) -> None:
        """Counts the saving of a layer's state that ends now."""
        if self._since != inf:
            self._pending.append(_Raw(-1, None, -1, begin, self.device.stamp(), keep=False))
            self._settle()

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Times a wait of the stage's thread."""
        begin = perf_counter()
        yield
        self._waiting[reason] += max(0.0, perf_counter() - max(begin, self._since))

    def restart(self) -> None:
        """Times from now on, and leaves out what went on before: nothing had been asked of the stage."""
        self._since = perf_counter()

    def take_all_times(self) -> list[StageTimes]:
        """As :meth:`take_times`, of each device that it times."""
        return [self.take_times()]

    def take_times(self) -> StageTimes:
        """The times since :meth:`restart`; ends them."""
        self._settle()
        self._since = inf
        times = StageTimes(self._busy, self._waiting)
        self._busy, self._waiting = dict.fromkeys(self._busy, 0.0), dict.fromkeys(self._waiting, 0.0)
        return times

    def forget(self) -> None:
        """Drops all times and spans."""
        self._pending.clear()
        self._spans.clear()
        self.take_times()

    def spans(self) -> list[Span]:
        """The spans kept so far."""
        self._settle()
        return list(self._spans)

    def _settle(self) -> None:
        """Resolves what the device has already passed, in order; on a CPU that is everything."""
        while self._pending:
            raw = self._pending[0]
            end = self.device.seconds(raw.end)
            if end is None:
                return
            begin = self.device.seconds(raw.begin)
            assert begin is not None  # recorded before the end on the same stream
            self._pending.popleft()
            if raw.action is None:
                self._waiting["saving"] += max(0.0, end - max(begin, self._since))
                continue
            first, last = raw.share
            self._busy[raw.action] += self.device.between(raw.begin, raw.end) * (last - first)
            if raw.keep:
                begin, end = begin + (end - begin) * first, begin + (end - begin) * last
                self._spans.append(Span(self.stage, raw.layer, raw.action, raw.batch, begin, end))


class RowClock:
    """Times the actions of a stage that lies on several devices, which take turns: for each as if it were a stage.

    Forwards and backwards are timed by their hand-overs. An update is one call of one optimizer; each device is taken
    to have the share of it that it has of the parameters.

    Args:
        device: The devices.
        stage: The number of the first.
        window: The batches whose spans are kept.
    """

    def __init__(self, device: DeviceRow, stage: int, window: Window) -> None:
        self._row = device
        self._clocks = [StageClock(part, stage + number, window) for number, part in enumerate(device.parts)]

    def add(self, layer: int, action: Action, batch: int, sequence: int, begin: Stamp) -> None:
        """As :meth:`StageClock.add`; ``begin`` holds a stamp of each device."""
        where = layer, action, batch, sequence
        if action is Action.UPDATE:
            shares = _shares(self._row.parameters)
            for device, clock, since, share in zip(self._row.parts, self._clocks, begin, shares, strict=True):
                clock.add_stretch(*where, since, device.stamp(), share)
            return
        moves = self._row.moves
        at = moves[0][1] if moves else 0 if action is Action.FORWARD else len(self._clocks) - 1
        since = begin[at]
        for arrives, part, stamp in moves:
            if arrives:
                at, since = part, stamp
            else:
                self._clocks[part].add_stretch(*where, since, stamp)
        self._clocks[at].add_stretch(*where, since, self._row.parts[at].stamp())
        moves.clear()

    def add_saving(self, begin: Stamp) -> None:
        """As :meth:`StageClock.add_saving`."""
        for clock, since in zip(self._clocks, begin, strict=True):
            clock.add_saving(since)

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Times a wait, of all devices."""
        with ExitStack() as stack:
            for clock in self._clocks:
                stack.enter_context(clock.waiting(reason))
            yield

    def restart(self) -> None:
        """As :meth:`StageClock.restart`."""
        for clock in self._clocks:
            clock.restart()

    def take_all_times(self) -> list[StageTimes]:
        """Of each device."""
        return [clock.take_times() for clock in self._clocks]

    def forget(self) -> None:
        """Drops all times and spans."""
        for clock in self._clocks:
            clock.forget()

    def spans(self) -> list[Span]:
        """The spans kept so far, of all devices."""
        return [span for clock in self._clocks for span in clock.spans()]


def _shares(weights: Sequence[int]) -> list[tuple[float, float]]:
    """Where the shares of a whole begin and end.

    >>> _shares([1, 3])
    [(0.0, 0.25), (0.25, 1.0)]
    """
    ends = [0, *accumulate(weights)]
    whole = ends[-1] or 1
    return [(begin / whole, end / whole) for begin, end in pairwise(ends)]
