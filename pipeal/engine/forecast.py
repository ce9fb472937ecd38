"""What training would take on devices that one may not have yet: layouts and schedules, simulated with measured costs.

Every schedule is the one that executors carry out, or, for backpropagation, that of its papers; each gets the layout
that is best for it. Backpropagation's micro-batches are taken to cost exactly their share of the batch, which favours
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeal.engine.hardware import Link, PlannedDevice
from pipeal.engine.layercost import LayerCost
from pipeal.engine.layout import Layout, PlannedStage, best_layout
from pipeal.engine.rivals import BackpropSchedule, gpipe, naive, one_f_one_b
from pipeal.engine.schedule import SCHEDULES, Action, Schedule
from pipeal.engine.simulate import Crowding, Durations, Hop, Simulation, simulate
from pipeal.errors import PlacementError

_UNTIL_STEADY = 64
"""So many batches of a schedule without joins are simulated; from there on the pace is that of the last of them."""

CostsByKind = Mapping[str, Sequence[LayerCost]]


@dataclass(frozen=True)
class Setup:
    """What is to be trained on, and how.

    Attributes:
        devices: All of them.
        link: Between any two.
        replicas: How many pipelines train together, each on batches of its own and on an equal share of the devices.
        stage_replicas: On how many devices one stage may be, which then share each batch.
        batches: How long the run is, in batches of each replica.
        queue_depth: Packets that may wait before a stage.
        micro_batches: Into how many pipelined backpropagation cuts a batch.
        crowding: For stages that share the cores of one machine; None for devices of their own.
    """

    devices: tuple[PlannedDevice, ...]
    link: Link = field(default_factory=Link)
    replicas: int = 1
    stage_replicas: int = 1
    batches: int = 1000
    queue_depth: int = 2
    micro_batches: int = 8
    crowding: Crowding | None = None


@dataclass(frozen=True)
class Forecast:
    """One way to train.

    Attributes:
        method: ``AL`` or ``BP`` and the schedule.
        layout: Of one replica.
        replicas: How many there are.
        batch_s: Seconds per batch, filling and emptying of the pipeline included; with replicas, the time of a step
            shared out among the batches that they do at once.
        busy: The share of the run in which each stage works, averaging gradients included.
        memory_bytes: What a device of each stage holds at most.
    """

    method: str
    layout: Layout
    replicas: int
    batch_s: float
    busy: tuple[float, ...]
    memory_bytes: tuple[int, ...]

    @property
    def devices(self) -> int:
        """How many are used."""
        return self.replicas * sum(len(stage.devices) for stage in self.layout.stages)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they wait."""
        working = sum(share * len(stage.devices) for share, stage in zip(self.busy, self.layout.stages, strict=True))
        return 1 - working * self.replicas / self.devices


def methods(micro_batches: int) -> dict[str, Schedule | BackpropSchedule]:
    """Every way to train that can be forecast, by name.

    >>> list(methods(8))
    ['AL sequential', 'AL backward-overlap', 'AL al-fm', 'AL pipelined', 'BP naive', 'BP gpipe', 'BP 1f1b']
    """
    al = {f"AL {name}": schedule for name, schedule in SCHEDULES.items()}
    rivals = (naive(), gpipe(micro_batches), one_f_one_b(micro_batches))
    return {**al, **{f"BP {schedule.name}": schedule for schedule in rivals}}


