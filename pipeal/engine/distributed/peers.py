"""Who else is there: the ranks of a pipeline, what they run on, and the groups they talk in."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from pipeal.engine.device import Device

T = TypeVar("T")

_TICK_S = 0.1
_COLLECTIVE = timedelta(hours=2)  # a replica may compile meanwhile; who is lost is found out otherwise


class Mesh(Protocol):
    """Stages times replicas."""

    @property
    def stages(self) -> int: ...  # noqa: D102
    @property
    def replicas(self) -> int: ...  # noqa: D102
    def stage_of(self, rank: int) -> int: ...  # noqa: D102
    def replica_of(self, rank: int) -> int: ...  # noqa: D102
    def rank_of(self, replica: int, stage: int) -> int: ...  # noqa: D102


class World(Protocol):
    """The processes of a run; ``torch.distributed`` is initialised with gloo for the CPU.

    Attributes:
        rank: Of this process: ``replica * stages + stage``.
        size: How many there are.
        mesh: Who has which stage of which replica.
        store: Where ranks find each other.
    """

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def mesh(self) -> Mesh: ...  # noqa: D102
    @property
    def store(self) -> dist.Store: ...  # noqa: D102

    def check(self) -> None:
        """Raises a PeerLostError that names a rank which is known to be lost."""
        ...


@dataclass(frozen=True)
class Peer:
    """A rank, as the others know it.

    Attributes:
        rank: Its number.
        stage: What it has of the model.
        replica: Of which copy.
        device: What it computes on.
        host: The machine's name.
        boot: The machine, without doubt: clocks of one boot are one clock.
        gpu: Which GPU of all, where it has one.
    """

    rank: int
    stage: int
    replica: int
    device: str
    host: str
    boot: str
    gpu: str | None

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica}, host {self.host})"


@dataclass(frozen=True)
class Groups:
    """The process groups of a pipeline.

    Attributes:
        packets: For what flows between neighbours.
        control: For small messages, which no packet is to hold up.
        alike: Of the ranks with this rank's stage; None without replicas.
    """

    packets: dist.ProcessGroup
    control: dist.ProcessGroup
    alike: dist.ProcessGroup | None

    def close(self) -> None:
        """Ends them; nobody may use one at the time."""
        for group in (self.packets, self.control, self.alike):
            if group is not None:
                dist.destroy_process_group(group)


_opened = itertools.count()


def meet(world: World, device: Device) -> tuple[list[Peer], Groups]:
    """Lets all ranks know of each other and opens their groups. Every rank calls it, for one pipeline after the other.

    Raises:
        PeerLostError: Someone is known to be lost.
    """
    number = next(_opened)
    return unless_lost(world, lambda: _meet(world, device, f"pipeal/pipeline/{number}/rank"))


def unless_lost(world: World, work: Callable[[], T]) -> T:
    """What ``work`` gives, which may wait for all ranks, unless one is lost first: then it is left behind, waiting."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001  raised below
            failed.append(error)

    thread = threading.Thread(target=run, name="pipeal-meeting", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_TICK_S)
        world.check()
    if failed:
        raise failed[0]
    return found[0]


def clock_offset() -> float:
    """What to add to this process's ``perf_counter`` for the time of day."""
    return time.time() - time.perf_counter()


def _meet(world: World, device: Device, key: str) -> tuple[list[Peer], Groups]:
    mesh, store = world.mesh, world.store
    own = Peer(
        world.rank,
        mesh.stage_of(world.rank),
        mesh.replica_of(world.rank),
        str(device),
        socket.gethostname(),
        _boot(),
        str(getattr(torch.cuda.get_device_properties(device.device), "uuid", device)) if device.lags else None,
    )
    store.set(f"{key}/{world.rank}", json.dumps(asdict(own)))
    peers = [Peer(**json.loads(store.get(f"{key}/{rank}"))) for rank in range(world.size)]
    packets = _group(list(range(world.size)), "gloo")
    control = _group(list(range(world.size)), "gloo")
    alike = None
    if mesh.replicas > 1:
        for stage in range(mesh.stages):
            ranks = [mesh.rank_of(replica, stage) for replica in range(mesh.replicas)]
            backend = "nccl" if _on_gpus_of_their_own([peers[rank] for rank in ranks]) else "gloo"
            group = _group(ranks, backend)
            if stage == own.stage:
                alike = group
    return peers, Groups(packets, control, alike)


def _on_gpus_of_their_own(peers: list[Peer]) -> bool:
    """Whether NCCL can do: it refuses two ranks on one GPU."""
    gpus = [peer.gpu for peer in peers]
    return dist.is_nccl_available() and None not in gpus and len(set(gpus)) == len(gpus)


def _group(ranks: list[int], backend: str) -> Any:
    return dist.new_group(ranks, backend=backend, timeout=_COLLECTIVE)


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()
