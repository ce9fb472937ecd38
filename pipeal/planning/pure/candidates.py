"""The layouts of which a forecast takes the fastest, and what they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from pipeal.core.errors import PlacementError
from pipeal.engine.schedule import Schedule
from pipeal.planning.pure.backprop_layout import backprop_layout
from pipeal.planning.pure.backprop_schedules import BackpropSchedule
from pipeal.planning.pure.hardware import Link, PlannedDevice
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.layout import Layout, best_layout
from pipeal.planning.pure.simulate import Contention
from pipeal.planning.pure.stage_cost import Averaging

CostsByKind = Mapping[str, Sequence[LayerCost]]
"""By kind of device, the cost of every layer."""


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
        crowding: For stages, their replicas included, that share the cores of one machine; None for devices of their
            own.
    """

    devices: tuple[PlannedDevice, ...]
    link: Link = field(default_factory=Link)
    replicas: int = 1
    stage_replicas: int = 1
    batches: int = 1000
    queue_depth: int = 2
    crowding: Contention | None = None


class Searches:
    """The layouts that were searched for; for other numbers of devices many of them are asked for again."""

    def __init__(self) -> None:
        self._found: dict[Hashable, list[tuple[int, Layout]]] = {}

    def once(self, what: Hashable, devices: Sequence[PlannedDevice], search: Callable[[], Layout]) -> Layout:
        """What a search gives, or gave before.

        Of devices that are alike, what is best for more of them is so for these, too, if it uses no more than these: it
        has the fewest that are as good.

        Args:
            what: What is searched for, beside the devices.
            devices: On which.
            search: Looks for it.

        Raises:
            PlacementError: As the search does.
        """
        alike = len(set(devices)) == 1
        before = self._found.setdefault((what, devices[0] if alike else tuple(devices)), [])
        for count, layout in before:
            if sum(len(stage.devices) for stage in layout.stages) <= len(devices) <= count:
                return layout
        layout = search()
        before.append((len(devices), layout))
        return layout


def lay_out(costs: CostsByKind, setup: Setup, schedule: Schedule | None = None) -> Layout:
    """The best layout of one replica on its share of the devices.

    Args:
        costs: Of the layers.
        setup: What it is on.
        schedule: As for :func:`best_layout`.

    Raises:
        PlacementError: The replicas cannot share the devices, or nothing fits.
    """
    return _lay_out(costs, setup, share_of(setup), schedule)


def layouts(
    costs: CostsByKind, setup: Setup, schedule: Schedule | BackpropSchedule, searches: Searches | None = None
) -> list[Layout]:
    """Those of which one is best. With uneven devices or links what a join asks for, or the end of a batch of micro-
    batches, is simulated, not known, and so is how stages crowd each other where they share cores: there, fewer devices
    may be faster. Nor is it known how much of their updates the stages do, after micro-batches, while others still go
    backward. What does one thing at a time gets as many devices as there are, so that they share its memory.

    Args:
        costs: Of the layers, or of the blocks on one micro-batch.
        setup: What they are on.
        schedule: What they are for.
        searches: What was searched for already, for costs that are still there; None for nothing.

    Raises:
        PlacementError: Nothing fits on all of them.
    """
    share = share_of(setup)
    searches = searches or Searches()
    found = _layouts_on(costs, setup, schedule, share, searches)
    serial = schedule.micro_batches == 1 if isinstance(schedule, BackpropSchedule) else schedule.serial
    joins = isinstance(schedule, BackpropSchedule) or schedule.joins
    uneven = setup.link != Link() or len(set(share)) > 1
    if serial or not (setup.crowding or (joins and uneven)):
        return found
    alone = {device: sum(cost.seconds for cost in costs[device.kind]) / device.speed for device in set(share)}
    fastest = sorted(range(len(share)), key=lambda place: alone[share[place]])
    for count in _fewer(min(len(share) - 1, len(costs[share[0].kind]) * setup.stage_replicas)):
        places = sorted(fastest[:count])
        with suppress(PlacementError):  # memory may ask for more
            for one in _layouts_on(costs, setup, schedule, [share[place] for place in places], searches):
                found.append(_renumbered(one, places))
    return found


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


def averaging_of(setup: Setup, *, down: bool = False) -> Averaging:
    """As it is for each batch, or micro-batch; where cores are shared, it is work of theirs.

    Args:
        setup: What is trained on.
        down: Whether by backpropagation.
    """
    return Averaging(down=down, alone=setup.crowding is not None)


def _lay_out(
    costs: CostsByKind, setup: Setup, devices: Sequence[PlannedDevice], schedule: Schedule | None = None
) -> Layout:
    return best_layout(
        costs,
        devices,
        setup.link,
        stage_replicas=setup.stage_replicas,
        replicas=setup.replicas,
        queue_depth=setup.queue_depth,
        schedule=schedule,
        averaging=averaging_of(setup),
    )


def _layouts_on(
    costs: CostsByKind,
    setup: Setup,
    schedule: Schedule | BackpropSchedule,
    devices: Sequence[PlannedDevice],
    searches: Searches,
) -> list[Layout]:
    def once(what: Hashable, search: Callable[[], Layout]) -> Layout:
        return searches.once((id(costs), what, replace(setup, devices=())), devices, search)

    if isinstance(schedule, BackpropSchedule):
        search = partial(
            backprop_layout,
            costs,
            devices,
            setup.link,
            schedule,
            stage_replicas=setup.stage_replicas,
            replicas=setup.replicas,
            averages_alone=averaging_of(setup).alone,
        )
        counting = [True] if schedule.micro_batches == 1 else [True, False]
        return [once((schedule, updates), partial(search, updates=updates)) for updates in counting]
    found = [once(None, lambda: _lay_out(costs, setup, devices))]
    if schedule.joins and not schedule.serial:
        found.append(once(schedule, lambda: _lay_out(costs, setup, devices, schedule)))
    return found


def _fewer(most: int) -> list[int]:
    """The numbers of devices that are tried: all small ones, and of large ones each half of the one before.

    >>> _fewer(40)
    [40, 20, 10, 5, 4, 3, 2, 1]
    """
    return sorted({*range(1, min(most, 4) + 1), *(most >> times for times in range(most.bit_length()))}, reverse=True)


def _renumbered(layout: Layout, places: Sequence[int]) -> Layout:
    stages = [replace(stage, devices=tuple(places[number] for number in stage.devices)) for stage in layout.stages]
    return replace(layout, stages=tuple(stages))
