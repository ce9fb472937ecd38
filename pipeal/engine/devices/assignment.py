"""Which device each stage is on, and how many layers it holds: as named, as planned, or chosen here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from pipeal.core.errors import PlacementError
from pipeal.core.modules import device_of, module_of
from pipeal.core.partition import balance
from pipeal.core.protocols import TrainableLayer
from pipeal.core.spread import blocks_of
from pipeal.engine.devices import Device, DeviceRow, all_devices, device_names, parse_device
from pipeal.engine.devices.cpus import cores
from pipeal.engine.devices.threads import threads_each
from pipeal.engine.schedule import Schedule
from pipeal.engine.sizes import check_sizes, layers_of_stages


@runtime_checkable
class Planned(Protocol):
    """A plan for the stages; :class:`pipeal.planning.placement.Placement` is one."""

    @property
    def devices(self) -> Sequence[str]:
        """One device per stage."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """The number of layers of each stage."""
        ...

    @property
    def threads(self) -> int:
        """Intra-op threads of each CPU worker."""
        ...


Devices: TypeAlias = str | torch.device | Iterable[str | torch.device] | Planned | None
"""How a user says where the stages are."""


@dataclass(frozen=True)
class Assigned:
    """The stages.

    Attributes:
        devices: One per stage.
        sizes: The number of layers of each.
        threads: Intra-op threads of each CPU worker; None where no stage is on a CPU, whatever was asked for.
        is_row: Whether all devices are one stage, which holds a single layer; sizes then count its blocks.
    """

    devices: list[torch.device]
    sizes: list[int]
    threads: int | None
    is_row: bool

    def stages(self, handles: Sequence[Device]) -> list[tuple[Device, range]]:
        """The place of each stage, made of handles on the devices, and the numbers of its layers."""
        if self.is_row:
            return [(DeviceRow(handles, self.sizes), range(1))]
        return list(zip(handles, layers_of_stages(self.sizes), strict=True))


def assign(
    layers: Sequence[TrainableLayer],
    devices: Devices,
    sizes: Sequence[int] | None,
    threads: int | None,
    schedule: Schedule,
) -> Assigned:
    """The stages for some layers; see :class:`pipeal.Pipeline`. What is given goes before what a plan says.

    Raises:
        PlacementError: Layers, stages and devices do not fit, or a device does not exist.
    """
    if isinstance(devices, Planned):
        sizes = devices.sizes if sizes is None else sizes
        threads = devices.threads if threads is None else threads
    names = [parse_device(name) for name in _names(devices, layers)]
    blocks = _blocks_of(layers) if len(names) > 1 else None
    units = len(layers) if blocks is None else blocks
    found = balance([1.0] * units, len(names)) if sizes is None else check_sizes(sizes, units, len(names))
    each = None  # what the caller does beside GPUs, such as to get the data ready, keeps its own number
    if any(name.type == "cpu" for name in names):
        # The devices of a row take turns, each with all cores.
        each = threads_each(names if blocks is None else names[:1], schedule, threads)
    return Assigned(names, found, each, blocks is not None)


def _names(devices: Devices, layers: Sequence[TrainableLayer]) -> list[str | torch.device]:
    if devices is None:
        homes = [device_of(module_of(layer)) for layer in layers]
        return ["cpu" if home.type == "meta" else home for home in homes]  # there it becomes real
    if isinstance(devices, Planned):
        return list(devices.devices)
    if isinstance(devices, torch.device):
        return [devices]
    if devices == "auto":
        found = all_devices()
        return list((["cpu"] * cores() if found == ["cpu"] else found)[: len(layers)])
    if isinstance(devices, str):
        return list(device_names(devices))
    if not isinstance(devices, Iterable):
        raise PlacementError(
            f"devices is {devices!r}; expected one name per stage, such as ['cuda:0', 'cuda:1'] or 'cpu*4', or 'auto'"
        )
    return list(devices)


def _blocks_of(layers: Sequence[TrainableLayer]) -> int | None:
    """The blocks of a model that may lie on several devices as a single stage; None for models of other kinds."""
    blocks = blocks_of(layers[0]) if len(layers) == 1 else 1
    return blocks if blocks > 1 else None
