"""What a plan is for: devices by kind, speed and memory, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass


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
