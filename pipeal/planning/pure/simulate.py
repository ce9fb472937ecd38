"""What a schedule takes, by calculation: the schedule's own rules over given durations.

A clock that is only counted goes from event to event. Each stage works through its own tasks in their order; a task
begins when all that the schedule names has ended and its packet has come over the link. Stages that share cores work
at the pace that so many at once have, and so does what carries a packet: between processes of one machine, that is
work of the same cores. Stages with devices of their own all work at the pace 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import count
from math import exp, inf, log1p, sqrt
from random import Random
from typing import Protocol

from pipeal.engine.schedule import Action, Task
from pipeal.planning.pure.hardware import Contention

Durations = Mapping[Action, float]


class Rules(Protocol):
    """What may run after what; :class:`~pipeal.engine.schedule.Schedule` is one."""

    def order(self, stages: int, batches: int) -> Iterable[Task]:
        """All tasks, those of each stage in the order in which it does them."""
        ...

    def after(self, task: Task, stages: int) -> tuple[Task, ...]:
        """The tasks that must have ended before; one of another stage, on the same batch with the same action, also
        sends what the task works on."""
        ...


@dataclass(frozen=True, slots=True)
class Hop:
    """The link between two neighbouring stages, in seconds per packet.

    Attributes:
        busy_s: The packet is on its way so long, and the next one waits; where cores are shared, alone on one of them.
        latency_s: It arrives so much later.
    """

    busy_s: float = 0.0
    latency_s: float = 0.0


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
        held: On how many batches at once each stage holds a graph, at most.
        ended: When each stage ends its last task.
    """

    spans: list[SimulatedSpan]
    makespan_s: float
    busy: list[float]
    held: list[int]
    ended: list[float]


def simulate(
    schedule: Rules,
    costs: Sequence[Durations],
    batches: int,
    *,
    queue_depth: int = 2,
    hops: Sequence[Hop] | None = None,
    contention: Contention | None = None,
    at_work: Sequence[int] | None = None,
    factors: Sequence[Sequence[float]] | None = None,
) -> Simulation:
    """Runs a schedule on a clock that is only counted.

    Args:
        schedule: What may run after what.
        costs: For each stage, the seconds of its forward, backward and update.
        batches: How many batches to run.
        queue_depth: How many packets may wait before a stage, or be on their way to it; a stage that finds no space
            keeps its packet, and does not go on, until there is some.
        hops: The link behind each stage but the last; None for packets that are there at once.
        contention: How much stages slow each other that share cores; None for stages with a device each.
        at_work: For the contention, how many cores each stage works on at once; None for one each.
        factors: For each stage and batch, of how many times its cost each task takes; None for once.

    >>> from pipeal.engine.schedule import SCHEDULES
    >>> stage = {Action.FORWARD: 1.0, Action.BACKWARD: 2.0, Action.UPDATE: 0.0}
    >>> simulate(SCHEDULES["pipelined"], [stage] * 4, batches=10).makespan_s
    33.0
    >>> simulate(SCHEDULES["sequential"], [stage] * 4, batches=10).makespan_s
    120.0
    >>> two_cores = lambda at_once: max(1.0, at_once / 2)
    >>> simulate(SCHEDULES["pipelined"], [stage] * 4, batches=10, contention=two_cores).makespan_s
    61.0
    """
    pace_of = cache(contention or (lambda _: 1.0))
    return _Clock(schedule, costs, batches, queue_depth, hops, pace_of, at_work or [1] * len(costs), factors).run()


def log_normal_factors(stages: int, batches: int, variation: float, seed: int = 0) -> list[list[float]]:
    """For each stage and batch, how many times the mean its tasks take: log-normal, of mean 1.

    Args:
        stages: How many.
        batches: Of each.
        variation: The standard deviation of the factors.
        seed: Of the draw.
    """
    variance = log1p(variation * variation)
    own = (Random(f"{seed} {stage}") for stage in range(stages))  # fewer batches have the same first ones
    return [[exp(random.gauss(-variance / 2, sqrt(variance))) for _ in range(batches)] for random in own]


@dataclass(frozen=True, slots=True)
class _Sending:
    """A packet on its way: over which link, its number, and what that takes."""

    link: tuple[int, Action]
    number: int
    hop: Hop


_PLACE = {Action.FORWARD: 0, Action.BACKWARD: 1, Action.UPDATE: 2}


