"""Schedules as data: which task may run after which.

A new one is an entry of ``SCHEDULES`` and its name in :mod:`pipeal.core.names`; planning chooses its layouts by
``joins``, ``serial`` and ``forwards_first``.

A pipeline of ``S`` stages over ``T`` batches consists of the tasks ``F`` (forward), ``B`` (backward) and ``U``
(update) of each stage and batch. Every stage works through its own tasks in the order F0 B0 U0 F1 B1 U1 …; a
schedule only adds what must have ended elsewhere. Time runs to the right, digits are batches::

    sequential        one task at a time
                      s0  F0 B0 U0 ·· ·· ·· F1 B1 U1
                      s1  ·· ·· ·· F0 B0 U0 ·· ·· ·· F1 B1 U1

    backward-overlap  all forwards, then the backwards together; joins every batch
                      s0  F0 ·· B0 U0 F1 ·· B1 U1
                      s1  ·· F0 B0 U0 ·· F1 B1 U1

    al-fm             backward as soon as the forward is handed on; joins every batch
                      s0  F0 B0 U0 ·· F1 B1 U1
                      s1  ·· F0 B0 U0 ·· F1 B1 U1

    pipelined         no join: a stage takes its next packet as soon as it is free
                      s0  F0 B0 U0 F1 B1 U1 F2
                      s1  ·· F0 B0 U0 F1 B1 U1

All four leave the same weights: an update depends on nothing but the layer's own past and its packet. The first
three are those of the published code ("Pipeline Associated Learning", 2023), ``sequential`` with all forwards of a
batch before its backwards; ``al-fm`` caps the gain over ``sequential`` at 3S/(S+2) for S equal stages with B + U = 2F,
``pipelined`` at S.

Within a stage there are two orders of its layers' actions, here of layers a, b and c::

    stage             F of all, then B of all, then U of all: as many graphs are alive as the stage has layers
                      Fa Fb Fc ► Ba Bb Bc Ua Ub Uc

    layer             each layer ends before the next one begins: one graph is alive, however many layers there are
                      Fa Ba Ua Fb Bb Ub Fc ► Bc Uc

At ► the packet goes to the next stage. Under ``layer`` a stage's task F is all up to there, and its B and U are those
of its last layer; so the rules are the same for both, and what ``layer`` costs is a longer fill. Whose layers average
their gradients with those of replicas, does so while the next layers are at work: there the task U has all updates.

No torch and no thread in this module: the executors carry out what it says, and a recorded run can be held
against it with :func:`violations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pipeal.core.errors import ConfigError, unknown_name
from pipeal.core.options import WithinStage


class Action(str, Enum):
    """What a stage does with a batch."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One action of one stage on one batch (batches counted from 0 within a run)."""

    batch: int
    stage: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action}{self.batch}@s{self.stage}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What may run before what.

    Attributes:
        name: As users write it.
        forwards_first: A backward waits for the forward of the last stage on the same batch.
        joins: The first forward of a batch waits for the updates of all stages on the batch before.
        serial: At most one task runs at any time.
        within_stage: The order of a stage's layers.
    """

    name: str
    forwards_first: bool
    joins: bool
    serial: bool
    within_stage: WithinStage = "stage"

    def __post_init__(self) -> None:
        if self.by_layer and self.forwards_first:
            raise ConfigError(f"the schedule {self.name} has both forwards_first and within_stage='layer'; choose one")

    @property
    def by_layer(self) -> bool:
        """Whether each layer of a stage ends before the next one begins."""
        return self.within_stage == "layer"

    def within(self, order: WithinStage | None) -> Schedule:
        """The same schedule with that order of a stage's layers; None for its own.

        Raises:
            ConfigError: Its backwards wait for forwards of later layers, or may do so, by rules of its own.
        """
        if order is None or order == self.within_stage:
            return self
        if self in (sequential := (SCHEDULES["sequential"], _PUBLISHED)):
            return sequential[order == "stage"]
        if order == "layer" and (self.forwards_first or type(self).after is not Schedule.after):
            why = "no layer goes backward before the last one has gone forward"
            if not self.forwards_first:
                why = "rules of its own may hold backwards back"
            raise ConfigError(
                f"within_stage is 'layer', but under {self.name} {why}; use 'stage', or the schedule sequential, al-fm "
                "or pipelined"
            )
        found = copy(self)
        object.__setattr__(found, "within_stage", order)
        return found

    def after(self, task: Task, stages: int) -> tuple[Task, ...]:
        """The tasks that must have ended before ``task`` begins.

        A stage's own tasks are implied by their order; of each other stage only the latest task is named, since
        a stage ends its tasks in order.

        >>> print(*SCHEDULES["al-fm"].after(Task(1, 0, Action.FORWARD), stages=2))
        U0@s0 U0@s1
        >>> print(*SCHEDULES["pipelined"].after(Task(1, 1, Action.FORWARD), stages=2))
        F1@s0 U0@s1
        """
        batch, stage, action = task.batch, task.stage, task.action
        if action is Action.UPDATE:
            return (Task(batch, stage, Action.BACKWARD),)
        if action is Action.BACKWARD:
            waits = [Task(batch, stage, Action.FORWARD)]
            if self.forwards_first and stage != stages - 1:
                waits.append(Task(batch, stages - 1, Action.FORWARD))
            if self.serial and stage > 0:
                waits.append(Task(batch, stage - 1, Action.UPDATE))
            return tuple(waits)
        waits = [Task(batch, stage - 1, Action.FORWARD)] if stage > 0 else []
        if self.serial and not self.forwards_first and stage > 0:
            waits.append(Task(batch, stage - 1, Action.UPDATE))
        if batch > 0:
            joined = range(stages) if self.joins and stage == 0 else (stage,)
            waits += [Task(batch - 1, other, Action.UPDATE) for other in joined]
        return tuple(waits)

    def order(self, stages: int, batches: int) -> Iterator[Task]:
        """All tasks in one order that the schedule allows: what an executor without threads runs.

        >>> print(*SCHEDULES["sequential"].order(stages=2, batches=1))
        F0@s0 B0@s0 U0@s0 F0@s1 B0@s1 U0@s1
        >>> print(*SCHEDULES["al-fm"].order(stages=2, batches=1))
        F0@s0 F0@s1 B0@s0 U0@s0 B0@s1 U0@s1
        """
        at_once = self.serial and not self.forwards_first
        for batch in range(batches):
            if not at_once:
                yield from (Task(batch, stage, Action.FORWARD) for stage in range(stages))
            for stage in range(stages):
                if at_once:
                    yield Task(batch, stage, Action.FORWARD)
                yield Task(batch, stage, Action.BACKWARD)
                yield Task(batch, stage, Action.UPDATE)


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("sequential", forwards_first=False, joins=True, serial=True, within_stage="layer"),
        Schedule("backward-overlap", forwards_first=True, joins=True, serial=False),
        Schedule("al-fm", forwards_first=False, joins=True, serial=False),
        Schedule("pipelined", forwards_first=False, joins=False, serial=False, within_stage="layer"),
    )
}
"""All of them, by name."""


_PUBLISHED = Schedule("sequential", forwards_first=True, joins=True, serial=True)
"""With all forwards of a batch first."""


def schedule_named(name: str | Schedule) -> Schedule:
    """The schedule of that name.

    Raises:
        ConfigError: There is none.
    """
    if isinstance(name, Schedule):
        return name
    if name not in SCHEDULES:
        raise ConfigError(unknown_name("schedule", str(name), SCHEDULES))
    return SCHEDULES[name]


class Ran(Protocol):
    """A task that ran: what a trace records."""

    @property
    def stage(self) -> int: ...  # noqa: D102
    @property
    def batch(self) -> int: ...  # noqa: D102
    @property
    def action(self) -> Action: ...  # noqa: D102
    @property
    def begin(self) -> float: ...  # noqa: D102
    @property
    def end(self) -> float: ...  # noqa: D102


def violations(schedule: Schedule, stages: int, spans: Iterable[Ran], slack_s: float = 0.0) -> list[str]:
    """Holds a recorded run against its schedule.

    Args:
        schedule: The schedule that was to be kept.
        stages: The number of stages.
        spans: What ran: tasks, or the actions of layers that they consist of, each with its ``layer``. What the
            recording does not hold is not asked for.
        slack_s: How much earlier than allowed a task may begin, for clocks that differ.

    Returns:
        One line per task that began before another had ended, and one per layer that went forward while the graph of
        the one before it was still there, in the order of batches; empty if all is well.
    """
    found = list(spans)
    times: dict[Task, tuple[float, float]] = {}
    for task, span in _by_task(schedule, found):
        begin, end = times.get(task, (span.begin, span.end))
        times[task] = (min(begin, span.begin), max(end, span.end))
    lines = _graphs_at_once(found, slack_s) if schedule.by_layer else []
    return lines + [
        f"{task} began {times[before][1] - begin:.6f} s before the end of {before}"
        for task, (begin, _) in sorted(times.items())
        for before in schedule.after(task, stages)
        if before in times and begin < times[before][1] - slack_s
    ]


def _layer(span: Ran) -> int | None:
    found: int | None = getattr(span, "layer", None)
    return found


def _by_task(schedule: Schedule, spans: Sequence[Ran]) -> Iterator[tuple[Task, Ran]]:
    """Each span with the task that it is a part of."""
    lasts: dict[tuple[int, int], Ran] = {}  # by batch and stage, the forward of the last layer
    if schedule.by_layer:
        for span in spans:
            layer, place = _layer(span), (span.batch, span.stage)
            if span.action is Action.FORWARD and layer is not None:
                lasts[place] = max(lasts.get(place, span), span, key=lambda one: _layer(one) or 0)
    for span in spans:
        last, action = lasts.get((span.batch, span.stage)), span.action
        # What an earlier layer does before the packet goes on is of the forward; updates after averages are not.
        if last is not None and _layer(span) != _layer(last) and span.begin < last.end:
            action = Action.FORWARD
        yield Task(span.batch, span.stage, action), span


def _graphs_at_once(spans: Sequence[Ran], slack_s: float) -> list[str]:
    """A line for each layer that went forward before the backward of the one before it had ended."""
    backwards = {(span.batch, span.stage, _layer(span)): span for span in spans if span.action is Action.BACKWARD}
    lines = []
    for span in spans:
        layer = _layer(span)
        if span.action is Action.FORWARD and layer is not None:
            before = backwards.get((span.batch, span.stage, layer - 1))
            if before is not None and span.begin < before.end - slack_s:
                lines.append(
                    f"F{span.batch} of layer {layer} began {before.end - span.begin:.6f} s before the end of "
                    f"B{span.batch} of layer {layer - 1}"
                )
    return lines
