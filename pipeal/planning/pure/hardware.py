"""What a plan is for: devices by kind, speed and memory, the links between them, and how they are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from pipeal.core.errors import PlacementError
from pipeal.core.options import WithinStage

Contention: TypeAlias = Callable[[int], float]
"""How many times as long an action takes while so many stages, or carriers of packets, work at once."""


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A device that a plan may use.

    Attributes:
        kind: The kind whose measured costs hold on it.
        speed: How many times as fast as those it is.
        memory_bytes: What it can hold; None for enough.
    """

    kind: str = "cpu"
    speed: float = 1.0
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two devices.

    Attributes:
        bytes_per_s: How fast it carries, in each direction; infinite within one memory.
        latency_s: What a message takes beside that.
    """

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0

    def packet_s(self, count: float, queue_depth: int = 0) -> float:
        """What each of many packets takes, one after the other: while one is under way the next may leave, but no more
        may be under way or wait than the queue holds; 0 for as many as there are.

        >>> slow = Link(bytes_per_s=100, latency_s=9)
        >>> [slow.packet_s(100, queue_depth=depth) for depth in (0, 1, 2)]
        [1.0, 10.0, 5.0]
        """
        busy_s = count / self.bytes_per_s
        return max(busy_s, (busy_s + self.latency_s) / queue_depth) if queue_depth else busy_s

    def all_reduce_s(self, count: int, devices: int) -> float:
        """A sum over so many devices, as a ring: each carries ``2 (n - 1) / n`` of it, in ``2 (n - 1)`` messages.

        >>> Link(bytes_per_s=1e9).all_reduce_s(1_000_000, devices=4)
        0.0015
        """
        if devices < 2:
            return 0.0
        return 2 * (devices - 1) * (count / devices / self.bytes_per_s + self.latency_s)


@dataclass(frozen=True, slots=True)
class Group:
    """The devices of a stage: what they are, how many, and on how many batches at once they hold a graph."""

    device: PlannedDevice
    count: int = 1
    held: int = 1


@dataclass(frozen=True)
class Setup:
    """What is to be trained on, and how.

    Attributes:
        devices: All of them.
        link: Between any two; the worst of them, where ``links`` says more.
        replicas: How many pipelines train together, each on batches of its own and on an equal share of the devices.
        stage_replicas: On how many devices one stage may be, which then share each batch.
        batches: How long the run is, in batches of each replica.
        queue_depth: Packets that may wait behind a stage, or be on their way; they count as its memory. 0 to count
            none, and let as many be on their way as there are.
        within_stage: The order of a stage's layers; None for each schedule's own (:mod:`pipeal.engine.schedule`).
        contention: How much stages slow each other, their replicas included, that share the cores of one machine; None
            for devices of their own.
        links: From each device to the next, where they differ; devices are all alike then, and stages take them in
            order from the first.
        jitter: How much steps vary: standard deviation over mean, of log-normal times, forward and backward of a batch
            by the same factor.
    """

    devices: tuple[PlannedDevice, ...]
    link: Link = field(default_factory=Link)
    replicas: int = 1
    stage_replicas: int = 1
    batches: int = 1000
    queue_depth: int = 2
    within_stage: WithinStage | None = None
    contention: Contention | None = None
    links: tuple[Link, ...] = ()
    jitter: float = 0.0

    def link_after(self, device: int) -> Link:
        """What leads from a device to the next one."""
        return self.links[device] if self.links else self.link

    def share(self) -> list[PlannedDevice]:
        """The devices of one replica.

        Raises:
            PlacementError: The replicas cannot share the devices.
        """
        if self.replicas == 1:
            return list(self.devices)
        counts = Counter(self.devices)
        if any(count % self.replicas for count in counts.values()):
            raise PlacementError(
                f"{self.replicas} replicas cannot share {len(self.devices)} devices equally; choose a number that "
                "divides how many there are of each kind"
            )
        return [device for device, count in counts.items() for _ in range(count // self.replicas)]
