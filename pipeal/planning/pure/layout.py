"""The best contiguous stages for given devices, exactly: layers, memory, uneven speeds, links, replicated stages.

What is minimised is the time of the slowest part per batch, which is what a pipeline without joins takes for each: a
part is a stage (its forwards, backwards and updates) or the link that carries its packet on. Copies overlap with
compute, so a stage does not wait for its link, and a packet's latency passes while the next ones are on their way, as
many as may wait before a stage. Gradients of a layer are averaged while the stage's others go backward; it waits for
what is left. Under a schedule that joins every batch, a stage's part ends when its update does: after all forwards up
to it, or under ``backward-overlap`` after all there are, which is the same for any layout and left out.

The search asks for a time T how far the first devices can get if no part may take longer. Two facts make that exact
and quick. If some devices can cover the first *b* layers, then whatever they could do with fewer is no better: a
stage that begins later and ends in the same place has less to do and to average, holds less and sends the same. So one
number per set of devices is enough. And when T does not suffice, the least time at which any of those answers would
change is known: nothing between can suffice either. Bisection between such bounds ends at the optimum itself, not near
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from pipeal.core.errors import PlacementError
from pipeal.engine.schedule import Schedule
from pipeal.planning.pure.device_sets import Group, device_sets, with_graphs
from pipeal.planning.pure.hardware import Link, PlannedDevice
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.stage_cost import Averaging, LayerSums, require_costs
from pipeal.planning.pure.stage_seconds import StageSeconds

_NEAR = 1.25
"""Most layouts take no longer than so many times what is known to be the least; there the search begins."""


@dataclass(frozen=True)
class PlannedStage:
    """Neighbouring layers on a device, or on several alike that share each batch.

    Attributes:
        layers: The numbers of its layers.
        devices: The numbers of its devices.
        device: What they are.
        seconds: Its actions on one batch, and what it waits for averages of gradients.
        sends_s: What the link to the next stage takes for each packet of many; 0 for the last stage.
        memory_bytes: What each of its devices holds at most.
    """

    layers: range
    devices: tuple[int, ...]
    device: PlannedDevice
    seconds: float
    sends_s: float
    memory_bytes: int


@dataclass(frozen=True)
class Layout:
    """Stages on devices.

    Attributes:
        stages: In order.
        any_order: Whether the order of the devices was chosen too; otherwise it is the one they were given in.
    """

    stages: tuple[PlannedStage, ...]
    any_order: bool

    @property
    def bottleneck_s(self) -> float:
        """The slowest part: seconds per batch of a full pipeline."""
        return max(max(stage.seconds, stage.sends_s) for stage in self.stages)

    @property
    def sizes(self) -> list[int]:
        """The number of layers of each stage."""
        return [len(stage.layers) for stage in self.stages]


def best_layout(
    costs: Mapping[str, Sequence[LayerCost]],
    devices: Sequence[PlannedDevice],
    link: Link | None = None,
    *,
    stage_replicas: int = 1,
    replicas: int = 1,
    queue_depth: int = 2,
    graphs: int = 1,
    schedule: Schedule | None = None,
    averaging: Averaging | None = None,
    updates: bool = True,
) -> Layout:
    """The layout whose slowest part is as fast as can be; of several such, one with the fewest devices.

    Devices may be left over. Their order along the line is chosen as well where there are few kinds of them, otherwise
    they are used in the order given; the optimum is exact in either sense. A stage on several devices (all of one kind,
    memory and speed) splits each batch among them and averages the gradients: the update is that of the whole batch.

    Args:
        costs: By kind of device, the cost of every layer.
        devices: What there is.
        link: Between any two devices; None for one that takes no time.
        stage_replicas: On how many devices one stage may be.
        replicas: How many such pipelines train together, each on batches of its own; they average their gradients.
        queue_depth: Packets that may wait behind a stage, or be on their way; they count as its memory. 0 to count
            none, and let as many be on their way as there are.
        graphs: On how many batches at once a stage holds a graph: the last on one, each before it on one more, up to
            so many.
        schedule: What it is for; None for one without joins, and a schedule that does one thing at a time gets the
            layout for that as well. Under one that joins, forwards are taken to be as fast on all devices as on the
            stage's own, and links to take no time before it.
        averaging: When devices that share a stage, or its replicas, average gradients; None for as layers do
            that train themselves.
        updates: Whether updates count, and averages before them; not where they pass while other stages still work.

    Raises:
        PlacementError: There is no device, no cost of a kind, or not enough memory.

    >>> layers = [LayerCost(forward_s=1, backward_s=2), LayerCost(3, 6), LayerCost(1, 2)]
    >>> layout = best_layout({"cpu": layers}, [PlannedDevice("cpu"), PlannedDevice("cpu", speed=3)])
    >>> layout.sizes, [stage.devices for stage in layout.stages], layout.bottleneck_s
    ([2, 1], [(1,), (0,)], 4.0)
    """
    problem = _Problem(
        costs,
        devices,
        link or Link(),
        stage_replicas,
        replicas,
        queue_depth,
        graphs,
        schedule,
        averaging or Averaging(),
        updates,
    )
    found = problem.attempt(inf)
    if found.path is None:
        raise PlacementError(problem.why_nothing_fits())
    best, high = found.path, problem.slowest(found.path)
    low = problem.least_s()
    while low < high:
        middle = min((low + high) / 2, _NEAR * low)
        found = problem.attempt(middle if low < middle < high else low)
        if found.path is None:
            low = found.next_s
        else:
            best, high = found.path, problem.slowest(found.path)
    return problem.layout(best)


@dataclass(frozen=True, slots=True)
class _Step:
    """A stage: from which layer, to which, on what, and which devices were used or left out before."""

    start: int
    end: int
    group: Group
    state: int


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The stages that take no longer than was asked, if there are any; else the least time that may suffice."""

    path: list[_Step] | None
    next_s: float


