"""What a schedule takes, by calculation: the schedule's own rules over given durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeal.engine.schedule import Action, Schedule, Task

Durations = Mapping[Action, float]


@dataclass(frozen=True, slots=True)
class SimulatedSpan:
    """When a task would run, in seconds from the start."""

    stage: int
    batch: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The outcome of a simulated run.

    Attributes:
        spans: Every task with its times.
        makespan_s: When the last task ends.
        busy: The share of the makespan in which each stage works.
    """

    spans: list[SimulatedSpan]
    makespan_s: float
    busy: list[float]


def simulate(schedule: Schedule, costs: Sequence[Durations], batches: int, *, queue_depth: int = 2) -> Simulation:
    """Runs a schedule on a clock that is only counted.

    Args:
        schedule: What may run after what.
        costs: For each stage, the seconds of its forward, backward and update.
        batches: How many batches to run.
        queue_depth: How many packets may wait before a stage; a stage that finds the queue full keeps its
            packet, and does not go on, until there is space.

    >>> from pipeal.engine.schedule import SCHEDULES
    >>> stage = {Action.FORWARD: 1.0, Action.BACKWARD: 2.0, Action.UPDATE: 0.0}
    >>> simulate(SCHEDULES["pipelined"], [stage] * 4, batches=10).makespan_s
    33.0
    >>> simulate(SCHEDULES["sequential"], [stage] * 4, batches=10).makespan_s
    120.0
    """
    stages = len(costs)
    ended: dict[Task, float] = {}
    began: dict[Task, float] = {}
    free = [0.0] * stages
    for task in schedule.order(stages, batches):
        batch, stage, action = task.batch, task.stage, task.action
        begin = max([free[stage], *(ended[before] for before in schedule.after(task, stages))])
        began[task] = begin
        free[stage] = begin + costs[stage][action]
        if action is Action.FORWARD and stage + 1 < stages and batch >= queue_depth:
            # Handed on once the next stage has taken the packet that many batches before.
            taken = began[Task(batch - queue_depth, stage + 1, Action.FORWARD)]
            free[stage] = max(free[stage], taken)
        ended[task] = free[stage]
    spans = [
        SimulatedSpan(task.stage, task.batch, task.action, begin, begin + costs[task.stage][task.action])
        for task, begin in began.items()
    ]
    makespan = max((span.end for span in spans), default=0.0)
    busy = [batches * sum(cost.values()) / makespan if makespan else 0.0 for cost in costs]
    return Simulation(spans, makespan, busy)
