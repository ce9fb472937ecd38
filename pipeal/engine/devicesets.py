"""Which devices may form the next stage: sets of devices already used, and how one leads to another.

Devices of one kind, speed and memory are the same to a layout, so a set is how many of each are used: for 64 devices
of two kinds a thousand sets, in any order along the line. Where there are too many kinds for that, the devices are
used in the order given, and a set is how far along it we are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from pipeal.engine.hardware import PlannedDevice

MOST_MOVES = 10_000
"""Up to so many moves between sets, the order of the devices is free."""


@dataclass(frozen=True, slots=True)
class Group:
    """The devices of a stage: what they are, and how many."""

    device: PlannedDevice
    count: int


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


def _along(devices: Sequence[PlannedDevice], groups: dict[PlannedDevice, list[Group]]) -> DeviceSets:
    moves: Moves = [[] for _ in range(len(devices) + 1)]
    for first, device in enumerate(devices):
        moves[first].append((first + 1, None))
        for group in groups[device]:
            if devices[first : first + group.count] != [device] * group.count:
                break
            moves[first].append((first + group.count, group))
    return DeviceSets(False, moves, list(range(len(devices) + 1)))