def forecast(
    method: str, schedule: Schedule | BackpropSchedule, costs: CostsByKind, setup: Setup, layout: Layout | None = None
) -> Forecast:
    """What a run would take.

    Args:
        method: What it is called.
        schedule: What may run after what.
        costs: Of the layers, or of the blocks for backpropagation, by kind of device.
        setup: What it runs on.
        layout: Of one replica; None for the best.

    Raises:
        PlacementError: The replicas cannot share the devices, or nothing fits.
    """
    layout = layout or lay_out(costs, setup)
    rival = isinstance(schedule, BackpropSchedule)
    micro = schedule.micro_batches if isinstance(schedule, BackpropSchedule) else 1
    durations = [_durations(stage, costs[stage.device.kind], setup, micro) for stage in layout.stages]

    def run(batches: int) -> Simulation:
        return simulate(
            schedule,
            durations,
            batches * micro,
            queue_depth=micro if rival else setup.queue_depth,
            hops=_hops(layout, costs, setup.link, micro),
            crowding=setup.crowding,
            keep_spans=False,
        )

    # Where each batch waits for the end of the one before, a few take what all take. Elsewhere it takes some until the
    # slowest part sets the pace.
    simulated = min(setup.batches, 3 if isinstance(schedule, BackpropSchedule) or schedule.joins else _UNTIL_STEADY)
    found = run(simulated)
    seconds = found.makespan_s
    if simulated < setup.batches:
        fewer = simulated - max(1, simulated // 4)
        pace_s = (found.makespan_s - run(fewer).makespan_s) / (simulated - fewer)
        seconds += (setup.batches - simulated) * pace_s
    in_all = found.makespan_s / simulated * setup.batches / seconds if seconds else 0.0
    busy = tuple(share * in_all for share in found.busy)
    memory = [
        _memory(stage, costs[stage.device.kind], held / micro, 0 if rival else setup.queue_depth)
        for stage, held in zip(layout.stages, found.held, strict=True)
    ]
    batch_s = seconds / setup.batches / setup.replicas
    return Forecast(method, layout, setup.replicas, batch_s, busy, tuple(memory))


def lay_out(costs: CostsByKind, setup: Setup) -> Layout:
    """The best layout of one replica on its share of the devices.

    Raises:
        PlacementError: The replicas cannot share the devices, or nothing fits.
    """
    return best_layout(
        costs,
        share_of(setup),
        setup.link,
        stage_replicas=setup.stage_replicas,
        replicas=setup.replicas,
        queue_depth=setup.queue_depth,
    )


def share_of(setup: Setup) -> list[PlannedDevice]:
    """The devices of one replica.

    Raises:
        PlacementError: The replicas cannot share the devices.
    """
    if setup.replicas == 1:
        return list(setup.devices)
    counts = Counter(setup.devices)
    if setup.replicas < 1 or any(count % setup.replicas for count in counts.values()):
        raise PlacementError(
            f"{setup.replicas} replicas cannot share {len(setup.devices)} devices equally; choose a number that "
            "divides how many there are of each kind"
        )
    return [device for device, count in counts.items() for _ in range(count // setup.replicas)]


def on_fewer(setup: Setup, each: int) -> Setup:
    """The same, with the first so many devices of each replica's share."""
    return replace(setup, devices=tuple(device for device in share_of(setup)[:each] for _ in range(setup.replicas)))


def alone_s(costs: CostsByKind, device: PlannedDevice) -> float:
    """Seconds per batch of all layers, one after the other, on one device with memory enough."""
    return sum(cost.seconds for cost in costs[device.kind]) / device.speed


def _durations(stage: PlannedStage, costs: Sequence[LayerCost], setup: Setup, micro: int) -> Durations:
    """Of one stage and micro-batch; gradients are averaged before the update."""
    own, count, speed = [costs[layer] for layer in stage.layers], len(stage.devices), stage.device.speed
    together = count * setup.replicas
    average_s = sum(setup.link.all_reduce_s(cost.parameter_bytes, together) for cost in own)
    average_s -= (len(own) - 1) * setup.link.all_reduce_s(0, together)  # one message for all layers of a stage
    return {
        Action.FORWARD: sum(cost.forward_s for cost in own) / speed / count / micro,
        Action.BACKWARD: sum(cost.backward_s for cost in own) / speed / count / micro,
        Action.UPDATE: sum(cost.update_s for cost in own) / speed + average_s,
    }


def _hops(layout: Layout, costs: CostsByKind, link: Link, micro: int) -> list[Hop] | None:
    if link == Link():
        return None
    sent = [costs[stage.device.kind][stage.layers[-1]].out_bytes for stage in layout.stages[:-1]]
    return [Hop(count / micro / link.bytes_per_s, link.latency_s) for count in sent]


def _memory(stage: PlannedStage, costs: Sequence[LayerCost], held: float, waiting: int) -> int:
    own = [costs[layer] for layer in stage.layers]
    behind = waiting * own[-1].out_bytes if stage.layers[-1] + 1 < len(costs) else 0
    shared = held * sum(cost.activation_bytes for cost in own) + behind
    return sum(cost.resident_bytes for cost in own) + round(shared / len(stage.devices))