@dataclass
class _Clock:
    """Tasks that have ended and packets that have come are numbers: those of tasks first, then those of packets."""

    schedule: Rules
    costs: Sequence[Durations]
    batches: int
    queue_depth: int
    hops: Sequence[Hop] | None
    pace_of: Contention
    at_work: Sequence[int]
    factors: Sequence[Sequence[float]] | None

    def __post_init__(self) -> None:
        self.stages = len(self.costs)
        self.lines: list[list[Task]] = [[] for _ in self.costs]
        for task in self.schedule.order(self.stages, self.batches):
            self.lines[task.stage].append(task)
        self.tasks = 3 * self.stages * self.batches
        self.there = bytearray(2 * self.tasks)
        self.waiting: dict[int, list[int]] = {}
        self.next = [0] * self.stages
        self.wanted: list[list[int]] = [[] for _ in self.costs]  # what a stage's next task waits for
        self.taken = [0] * self.stages  # packets that a stage has begun with
        self.keeping: list[Task | None] = [None] * self.stages  # a forward whose packet finds no space
        # Links, by the sender and what is sent: the packet that is carried, and those that wait for it.
        self.queues: dict[tuple[int, Action], deque[_Sending]] = {}
        back = self.schedule.after(Task(0, 0, Action.BACKWARD), self.stages)
        self.sends_back = self.stages > 1 and Task(0, 1, Action.BACKWARD) in back
        self.now = 0.0
        self.begun, self.busy, self.ended = ([0.0] * self.stages for _ in range(3))
        self.holding, self.held = [0] * self.stages, [0] * self.stages
        self.spans: list[SimulatedSpan] = []
        self.turn = count()
        self.coming: list[tuple[float, int, int]] = []  # when a packet that was carried comes, and its number
        # What each of those at work has done since the start, if all were there from the start; and at how much of it
        # a task has ended, or a packet has been carried.
        self.work = 0.0
        self.working: list[tuple[float, int, Task | _Sending]] = []
        self.crowd = 0  # cores that are worked on, by stages and carriers

    def run(self) -> Simulation:
        for stage in range(self.stages):
            self.look_up(stage)
        while self.coming or self.working:
            comes = self.coming[0][0] if self.coming else inf
            pace = self.pace_of(self.crowd) if self.working else 1.0
            ends = self.now + (self.working[0][0] - self.work) * pace if self.working else inf
            if ends > comes:
                self.work += (comes - self.now) / pace
                self.now, _, number = heappop(self.coming)
                self.mark(number)
                continue
            self.now = ends
            self.work, _, done = heappop(self.working)
            if isinstance(done, _Sending):
                self.crowd -= 1
                self.arrive(done)
            else:
                self.crowd -= self.at_work[done.stage]
                self.end(done)
        left = sum(map(len, self.lines)) - sum(self.next)
        assert not left, f"{left} tasks wait for each other"
        whole = max(self.ended, default=0.0)
        busy = [seconds / whole if whole else 0.0 for seconds in self.busy]
        return Simulation(self.spans, whole, busy, self.held, self.ended)

    def number(self, task: Task) -> int:
        return (task.batch * self.stages + task.stage) * 3 + _PLACE[task.action]

    def look_up(self, stage: int) -> None:
        """Finds the stage's next task, which begins if it waits for nothing."""
        if self.next[stage] == len(self.lines[stage]):
            return
        task = self.lines[stage][self.next[stage]]
        for before in self.schedule.after(task, self.stages):
            wanted = self.number(before)
            if before.stage != stage and before.action is task.action and before.batch == task.batch:
                wanted += self.tasks  # its packet
            if not self.there[wanted]:
                self.wanted[stage].append(wanted)
        self.try_next(stage)

    def try_next(self, stage: int) -> None:
        """Begins the stage's next task, or notes what it waits for."""
        wanted = self.wanted[stage]
        while wanted:
            last = wanted[-1]  # of many stages, the last one ends last
            if not self.there[last]:
                self.waiting.setdefault(last, []).append(stage)
                return
            wanted.pop()
        self.begin(self.lines[stage][self.next[stage]])

    def begin(self, task: Task) -> None:
        stage, seconds = task.stage, self.costs[task.stage][task.action]
        if self.factors is not None:
            seconds *= self.factors[stage][task.batch]
        self.begun[stage] = self.now
        self.crowd += self.at_work[stage]
        heappush(self.working, (self.work + seconds, next(self.turn), task))
        if task.action is Action.FORWARD:
            self.holding[stage] += 1
            self.held[stage] = max(self.held[stage], self.holding[stage])
            self.taken[stage] += 1
            if stage > 0 and (kept := self.keeping[stage - 1]) is not None and self.has_space(kept):
                self.keeping[stage - 1] = None
                self.hand_on(kept)

    def has_space(self, task: Task) -> bool:
        """Whether what a forward sends may be on its way to the next stage, or wait there."""
        return task.stage + 1 == self.stages or task.batch < self.taken[task.stage + 1] + self.queue_depth

    def end(self, task: Task) -> None:
        stage, begun = task.stage, self.begun[task.stage]
        self.next[stage] += 1
        self.busy[stage] += self.now - begun
        self.ended[stage] = self.now
        self.spans.append(SimulatedSpan(stage, task.batch, task.action, begun, self.now))
        if task.action is Action.BACKWARD:
            self.holding[stage] -= 1
        if task.action is Action.FORWARD and not self.has_space(task):
            self.keeping[stage] = task
        else:
            self.hand_on(task)

    def hand_on(self, task: Task) -> None:
        """Tells who waits for the task itself, sends what it sends, and goes on."""
        number = self.number(task)
        self.mark(number)
        if task.action is Action.FORWARD and task.stage + 1 < self.stages:
            self.send(task, number, task.stage)
        elif task.action is Action.BACKWARD and task.stage > 0 and self.sends_back:
            self.send(task, number, task.stage - 1)
        self.look_up(task.stage)

    def send(self, task: Task, number: int, over: int) -> None:
        if self.hops is None:
            self.mark(number + self.tasks)
            return
        link = task.stage, task.action
        sending = _Sending(link, number + self.tasks, self.hops[over])
        queue = self.queues.setdefault(link, deque())
        queue.append(sending)
        if len(queue) == 1:
            self.carry(sending)

    def carry(self, sending: _Sending) -> None:
        self.crowd += 1
        heappush(self.working, (self.work + sending.hop.busy_s, next(self.turn), sending))

    def arrive(self, sending: _Sending) -> None:
        """A packet has been carried; the next one may follow."""
        queue = self.queues[sending.link]
        queue.popleft()
        if queue:
            self.carry(queue[0])
        heappush(self.coming, (self.now + sending.hop.latency_s, next(self.turn), sending.number))

    def mark(self, number: int) -> None:
        """Something that stages may wait for is there."""
        self.there[number] = 1
        for stage in self.waiting.pop(number, ()):
            self.try_next(stage)