class _Problem:
    def __init__(
        self,
        costs: Mapping[str, Sequence[LayerCost]],
        devices: Sequence[PlannedDevice],
        link: Link,
        stage_replicas: int,
        replicas: int,
        queue_depth: int,
        graphs: int,
        schedule: Schedule | None,
        averaging: Averaging,
        updates: bool,
    ) -> None:
        require_costs(costs, devices, stage_replicas, replicas)
        self.devices = list(devices)
        self.link = link
        self.replicas = replicas
        self.queue_depth = queue_depth
        self.averaging = averaging
        self.sums = {device.kind: LayerSums(costs[device.kind]) for device in devices}
        self.layers = len(costs[devices[0].kind])
        if len(set(devices)) == 1:  # of devices that are all alike, no more than this can be of use
            del self.devices[self.layers * stage_replicas :]
        self._send = {
            kind: [0.0, *(link.packet_s(own.mean_out_bytes(end), queue_depth) for end in range(1, self.layers)), 0.0]
            for kind, own in self.sums.items()
        }
        sets = device_sets(self.devices, stage_replicas)
        self.sets = sets if graphs == 1 else with_graphs(sets, graphs)
        self.groups = {group for moves in self.sets.moves for _, group in moves if group is not None}
        joining = schedule if schedule is not None and schedule.joins and not schedule.serial else None
        alike = {
            (group.device, group.count): StageSeconds(
                costs[group.device.kind],
                group.device,
                devices=group.count,
                together=group.count * replicas,
                link=link,
                averaging=averaging,
                updates=updates,
                joining=joining,
            )
            for group in {replace(group, held=1) for group in self.groups}
        }
        self._seconds = {group: alike[group.device, group.count] for group in self.groups}

    def attempt(self, limit_s: float) -> _Attempt:
        """How far each set of devices gets, set by set."""
        furthest = [-1] * len(self.sets.moves)
        furthest[0] = 0
        before: list[tuple[int, Group | None] | None] = [None] * len(self.sets.moves)
        ends = {id(group): [-1] * self.layers for group in self.groups}  # looked up for every move, so by what is quick
        next_s = inf
        for state, moves in enumerate(self.sets.moves):
            start = furthest[state]
            if start < 0 or start == self.layers:
                continue
            for after, group in moves:
                if group is None:
                    end = start
                else:
                    row = ends[id(group)]
                    end = row[start]
                    if end < 0:
                        end, changes_s = self._furthest(start, group, limit_s)
                        row[start] = end
                        next_s = min(next_s, changes_s)
                    if end == start:  # no stage
                        continue
                if end > furthest[after]:
                    furthest[after] = end
                    before[after] = (state, group)
        full = [state for state, end in enumerate(furthest) if end == self.layers]
        if not full:
            return _Attempt(None, next_s)
        path: list[_Step] = []
        state = min(full, key=self.sets.used.__getitem__)
        while (step := before[state]) is not None:
            earlier, group = step
            if group is not None:
                path.append(_Step(furthest[earlier], furthest[state], group, earlier))
            state = earlier
        return _Attempt(path[::-1], next_s)

    def _furthest(self, start: int, group: Group, limit_s: float) -> tuple[int, float]:
        """The last layer's end that a stage may have, and the least time that would move it."""
        seconds_of, send = self._seconds[group], self._send[group.device.kind]
        end = seconds_of.furthest(start, limit_s)
        while end > start and not (send[end] <= limit_s and self._fits(start, end, group)):
            end -= 1
        next_s = inf
        for later in range(end + 1, self.layers + 1):
            seconds = seconds_of(start, later)
            if seconds >= next_s:
                break
            if self._fits(start, later, group):
                next_s = min(next_s, max(seconds, send[later]))
        return end, next_s

    def _memory(self, start: int, end: int, group: Group) -> int:
        own = self.sums[group.device.kind]
        return own.memory_bytes(start, end, devices=group.count, held=group.held, waiting=self.queue_depth)

    def _fits(self, start: int, end: int, group: Group) -> bool:
        return group.device.memory_bytes is None or self._memory(start, end, group) <= group.device.memory_bytes

    def slowest(self, path: Sequence[_Step]) -> float:
        return max(
            max(self._seconds[step.group](step.start, step.end), self._send[step.group.device.kind][step.end])
            for step in path
        )

    def least_s(self) -> float:
        """No layout is faster than its slowest layer on the devices that suit it best, or than all devices would be
        that had the work of all layers shared out evenly."""
        own = self._seconds.items()
        slowest_s = max(min(seconds(n, n + 1) for _, seconds in own) for n in range(self.layers))
        work_s = sum(min(group.count * seconds.work_s(n) for group, seconds in own) for n in range(self.layers))
        return max(slowest_s, work_s / len(self.devices) * (1 - 1e-9))  # sums round

    def layout(self, path: Sequence[_Step]) -> Layout:
        stages = []
        free = list(range(len(self.devices)))
        for step in path:
            start, end, group = step.start, step.end, step.group
            first = 0 if self.sets.any_order else self.sets.used[step.state]
            alike = [number for number in free if number >= first and self.devices[number] == group.device]
            own = tuple(alike[: group.count])
            free = [number for number in free if number not in own]
            durations = self.sums[group.device.kind].durations(
                start,
                end,
                group.device,
                devices=group.count,
                together=group.count * self.replicas,
                link=self.link,
                averaging=self.averaging,
            )
            sends_s, memory = self._send[group.device.kind][end], self._memory(start, end, group)
            stages.append(PlannedStage(range(start, end), own, group.device, sum(durations.values()), sends_s, memory))
        return Layout(tuple(stages), self.sets.any_order)

    def why_nothing_fits(self) -> str:
        most = max(device.memory_bytes or 0 for device in self.devices)
        least = [self._memory(n, n + 1, Group(self.devices[0], 1)) for n in range(self.layers)]
        wanted = self.sums[self.devices[0].kind].memory_bytes(0, self.layers)
        return (
            f"no layout fits: the {self.layers} layers need {_mib(wanted)} in all and the largest, layer "
            f"{least.index(max(least))}, {_mib(max(least))}; the {len(self.devices)} devices have at most {_mib(most)} "
            "each; use more devices or larger ones, or smaller batches"
        )


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"
