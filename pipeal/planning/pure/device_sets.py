"""Which devices may form the next stage: sets of devices already used, and how one leads to another.

Devices of one kind, speed and memory are the same to a layout, so a set is how many of each are used: for 64 devices
of two kinds a thousand sets, in any order along the line. Where there are too many kinds for that, the devices are
used in the order given, and a set is how far along it we are.

Where a stage holds the more graphs, the more stages come after it, a set also says how many the next stage holds::

    4  --------->  3  -->  2  -->  1  -->  0     one fewer, stage by stage; at the most, as many again
    ^------'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from pipeal.planning.pure.hardware import Group, PlannedDevice

MOST_MOVES = 10_000
"""Up to so many moves between sets, the order of the devices is free."""


Moves = list[list[tuple[int, Group | None]]]
"""For each set, the sets that one more stage leads to, and that stage's devices; None: a device is left out."""


@dataclass(frozen=True)
class DeviceSets:
    """All sets of devices, numbered so that every move leads to a later one; the first is empty.

    Attributes:
        any_order: Whether stages may take the devices in any order.
        moves: From each set.
        used: How many devices are in each set, with those left out.
    """

    any_order: bool
    moves: Moves
    used: list[int]


def device_sets(devices: Sequence[PlannedDevice], most: int) -> DeviceSets:
    """The sets of some devices.

    Args:
        devices: The devices.
        most: How many of them may form one stage.

    >>> fast, slow = PlannedDevice(speed=2.0), PlannedDevice()
    >>> device_sets([fast, slow, slow], most=1).used
    [0, 1, 2, 1, 2, 3]
    """
    counts = Counter(devices)
    sets = prod(count + 1 for count in counts.values())
    groups = {kind: [Group(kind, size) for size in range(1, min(most, count) + 1)] for kind, count in counts.items()}
    if len(counts) > 1 and sets * sum(map(len, groups.values())) > MOST_MOVES:
        return _along(devices, groups)
    kinds = list(counts)
    strides = [prod(counts[kind] + 1 for kind in kinds[place + 1 :]) for place in range(len(kinds))]
    moves: Moves = []
    used = []
    for number, taken in enumerate(product(*(range(counts[kind] + 1) for kind in kinds))):
        used.append(sum(taken))
        moves.append(
            [
                (number + group.count * stride, group)
                for kind, gone, stride in zip(kinds, taken, strides, strict=True)
                for group in groups[kind][: counts[kind] - gone]
            ]
        )
    return DeviceSets(True, moves, used)


def with_graphs(sets: DeviceSets, most: int) -> DeviceSets:
    """The same, for stages that hold graphs: the last of one batch, each before it of one more, up to ``most``.

    Args:
        sets: Of the devices.
        most: On how many batches at once any stage holds a graph.
    """
    # Number 0 leads to the empty set with as many graphs as there may be stages; of equal sets, fewest graphs first.
    moves: Moves = [[(1 + held, None) for held in range(1, most + 1)]]
    used = [0]
    holding: dict[tuple[Group, int], Group] = {}
    for count, row in zip(sets.used, sets.moves, strict=True):
        for held in range(most + 1):
            used.append(count)
            found: list[tuple[int, Group | None]] = []
            for after, group in row if held else []:
                first = 1 + after * (most + 1)
                if group is None:
                    found.append((first + held, None))
                    continue
                own = holding.setdefault((group, held), replace(group, held=held))
                found += [(first + left, own) for left in ([held - 1, held] if held == most else [held - 1])]
            moves.append(found)
    return DeviceSets(sets.any_order, moves, used)


def _along(devices: Sequence[PlannedDevice], groups: dict[PlannedDevice, list[Group]]) -> DeviceSets:
    moves: Moves = [[] for _ in range(len(devices) + 1)]
    for first, device in enumerate(devices):
        moves[first].append((first + 1, None))
        for group in groups[device]:
            if devices[first : first + group.count] != [device] * group.count:
                break
            moves[first].append((first + group.count, group))
    return DeviceSets(False, moves, list(range(len(devices) + 1)))
