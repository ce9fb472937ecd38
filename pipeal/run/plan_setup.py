"""What a plan is for, out of what was typed: devices, links, replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeal.core.errors import ConfigError
from pipeal.core.options import DEFAULTS
from pipeal.planning.measure.contention import contention_of
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import Costs, LayerCost

_MOST_DEVICES = 65_536

_MOST_GROUPS = 100_000
"""Devices times those of a stage: what the search for a layout can go through while one waits."""


def setup_of(by_kind: Mapping[str, Costs], given: Mapping[str, Any]) -> Setup:
    """What the options say, for costs by kind of device.

    Raises:
        ConfigError: An option is out of range, or asks for what these costs do not say.
    """
    contention = None
    if given["share_cores"]:
        costs = next(iter(by_kind.values()))
        if len(by_kind) > 1 or not costs.crowding:
            raise ConfigError(
                "--share-cores: these costs say nothing of stages that share cores; measure again with it"
            )
        contention = contention_of(costs.crowding)
    devices = devices_of(given["devices"], given["device_speed"], given["memory"], list(by_kind))
    if len(devices) * given["stage_replicas"] > _MOST_GROUPS:
        raise ConfigError(
            f"--stage-replicas: {given['stage_replicas']} of {len(devices)} devices are too many to search; expected "
            f"at most {_MOST_GROUPS // len(devices)} with so many devices"
        )
    links = _links_of(given["link"], given["latency"], len(devices) - 1)
    differ = len(set(links)) > 1
    if differ and (given["replicas"] > 1 or len(set(devices)) > 1):
        raise ConfigError(
            "--link, --latency: one for each link is for one pipeline of devices that are all alike; name one number"
        )
    return Setup(
        tuple(devices),
        Link(min(one.bytes_per_s for one in links), max(one.latency_s for one in links)),
        links=tuple(links) if differ else (),
        replicas=given["replicas"],
        stage_replicas=given["stage_replicas"],
        batches=given["batches"],
        queue_depth=DEFAULTS.queue_depth if given["queue_depth"] is None else given["queue_depth"],
        jitter=given["jitter"],
        within_stage=given["within_stage"],
        contention=contention,
    )


def check_numbers(given: Mapping[str, Any]) -> None:
    """Before minutes go by: all that can be told without costs. Kinds cannot, where they are yet to be measured.

    Raises:
        ConfigError: An option is out of range.
        PlacementError: The replicas cannot share the devices.
    """
    if not given["devices"].isascii() or not given["devices"].isdigit():
        raise ConfigError(
            f"--devices: found {given['devices']!r}; expected a number, since kinds have names in --costs"
        )
    setup_of({"any": Costs("any", (LayerCost(0.0, 0.0),))}, {**given, "share_cores": False}).share()


def _links_of(gigabytes_per_s: str | None, latencies_us: str, count: int) -> list[Link]:
    """From each device to the next; of one device alone one, which nothing is sent over."""
    count = max(1, count)
    rates = [float("inf")] * count
    if gigabytes_per_s is not None:
        found = _numbers("--link", gigabytes_per_s, count, "GB/s, one number above 0", "links")
        rates = [1e9 * one for one in found]
    expected = "microseconds, one number of at least 0"
    latencies = _numbers("--latency", latencies_us, count, expected, "links", lowest=0)
    return [Link(rate, latency_us / 1e6) for rate, latency_us in zip(rates, latencies, strict=True)]


def devices_of(text: str, speeds: str, memory: str | None, kinds: Sequence[str]) -> list[PlannedDevice]:
    """What ``--devices``, ``--device-speed`` and ``--memory`` say.

    >>> [device.kind for device in devices_of("a100*2,cpu", "1", None, ["a100", "cpu"])]
    ['a100', 'a100', 'cpu']

    Raises:
        ConfigError: They are no such numbers, or name a kind without costs.
    """
    names: list[str] = []
    for part in text.split(","):
        kind, star, count = (piece.strip() for piece in part.rpartition("*"))
        if not star:
            kind, count = (kinds[0], count) if count.isdigit() else (count, "1")
        if not (
            kind and count.isascii() and count.isdigit() and 0 < int(count[:6]) <= _MOST_DEVICES and len(count) < 6
        ):
            raise ConfigError(f"--devices: found {text!r}, expected a number such as 8, or kinds: a100*4,cpu*2")
        if kind not in kinds:
            raise ConfigError(f"--devices: there are no costs of the kind {kind!r}; measured: {', '.join(kinds)}")
        names += [kind] * int(count)
    sizes = [None] * len(names) if memory is None else _numbers("--memory", memory, len(names))
    return [
        PlannedDevice(name, speed, None if size is None else round(size * 2**30))
        for name, speed, size in zip(names, _numbers("--device-speed", speeds, len(names)), sizes, strict=True)
    ]


def _numbers(
    option: str,
    text: str,
    count: int,
    expected: str = "one number above 0",
    of: str = "devices",
    lowest: float = 1e-300,
) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) not in (1, count) or not all(lowest <= number < 1e9 for number in found):
        raise ConfigError(f"{option}: found {text!r}, expected {expected}, or one for each of {count} {of}")
    return found * count if len(found) == 1 else found
