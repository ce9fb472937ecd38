"""The layout of pipelined backpropagation, whose stages hold graphs of several micro-batches: of how many, depends on
the schedule, and under 1F1B on the layout itself, since a stage holds the more, the more stages come after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from pipeal.core.errors import PlacementError
from pipeal.planning.pure.backprop_schedules import BackpropSchedule
from pipeal.planning.pure.hardware import Link, PlannedDevice
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.layout import Layout, PlannedStage, best_layout
from pipeal.planning.pure.stage_cost import Averaging, LayerSums
from pipeal.planning.pure.stage_seconds import StageSeconds


def backprop_layout(
    costs: Mapping[str, Sequence[LayerCost]],
    devices: Sequence[PlannedDevice],
    link: Link,
    schedule: BackpropSchedule,
    *,
    stage_replicas: int = 1,
    replicas: int = 1,
    averages_alone: bool = False,
    updates: bool = True,
) -> Layout:
    """The layout whose slowest part is as fast as can be; see :func:`best_layout`.

    It is as exact as that one under any of the schedules: under 1F1B each stage is given the memory for its own graphs.

    Args:
        costs: By kind of device, the cost of every block on one micro-batch.
        devices: What there is.
        link: Between any two.
        schedule: What it is for.
        stage_replicas: On how many devices one stage may be.
        replicas: How many such pipelines train together.
        averages_alone: Whether nothing else is done while gradients are averaged.
        updates: Whether updates count, and averages before them: once per batch, and except for the first stage's they
            pass while others still go backward.

    Raises:
        PlacementError: Nothing fits.
    """
    averaging = Averaging(down=True, parts=schedule.micro_batches, alone=averages_alone)

    def search(held: int, graphs: int = 1) -> Layout:
        return best_layout(
            {kind: [_whole(cost, schedule.micro_batches, held) for cost in row] for kind, row in costs.items()},
            devices,
            link,
            stage_replicas=stage_replicas,
            replicas=replicas,
            queue_depth=0,
            graphs=graphs,
            averaging=averaging,
            updates=updates,
        )

    most = schedule.graphs(0, min(len(devices), *map(len, costs.values())))
    if not schedule.alternates:
        return search(held=most)
    found = search(held=1)
    if _fits(found, costs, schedule):
        return found
    if len(set(devices)) == 1 and stage_replicas == 1:
        row = [_whole(cost, schedule.micro_batches, 1) for cost in costs[devices[0].kind]]
        return _from_the_end(row, devices, link, averaging, replicas, updates)
    try:
        return search(held=1, graphs=most)
    except PlacementError as error:  # it weighs one graph of each layer, for which there is room
        raise _no_room_for_graphs(devices) from error


def _whole(cost: LayerCost, micro_batches: int, held: int) -> LayerCost:
    """A whole batch, of which so many micro-batches have a graph."""
    return replace(
        cost,
        forward_s=cost.forward_s * micro_batches,
        backward_s=cost.backward_s * micro_batches,
        out_bytes=cost.out_bytes * micro_batches,
        mean_out_bytes=cost.mean_out_bytes * micro_batches,
        activation_bytes=cost.activation_bytes * held,
    )


def _fits(layout: Layout, costs: Mapping[str, Sequence[LayerCost]], schedule: BackpropSchedule) -> bool:
    """Whether each stage has the memory for the graphs that it holds."""
    own = {kind: LayerSums(row) for kind, row in costs.items()}
    for number, stage in enumerate(layout.stages):
        held = schedule.graphs(number, len(layout.stages))
        start, end, sums = stage.layers.start, stage.layers.stop, own[stage.device.kind]
        memory = sums.memory_bytes(start, end, devices=len(stage.devices), held=held)
        if stage.device.memory_bytes is not None and memory > stage.device.memory_bytes:
            return False
    return True


def _from_the_end(
    row: Sequence[LayerCost],
    devices: Sequence[PlannedDevice],
    link: Link,
    averaging: Averaging,
    replicas: int,
    updates: bool,
) -> Layout:
    """The best layout under 1F1B on devices that are alike, stage by stage from the last one on: how many graphs a
    stage holds depends only on how many stages come after it.

    An exact dynamic program in O(layers² × devices); ``row`` has a whole batch, with the graph of one micro-batch.
    """
    own, layers, device, micro_batches = LayerSums(row), len(row), devices[0], averaging.parts
    sends = [0.0, *(link.packet_s(own.mean_out_bytes(end)) for end in range(1, layers + 1))]
    took = StageSeconds(row, device, devices=1, together=replicas, link=link, averaging=averaging, updates=updates)
    limit = inf if device.memory_bytes is None else device.memory_bytes
    # slowest[n]: the best that the layers from n on can do in so many stages; ends[k][n]: where the first of them ends.
    slowest = [inf] * layers + [0.0]
    ends: list[list[int]] = []
    best, stages = inf, 0
    for held in range(1, min(len(devices), layers) + 1):
        found = [(inf, 0)] * (layers + 1)
        for start in range(layers):
            for end in range(start + 1, layers + 1):
                if own.memory_bytes(start, end, held=min(held, micro_batches)) > limit:
                    break
                found[start] = min(found[start], (max(took(start, end), sends[end], slowest[end]), end))
        slowest = [seconds for seconds, _ in found]
        ends.append([end for _, end in found])
        if slowest[0] < best:
            best, stages = slowest[0], held
    if not stages:
        raise _no_room_for_graphs(devices)
    planned: list[PlannedStage] = []
    start = 0
    for after in range(stages, 0, -1):
        end = ends[after - 1][start]
        memory = own.memory_bytes(start, end, held=min(after, micro_batches))
        seconds = sum(own.durations(start, end, device, together=replicas, link=link, averaging=averaging).values())
        planned.append(PlannedStage(range(start, end), (len(planned),), device, seconds, sends[end], memory))
        start = end
    return Layout(tuple(planned), any_order=True)


def _no_room_for_graphs(devices: Sequence[PlannedDevice]) -> PlacementError:
    return PlacementError(
        f"no layout fits: under 1F1B the stages on the {len(devices)} devices do not have the memory for the graphs of "
        "the micro-batches under way; use more devices or larger ones, or smaller micro-batches"
    )
