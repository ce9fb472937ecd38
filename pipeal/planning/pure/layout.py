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
number per set of devices is enough; only where links differ are all kept, for the link behind a stage depends on how
many devices come before it, and leaving one out changes it. And when T does not suffice, the least time at which any
of those answers would change is known: nothing between can suffice either. Bisection between such bounds ends at the
optimum itself, not near it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from pipeal.core.errors import PlacementError
from pipeal.engine.schedule import Schedule
from pipeal.planning.pure.device_sets import device_sets, with_graphs
from pipeal.planning.pure.hardware import Group, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import CostsByKind
from pipeal.planning.pure.stage_cost import Averaging, LayerSums, StageSeconds

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

    def group(self, held: int = 1) -> Group:
        """Its devices, each with the graphs of so many batches."""
        return Group(self.device, len(self.devices), held)


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
    costs: CostsByKind,
    setup: Setup,
    devices: Sequence[PlannedDevice] | None = None,
    *,
    schedule: Schedule | None = None,
    averaging: Averaging | None = None,
    graphs: int = 1,
    updates: bool = True,
    by_layer: bool = False,
) -> Layout:
    """The layout of one replica whose slowest part is as fast as can be; of several such, one with the fewest devices.

    Devices may be left over. Their order along the line is chosen as well where there are few kinds of them, otherwise
    they are used in the order given; the optimum is exact in either sense. A stage on several devices (all of one kind,
    memory and speed) splits each batch among them and averages the gradients: the update is that of the whole batch.

    Args:
        costs: Of the layers.
        setup: What they are on.
        devices: Those of one replica that may be used; None for its share.
        schedule: What it is for; None for one without joins, and a schedule that does one thing at a time gets the
            layout for that as well. Under one that joins, forwards are taken to be as fast on all devices as on the
            stage's own, and links to take no time before it.
        averaging: When devices that share a stage, or its replicas, average gradients; None for as layers do
            that train themselves.
        graphs: On how many batches at once a stage holds a graph: the last on one, each before it on one more, up to
            so many.
        updates: Whether updates count, and averages before them; not where they pass while other stages still work.
        by_layer: Whether a stage holds the graph of one layer at a time.

    Raises:
        PlacementError: There is no cost of a kind, not enough memory, or the replicas cannot share the devices.

    >>> from pipeal.planning.pure.layer_cost import LayerCost
    >>> layers = [LayerCost(forward_s=1, backward_s=2), LayerCost(3, 6), LayerCost(1, 2)]
    >>> layout = best_layout({"cpu": layers}, Setup((PlannedDevice("cpu"), PlannedDevice("cpu", speed=3))))
    >>> layout.sizes, [stage.devices for stage in layout.stages], layout.bottleneck_s
    ([2, 1], [(1,), (0,)], 4.0)
    """
    used = setup.share() if devices is None else devices
    averaging = averaging or Averaging(alone=setup.contention is not None)
    problem = _Problem(costs, setup, used, schedule, averaging, graphs, updates, by_layer)
    best, _ = problem.attempt(inf)
    if not best:
        raise PlacementError(problem.why_nothing_fits())
    low, high = problem.least_s(), problem.slowest(best)
    while low < high:
        middle = min((low + high) / 2, _NEAR * low)
        found, next_s = problem.attempt(middle if low < middle < high else low)
        if found:
            best, high = found, problem.slowest(found)
        else:
            low = next_s
    return problem.layout(best)


@dataclass(frozen=True, slots=True)
class _Step:
    """A stage: from which layer, to which, on what, and which devices were used or left out before."""

    start: int
    end: int
    group: Group
    state: int


def _bits(number: int) -> list[int]:
    return [bit for bit in range(number.bit_length()) if number >> bit & 1]


