"""The layout of pipelined backpropagation, whose stages hold graphs of several micro-batches: of how many, depends on
the schedule, and under 1F1B on the layout itself, since a stage holds the more, the more stages come after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeal.core.errors import PlacementError
from pipeal.planning.pure.backprop_schedules import BackpropSchedule
from pipeal.planning.pure.hardware import PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import CostsByKind, LayerCost
from pipeal.planning.pure.layout import Layout, best_layout
from pipeal.planning.pure.stage_cost import Averaging


def backprop_layout(
    costs: CostsByKind,
    setup: Setup,
    schedule: BackpropSchedule,
    devices: Sequence[PlannedDevice],
    *,
    updates: bool = True,
) -> Layout:
    """The layout whose slowest part is as fast as can be; see :func:`best_layout`.

    It is as exact as that one under any of the schedules: under 1F1B each stage is given the memory for its own graphs.

    Args:
        costs: Of the blocks on one micro-batch.
        setup: What they are on.
        schedule: What it is for.
        devices: Those of one replica that may be used.
        updates: Whether updates count, and averages before them: once per batch, and except for the first stage's they
            pass while others still go backward.

    Raises:
        PlacementError: Nothing fits.
    """
    averaging = Averaging(down=True, parts=schedule.micro_batches, alone=setup.contention is not None)
    unbounded = replace(setup, queue_depth=0)  # no stage waits for space: no more than a batch is ever on its way

    def search(held: int, graphs: int = 1) -> Layout:
        whole = {kind: [_whole(cost, schedule.micro_batches, held) for cost in row] for kind, row in costs.items()}
        return best_layout(whole, unbounded, devices, averaging=averaging, graphs=graphs, updates=updates)

    most = schedule.graphs(0, min(len(devices), *map(len, costs.values())))
    if not schedule.alternates:
        return search(held=most)
    if all(device.memory_bytes is None for device in devices):
        return search(held=1)
    try:
        return search(held=1, graphs=most)
    except PlacementError as error:  # it weighs one graph of each layer, for which there may be room
        raise PlacementError(
            f"no layout fits: under 1F1B the stages on the {len(devices)} devices do not have the memory for the "
            "graphs of the micro-batches under way; use more devices or larger ones, or smaller micro-batches"
        ) from error


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
