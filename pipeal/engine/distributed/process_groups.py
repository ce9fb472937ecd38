"""What the ranks of a pipeline know of each other, and the groups they talk in."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from inspect import signature
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from pipeal.core.background import in_background
from pipeal.engine.devices import Device
from pipeal.engine.distributed.world import World

BUCKET_BYTES = 2**25
"""About how much of the gradients travels at once: large enough for the network, small enough to overlap."""

_COLLECTIVE = timedelta(hours=2)
"""The groups' own timeout: a replica may compile meanwhile, and whether a peer lives is known better by the world."""


@dataclass(frozen=True)
class Seat:
    """A rank's place in a pipeline.

    Attributes:
        device: What it computes on, as it is called there.
        gpu: Which GPU of all, where it has one.
        clock: What to add to its ``perf_counter`` for that of rank 0; exact on one machine, elsewhere as good as the
            machines' clocks.
    """

    device: str
    gpu: str | None
    clock: float


@dataclass(frozen=True)
class Groups:
    """The process groups of a pipeline, beside which packets and messages go over :class:`~.endpoint.Endpoint`.

    Attributes:
        alike: Of the ranks with this rank's stage; None without replicas.
        alike_on_gpus: The same, between GPUs, where each has its own.
        pairs: Of this rank and a neighbour, where each has its own GPU: by the lower rank, one on and one back.
    """

    alike: dist.ProcessGroup | None = None
    alike_on_gpus: dist.ProcessGroup | None = None
    pairs: Mapping[tuple[int, bool], dist.ProcessGroup] = field(default_factory=dict)

    def close(self) -> None:
        """Ends them; nobody may use one at the time. May block where a rank is lost."""
        for group in (self.alike, *self._on_gpus()):
            if group is not None:
                dist.destroy_process_group(group)

    def abort(self, within_s: float) -> None:
        """Ends what is under way between GPUs, which NCCL would wait for until a rank that is gone comes back.

        All at once: the end of one group may have to wait for the device,
        which another group's kernel holds up. NCCL may take its time, and nobody waits longer than ``within_s``.
        """
        wait([in_background(partial(_abort, group), "pipeal-abort") for group in self._on_gpus()], within_s)

    def _on_gpus(self) -> list[Any]:
        return [*([] if self.alike_on_gpus is None else [self.alike_on_gpus]), *self.pairs.values()]


def take_seats(world: World, device: Device) -> list[Seat]:
    """All ranks' places; every rank calls it, for one pipeline after the other.

    Raises:
        PeerLostError: Someone is lost.
    """
    machine = world.peers[world.rank].machine.split(" ")[0]
    gpu = own_gpu(world, device.device)
    own = {"device": str(device), "gpu": gpu, "machine": machine, "ahead": time.time() - perf_counter()}
    found = world.gather(own)
    first = found[0]
    return [
        Seat(one["device"], one["gpu"], 0.0 if one["machine"] == first["machine"] else one["ahead"] - first["ahead"])
        for one in found
    ]


def own_gpu(world: World, device: torch.device) -> str | None:
    """Which GPU of all this rank's device is, as :func:`gpu_of`; None where it is none."""
    peer = world.peers[world.rank]
    return gpu_of(device, peer.machine.split(" ")[0] or peer.host) if device.type == "cuda" else None


def gpu_of(device: torch.device, machine: str) -> str:
    """Which GPU of all a device is, as NCCL tells them apart: by its place on the bus of its machine.

    Parts of one GPU (MIG) have identifiers of their own, but one place, and NCCL refuses two ranks there. A PyTorch
    that does not know the place, as 2.6 does not, gives the identifier.
    """
    properties = torch.cuda.get_device_properties(device)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return str(getattr(properties, "uuid", device))
    return f"{machine} {':'.join(map(str, place))}"


def open_groups(world: World, seats: list[Seat]) -> Groups:
    """The groups of a pipeline, with all connections made; every rank calls it.

    Raises:
        PeerLostError: Someone is lost.
    """
    if world.mesh.replicas == 1 and all(seat.gpu is None for seat in seats):
        return Groups()  # packets go over the endpoint
    world.open_groups()
    return world.together("connecting the ranks of a pipeline", lambda: _open_groups(world, seats))


def _open_groups(world: World, seats: list[Seat]) -> Groups:
    everyone, mesh = list(range(world.size)), world.mesh
    alike = alike_on_gpus = None
    for stage in range(mesh.stages) if mesh.replicas > 1 else ():
        # Every rank takes part in making every group.
        ranks = mesh.column(stage)
        by_host: Any = dist.new_group(ranks, backend="gloo", timeout=_COLLECTIVE)
        on_gpus = have_gpus_of_their_own([seats[rank] for rank in ranks])
        by_gpu = gpu_group(ranks, seats[world.rank]) if on_gpus else None
        if world.rank in ranks:
            alike, alike_on_gpus = by_host, by_gpu
            if by_gpu is not None:
                for elements in (1, BUCKET_BYTES // 4):  # little goes another way than much
                    _connect(seats[world.rank], by_gpu.allreduce, elements=elements)
                    _connect(seats[world.rank], by_gpu.broadcast, dist.BroadcastOptions(), elements=elements)
    pairs = {}
    for lower in everyone[:-1]:
        ranks = [lower, lower + 1]
        if mesh.replica_of(lower) == mesh.replica_of(lower + 1) and have_gpus_of_their_own(
            [seats[one] for one in ranks]
        ):
            for back in (False, True):
                group = gpu_group(ranks, seats[world.rank])
                if world.rank in ranks:
                    pairs[lower, back] = group
                    sends = (world.rank == lower) != back
                    _connect(seats[world.rank], group.send if sends else group.recv, int(world.rank == lower), 0)
    return Groups(alike, alike_on_gpus, pairs)


def have_gpus_of_their_own(seats: list[Seat]) -> bool:
    """Whether NCCL will do: it refuses two ranks on one GPU."""
    gpus = [seat.gpu for seat in seats]
    return dist.is_nccl_available() and None not in gpus and len(set(gpus)) == len(gpus)


def gpu_group(ranks: list[int], seat: Seat) -> Any:
    """A group over NCCL of some ranks; every rank calls it, with its own seat, and those that are not of it, too."""
    # Else NCCL's own watchdog ends this process, before it can say whom it lost; torchrun asks for that.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    # Likewise: its monitor ends a process whose watchdog stands still for minutes, as it may in an abort. Whether peers
    # live is watched by the world. A newer PyTorch has no such monitor.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    bound: dict[str, Any] = {}
    # Left to itself, a newer PyTorch takes the GPU of this rank's number, on its machine or of all. An older one asks
    # nobody, and takes that of the first tensor.
    if seat.gpu is not None and "device_id" in signature(dist.new_group).parameters:
        bound["device_id"] = torch.device(seat.device)
    return dist.new_group(ranks, backend="nccl", timeout=_COLLECTIVE, **bound)


def _connect(seat: Seat, operation: Callable[..., Any], *arguments: Any, elements: int = 1) -> None:
    """Has NCCL make the connections of an operation now, in the same order on all ranks: at the first packets each
    rank would come to them in an order of its own, and hold up the device."""
    with torch.cuda.device(seat.device):
        operation([torch.zeros(elements, device=seat.device)], *arguments).wait()
        torch.cuda.synchronize()


def _abort(group: Any) -> None:
    with suppress(Exception):  # of a pipeline that has failed: what it failed with is what is told
        abort = getattr(group._get_backend(torch.device("cuda")), "abort", None)
        if abort is not None:  # else a command leaves without asking its threads: see pipeal.cli.entry
            abort()