class _Problem:
    def __init__(
        self,
        costs: CostsByKind,
        setup: Setup,
        devices: Sequence[PlannedDevice],
        schedule: Schedule | None,
        averaging: Averaging,
        graphs: int,
        updates: bool,
        by_layer: bool,
    ) -> None:
        _require_costs(costs, devices)
        self.setup = setup
        self.devices = list(devices)
        self.averaging = averaging
        self.sums = {device.kind: LayerSums(costs[device.kind], by_layer=by_layer) for device in devices}
        self.layers = len(costs[devices[0].kind])
        if len(set(devices)) == 1:  # of devices that are all alike, no more than this can be of use
            del self.devices[self.layers * setup.stage_replicas :]
        self._unfinished = (1 << self.layers) - 1
        self._send = {  # where links differ, by what is behind each device; devices are all alike then
            (kind, place): [
                0.0,
                *(link.packet_s(cost.mean_out_bytes, setup.queue_depth) for cost in own.row[:-1]),
                0.0,
            ]
            for kind, own in self.sums.items()
            for place, link in enumerate(setup.links or (setup.link,))
        }
        sets = device_sets(self.devices, setup.stage_replicas)
        self.sets = sets if graphs == 1 else with_graphs(sets, graphs)
        self.groups = {group for moves in self.sets.moves for _, group in moves if group is not None}
        self._before: list[list[tuple[int, Group | None]]] = [[] for _ in self.sets.moves]
        for state, moves in enumerate(self.sets.moves):
            for after, group in moves:
                self._before[after].append((state, group))
        joining = schedule if schedule is not None and schedule.joins and not schedule.serial else None
        alike = {
            group: StageSeconds(costs[group.device.kind], group, setup, averaging, updates=updates, joining=joining)
            for group in {replace(group, held=1) for group in self.groups}
        }
        self._seconds = {group: alike[replace(group, held=1)] for group in self.groups}

    def attempt(self, limit_s: float) -> tuple[list[_Step], float]:
        """The stages that take no longer, none if there are no such; and the least time at which more may be possible.

        It is found where each set of devices can end, set by set: bits of a number. Where links are alike, the furthest
        is enough.
        """
        reached = [0] * len(self.sets.moves)
        reached[0] = 1
        places = len(self.setup.links) or 1
        ends: dict[int, list[list[int]]] = {  # looked up for every move, so by what is quick
            id(group): [[-1] * self.layers for _ in range(places)] for group in self.groups
        }
        next_s = inf
        for state, moves in enumerate(self.sets.moves):
            here = reached[state] & self._unfinished
            if not here:
                continue
            starts = _bits(here) if self.setup.links else (here.bit_length() - 1,)
            for after, group in moves:
                if group is None:
                    found = here
                else:
                    place = self._place(state, group) if self.setup.links else 0
                    row = ends[id(group)][place]
                    found = 0
                    for start in starts:
                        if row[start] < 0:
                            row[start], changes_s = self._ends(
                                start, group, limit_s, self._send[group.device.kind, place]
                            )
                            next_s = min(next_s, changes_s)
                        found |= row[start]
                if self.setup.links:
                    reached[after] |= found
                elif found > reached[after]:
                    reached[after] = found
        full = [state for state, found in enumerate(reached) if found > self._unfinished]
        if not full:
            return [], next_s
        return self._path(min(full, key=self.sets.used.__getitem__), reached, ends), next_s

    def _path(self, at: int, reached: Sequence[int], ends: Mapping[int, Sequence[Sequence[int]]]) -> list[_Step]:
        """The stages that lead to a set of devices that covers all layers, found from there back."""
        path: list[_Step] = []
        end = self.layers
        while at:
            for state, group in self._before[at]:
                row = None if group is None else ends[id(group)][self._place(state, group)]
                begins = [
                    start
                    for start in _bits(reached[state] & self._unfinished)
                    if (start == end if row is None else row[start] >> end & 1)
                ]
                if begins:
                    if group is not None:
                        path.append(_Step(begins[0], end, group, state))
                    at, end = state, begins[0]
                    break
        return path[::-1]

    def _place(self, state: int, group: Group) -> int:
        """Which link is behind a group that follows a set of devices."""
        return min(self.sets.used[state] + group.count, len(self.setup.links) or 1) - 1

    def _sends_s(self, step: _Step) -> float:
        return self._send[step.group.device.kind, self._place(step.state, step.group)][step.end]

    def _ends(self, start: int, group: Group, limit_s: float, send: Sequence[float]) -> tuple[int, float]:
        """The ends that a stage may have, or the last of them; and the least time that would add a later one."""
        seconds_of = self._seconds[group]
        found = 0
        for end in range(seconds_of.furthest(start, limit_s), start, -1):
            if send[end] <= limit_s and self._fits(start, end, group):
                found |= 1 << end
                if not self.setup.links:
                    break
        next_s = inf
        for later in range((start if self.setup.links else max(start, found.bit_length() - 1)) + 1, self.layers + 1):
            seconds = seconds_of(start, later)
            if seconds >= next_s:
                break
            if not found >> later & 1 and self._fits(start, later, group):
                next_s = min(next_s, max(seconds, send[later]))
        return found, next_s

    def _memory(self, start: int, end: int, group: Group) -> int:
        return self.sums[group.device.kind].memory_bytes(start, end, group, self.setup.queue_depth)

    def _fits(self, start: int, end: int, group: Group) -> bool:
        return group.device.memory_bytes is None or self._memory(start, end, group) <= group.device.memory_bytes

    def slowest(self, path: Sequence[_Step]) -> float:
        return max(max(self._seconds[step.group](step.start, step.end), self._sends_s(step)) for step in path)

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
            layers, group = range(step.start, step.end), step.group
            first = 0 if self.sets.any_order else self.sets.used[step.state]
            alike = [number for number in free if number >= first and self.devices[number] == group.device]
            own = tuple(alike[: group.count])
            free = [number for number in free if number not in own]
            seconds = sum(self.sums[group.device.kind].durations(layers, group, self.setup, self.averaging).values())
            memory = self._memory(step.start, step.end, group)
            stages.append(PlannedStage(layers, own, group.device, seconds, self._sends_s(step), memory))
        return Layout(tuple(stages), self.sets.any_order)

    def why_nothing_fits(self) -> str:
        most = max(device.memory_bytes or 0 for device in self.devices)
        one = Group(self.devices[0])
        least = [self._memory(n, n + 1, one) for n in range(self.layers)]
        wanted = self._memory(0, self.layers, one)
        return (
            f"no layout fits: the {self.layers} layers need {_mib(wanted)} in all and the largest, layer "
            f"{least.index(max(least))}, {_mib(max(least))}; the {len(self.devices)} devices have at most {_mib(most)} "
            "each; use more devices or larger ones, or smaller batches"
        )


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _require_costs(costs: CostsByKind, devices: Sequence[PlannedDevice]) -> None:
    """Refuses devices of which nothing was measured, or of other layers.

    Raises:
        PlacementError: There is such a device.
    """
    for device in devices:
        if not costs.get(device.kind):
            known = ", ".join(sorted(costs)) or "none"
            raise PlacementError(f"no costs of a device of kind {device.kind!r}; measured kinds: {known}")
    counts = {device.kind: len(costs[device.kind]) for device in devices}
    if len(set(counts.values())) > 1:
        raise PlacementError(f"the kinds of devices have costs of different numbers of layers: {counts}")
