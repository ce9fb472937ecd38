"""What training would take on devices that one may not have yet: layouts and schedules, simulated with measured costs.

Every schedule is the one that executors carry out, or, for backpropagation, that of its papers, and each gets the
layout that suits it; one that does one thing at a time gets the layout of those that do not, so that as many devices
share its memory. Backpropagation is cut into the micro-batches that suit it best, of those whose costs were measured.

How long a stage takes comes from :mod:`~pipeal.planning.pure.stage_cost`, a link from
:mod:`~pipeal.planning.pure.hardware`, measured costs from ``run.plan_costs``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from pipeal.core.errors import PlacementError
from pipeal.engine.schedule import SCHEDULES, Schedule
from pipeal.planning.pure.backprop_schedules import BackpropSchedule, gpipe, naive, one_f_one_b
from pipeal.planning.pure.candidates import Searches, layouts
from pipeal.planning.pure.hardware import Contention, Link, Setup
from pipeal.planning.pure.layer_cost import CostsByKind
from pipeal.planning.pure.layout import Layout
from pipeal.planning.pure.simulate import Hop, Simulation, log_normal_factors, simulate
from pipeal.planning.pure.stage_cost import Averaging, LayerSums

_UNTIL_STEADY = 64
"""So many batches of a schedule without joins are simulated; from there on the pace is that of the last of them."""

_WITH_JITTER = 400
"""So many of any schedule where steps vary, or fewer of very many stages."""

RIVALS: dict[str, Callable[[int], BackpropSchedule]] = {
    "BP naive": lambda _: naive(),
    "BP gpipe": gpipe,
    "BP 1f1b": one_f_one_b,
}
"""Backpropagation, from the number of micro-batches."""

METHODS = (*(f"AL {name}" for name in SCHEDULES), *RIVALS)
"""Every way to train that can be forecast."""


@dataclass(frozen=True)
class Model:
    """What a model costs.

    Attributes:
        al: The layers of its AL form.
        bp: The blocks of its form for backpropagation: by the number of micro-batches that a batch is cut into, the
            costs of one of them. Empty where they were not measured.
        micro_batches: Into how many pipelined backpropagation cuts a batch; None for as many of these as are best.
        searches: What was searched for already.
        forecasts: What was simulated already, by all that it depends on.
    """

    al: CostsByKind
    bp: Mapping[int, CostsByKind] = field(default_factory=dict)
    micro_batches: int | None = None
    searches: Searches = field(default_factory=dict, init=False, repr=False, compare=False)
    forecasts: dict[Hashable, Forecast] = field(default_factory=dict, init=False, repr=False, compare=False)


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
        micro_batches: Into how many a batch is cut.
    """

    method: str
    layout: Layout
    replicas: int
    batch_s: float
    busy: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    micro_batches: int = 1

    @property
    def devices(self) -> int:
        """How many are used."""
        return self.replicas * sum(len(stage.devices) for stage in self.layout.stages)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they wait."""
        working = sum(share * len(stage.devices) for share, stage in zip(self.busy, self.layout.stages, strict=True))
        return 1 - working * self.replicas / self.devices


def best_forecast(method: str, model: Model, setup: Setup) -> Forecast:
    """What a run takes with one of :data:`METHODS`; with micro-batches, as many as are asked for or best.

    Raises:
        PlacementError: The replicas cannot share the devices, or nothing fits.
        ConfigError: The schedule has another order of a stage's layers.
    """
    if method not in RIVALS:
        ours = SCHEDULES[method.removeprefix("AL ")].within(setup.within_stage)
        return _best(method, ours, model.al, setup, model)
    found: list[Forecast] = []
    failure = PlacementError(f"{method}: the costs of backpropagation were not measured")
    asked = model.micro_batches
    tried = model.bp if asked is None else {RIVALS[method](asked).micro_batches}  # of naive, the whole batch
    for micro_batches, costs in sorted(model.bp.items()):
        schedule = RIVALS[method](micro_batches)
        if schedule.micro_batches == micro_batches and micro_batches in tried:
            try:
                found.append(_best(method, schedule, costs, setup, model))
            except PlacementError as error:
                failure = error
    if not found:
        raise failure
    return min(found, key=lambda one: one.batch_s)


def forecast(
    method: str, schedule: Schedule | BackpropSchedule, costs: CostsByKind, setup: Setup, layout: Layout | None = None
) -> Forecast:
    """What a run would take.

    Args:
        method: What it is called.
        schedule: What may run after what.
        costs: Of the layers; for backpropagation of the blocks, on one micro-batch.
        setup: What it runs on.
        layout: Of one replica; None for the best.

    Raises:
        PlacementError: The replicas cannot share the devices, or nothing fits.
    """
    if layout is None:
        return _best(method, schedule, costs, setup, Model(costs))
    micro, waiting = 1, setup.queue_depth
    queue_depth = setup.queue_depth or setup.batches
    if isinstance(schedule, BackpropSchedule):  # all of a batch may be on its way, and none is charged for waiting
        micro, queue_depth, waiting = schedule.micro_batches, schedule.micro_batches, 0
    sums = {kind: LayerSums(row, by_layer=schedule.by_layer) for kind, row in costs.items()}
    averaging = Averaging(down=isinstance(schedule, BackpropSchedule), alone=setup.contention is not None)
    durations = [
        sums[stage.device.kind].durations(stage.layers, stage.group(), setup, averaging) for stage in layout.stages
    ]
    hops = _hops(costs, setup, layout)
    contention = _contention(setup)

    def run(batches: int) -> Simulation:
        return simulate(
            schedule,
            durations,
            batches * micro,
            queue_depth=queue_depth,
            hops=hops,
            contention=contention,
            at_work=[len(stage.devices) for stage in layout.stages],
            factors=log_normal_factors(len(durations), batches * micro, setup.jitter) if setup.jitter else None,
        )

    simulated, seen, pace_s = _steady(schedule, setup, len(durations), run)
    seconds = seen.makespan_s + (setup.batches - simulated) * pace_s
    in_all = seen.makespan_s / simulated * setup.batches / seconds if seconds else 0.0
    memory = [
        sums[stage.device.kind].memory_bytes(stage.layers.start, stage.layers.stop, stage.group(held), waiting)
        for stage, held in zip(layout.stages, seen.held, strict=True)
    ]
    return Forecast(
        method,
        layout,
        setup.replicas,
        seconds / setup.batches / setup.replicas,
        tuple(share * in_all for share in seen.busy),
        tuple(memory),
        micro,
    )


def _hops(costs: CostsByKind, setup: Setup, layout: Layout) -> list[Hop] | None:
    """The links behind the stages; None where they take no time."""
    if setup.link == Link():
        return None
    hops = []
    for stage in layout.stages[:-1]:
        link = setup.link_after(max(stage.devices))
        count = costs[stage.device.kind][stage.layers.stop - 1].mean_out_bytes
        hops.append(Hop(count / link.bytes_per_s, link.latency_s))
    return hops


def _steady(
    schedule: Schedule | BackpropSchedule, setup: Setup, stages: int, run: Callable[[int], Simulation]
) -> tuple[int, Simulation, float]:
    """How many batches were simulated, what came of it, and what each further batch takes.

    Where nothing is left of a batch when the next one begins, each takes what the first takes. If some stage still has
    an update to do then, a few take what all take; without joins it takes some until the slowest part sets the pace.
    Where steps vary, many are simulated whatever the schedule.
    """
    if setup.jitter:
        count = min(setup.batches, max(8, min(_WITH_JITTER, 50_000 // stages)))
        seen = run(count)
        return count, seen, seen.makespan_s / count if schedule.joins else _pace(count, seen, setup, run)
    count = 1 if schedule.joins else min(setup.batches, _UNTIL_STEADY)
    seen = run(count)
    if isinstance(schedule, BackpropSchedule) and seen.ended[0] < seen.makespan_s:
        count = min(setup.batches, 3)
        seen = run(count)
    if not 1 < count < setup.batches:
        return count, seen, seen.makespan_s
    return count, seen, _pace(count, seen, setup, run)


def _pace(count: int, seen: Simulation, setup: Setup, run: Callable[[int], Simulation]) -> float:
    """What each of the last batches takes."""
    fewer = count - _a_part(count, setup.queue_depth or 1)
    return (seen.makespan_s - run(fewer).makespan_s) / (count - fewer)


def _best(
    method: str, schedule: Schedule | BackpropSchedule, costs: CostsByKind, setup: Setup, model: Model
) -> Forecast:
    """On the best of its layouts. Of other numbers of devices, many have the same stages: these are simulated once."""
    found = []
    others = replace(setup, devices=())
    for layout in layouts(costs, setup, schedule, model.searches):
        stages = tuple((stage.layers, stage.device, len(stage.devices)) for stage in layout.stages)
        what = schedule, id(costs), stages, others
        if what not in model.forecasts:
            model.forecasts[what] = forecast(method, schedule, costs, setup, layout)
        found.append(replace(model.forecasts[what], layout=layout))
    return min(found, key=lambda one: one.batch_s)


def _a_part(batches: int, queue_depth: int) -> int:
    """So many of the last batches tell the pace: where a link's latency sets it, they come a queue at a time."""
    part = max(1, batches // 4)
    return part - part % queue_depth if queue_depth <= part else part


def _contention(setup: Setup) -> Contention | None:
    """As it is for one of the replicas: all of them do the same at the same time, on the same cores."""
    contention, replicas = setup.contention, setup.replicas
    return None if contention is None else lambda at_once: contention(at_once * replicas)


def on_fewer(setup: Setup, each: int) -> Setup:
    """The same, with the first so many devices of each replica's share."""
    return replace(setup, devices=tuple(device for device in setup.share()[:each] for _ in range(setup.replicas)))
