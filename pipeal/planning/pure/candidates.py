"""The layouts of which a forecast takes the fastest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from pipeal.core.errors import PlacementError
from pipeal.engine.schedule import Schedule
from pipeal.planning.pure.backprop_layout import backprop_layout
from pipeal.planning.pure.backprop_schedules import BackpropSchedule, naive
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import CostsByKind
from pipeal.planning.pure.layout import Layout, best_layout

Searches: TypeAlias = dict[Hashable, list[tuple[int, Layout]]]
"""The layouts that were found, with the number of devices they were searched for on; of other numbers of devices many
of them are asked for again."""


def layouts(
    costs: CostsByKind, setup: Setup, schedule: Schedule | BackpropSchedule, searches: Searches
) -> list[Layout]:
    """Those of which one is best. With uneven devices or links what a join asks for, or the end of a batch of micro-
    batches, is simulated, not known, and so is how stages crowd each other where they share cores: there, fewer devices
    may be faster. Nor is it known how much of their updates the stages do, after micro-batches, while others still go
    backward. What does one thing at a time gets as many devices as there are, so that they share its memory; but not a
    pipeline whose best number of micro-batches is one.

    Args:
        costs: Of the layers, or of the blocks on one micro-batch.
        setup: What they are on.
        schedule: What they are for.
        searches: What was searched for already, for costs that are still there; it grows.

    Raises:
        PlacementError: Nothing fits on all of them, or the replicas cannot share the devices.
    """
    share = setup.share()
    found = _layouts_on(costs, setup, schedule, share, searches)
    uneven = setup.link != Link() or len(set(share)) > 1
    stays = schedule.serial and (isinstance(schedule, Schedule) or schedule == naive())
    if stays or not (setup.contention or (schedule.joins and uneven)):
        return found
    alone = {device: alone_s(costs, [device]) for device in set(share)}
    fastest = sorted(range(len(share)), key=lambda place: alone[share[place]])
    for count in _fewer(min(len(share) - 1, len(costs[share[0].kind]) * setup.stage_replicas)):
        places = sorted(fastest[:count])
        with suppress(PlacementError):  # memory may ask for more
            for one in _layouts_on(costs, setup, schedule, [share[place] for place in places], searches):
                found.append(_renumbered(one, places))
    return found


def alone_s(costs: CostsByKind, devices: Sequence[PlannedDevice]) -> float:
    """Seconds per batch of all layers, one after the other, on the one that is fastest at it, with memory enough."""
    return min(sum(cost.seconds for cost in costs[device.kind]) / device.speed for device in set(devices))


def _layouts_on(
    costs: CostsByKind,
    setup: Setup,
    schedule: Schedule | BackpropSchedule,
    devices: Sequence[PlannedDevice],
    searches: Searches,
) -> list[Layout]:
    ways: list[tuple[Hashable, Callable[[], Layout]]]
    if isinstance(schedule, BackpropSchedule):
        search = partial(backprop_layout, costs, setup, schedule, devices)
        counting = [True] if schedule.serial else [True, False]
        ways = [((schedule, updates), partial(search, updates=updates)) for updates in counting]
    else:
        search = partial(best_layout, costs, setup, devices, by_layer=schedule.by_layer)
        ways = [(schedule.by_layer, search)]
        if schedule.joins and not schedule.serial:
            ways.append((schedule, partial(search, schedule=schedule)))
    others = replace(setup, devices=())
    return [_once(searches, (id(costs), what, others), devices, way) for what, way in ways]


def _once(searches: Searches, what: Hashable, devices: Sequence[PlannedDevice], search: Callable[[], Layout]) -> Layout:
    """What a search gives, or gave before.

    Of devices that are alike, what is best for more of them is so for these, too, if it uses no more than these: it
    has the fewest that are as good.
    """
    alike = len(set(devices)) == 1
    before = searches.setdefault((what, devices[0] if alike else tuple(devices)), [])
    for count, layout in before:
        if sum(len(stage.devices) for stage in layout.stages) <= len(devices) <= count:
            return layout
    layout = search()
    before.append((len(devices), layout))
    return layout


def _fewer(most: int) -> list[int]:
    """The numbers of devices that are tried: all small ones, and of large ones each half of the one before.

    >>> _fewer(40)
    [40, 20, 10, 5, 4, 3, 2, 1]
    """
    return sorted({*range(1, min(most, 4) + 1), *(most >> times for times in range(most.bit_length()))}, reverse=True)


def _renumbered(layout: Layout, places: Sequence[int]) -> Layout:
    stages = [replace(stage, devices=tuple(places[number] for number in stage.devices)) for stage in layout.stages]
    return replace(layout, stages=tuple(stages))
