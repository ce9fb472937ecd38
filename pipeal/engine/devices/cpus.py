"""How many CPUs this process may use: its affinity mask, and the quota of the container that it is in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path, PurePosixPath
from time import monotonic


def cores(root: Path = Path("/")) -> int:
    """The CPUs of the affinity mask, or as many as the quota of time comes to, rounded up, if that is fewer.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, ceil(quota)))


@cache
def cpu_quota(root: Path = Path("/")) -> float | None:
    """The CPUs' worth of time that cgroups, version 1 or 2, allow this process; None where they set no limit.

    The least of its group's quota and those of the groups around it.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    quotas = []
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:  # version 2, or the unified part of a hybrid
            mounts, read = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"], _version_2
        elif "cpu" in controllers.split(","):
            mounts, read = [root / "sys/fs/cgroup" / name for name in (controllers, "cpu")], _version_1
        else:
            continue
        # Within a container the path may be the host's: its own group is then what is mounted.
        around = [PurePosixPath(group), *PurePosixPath(group).parents]
        for folder in dict.fromkeys(mount / str(part).lstrip("/") for mount in mounts for part in around):
            quotas += read(folder)
    return min(quotas, default=None)


def load_average() -> float | None:
    """How many processes were at work, or wanted to be, in the last minute; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def is_busy() -> bool:
    """Whether others keep all CPUs of this machine at work."""
    return (load_average() or 0.0) >= (os.cpu_count() or 1)


@dataclass(frozen=True)
class ProcessorTime:
    """What the CPUs of the affinity mask have done so far, in seconds.

    Attributes:
        at: When this was read, on a clock that only grows.
        cpus: How many they are.
        busy_s: Of all of them, for any process, and what the host of a virtual machine gave to others meanwhile.
        own_s: What this process had, with its children that have ended.
    """

    at: float
    cpus: int
    busy_s: float
    own_s: float

    @classmethod
    def now(cls, root: Path = Path("/")) -> ProcessorTime | None:
        """As the system counts it; None where it does not (it is Linux that does).

        Args:
            root: Where ``proc`` is.
        """
        own_s = sum(os.times()[:4])
        try:
            allowed = os.sched_getaffinity(0)
            tick_s = 1 / os.sysconf("SC_CLK_TCK")
        except (AttributeError, ValueError, OSError):
            return None
        rows = [line.split() for line in _lines(root / "proc/stat")]
        found = [row[1:] for row in rows if row and row[0][3:].isdigit() and int(row[0][3:]) in allowed]
        if not found:
            return None
        # user nice system idle iowait irq softirq steal
        ticks = sum(int(row[place]) for row in found for place in (0, 1, 2, 5, 6, 7))
        return cls(monotonic(), len(found), ticks * tick_s, own_s)

    def others_share(self, before: ProcessorTime) -> float:
        """The share of these CPUs that others had since an earlier reading, 0 to 1.

        >>> before = ProcessorTime(0.0, 2, 100.0, 10.0)
        >>> ProcessorTime(10.0, 2, 115.0, 20.0).others_share(before)  # of 20 s, 15 s were used, 10 s by this process
        0.25
        """
        passed_s = self.cpus * (self.at - before.at)
        others_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return min(1.0, max(0.0, others_s / passed_s)) if passed_s > 0 else 0.0


def omp_threads() -> int | None:
    """What ``OMP_NUM_THREADS`` says of the first level, if it is a whole number above 0."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else None


def _version_2(folder: Path) -> list[float]:
    return [_ratio(*line.split()) for line in _lines(folder / "cpu.max") if _is_limit(line.split())]


def _version_1(folder: Path) -> list[float]:
    found = [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
    return [_ratio(*found)] if _is_limit(found) else []


def _is_limit(found: list[str]) -> bool:
    """A quota and a period, in microseconds; without a limit the quota is ``max``, or -1."""
    return len(found) == 2 and all(part.isascii() and part.isdigit() and int(part) > 0 for part in found)


def _ratio(quota: str, period: str) -> float:
    return int(quota) / int(period)


def _lines(path: Path) -> list[str]:
    """Nothing where there is no such file: not every system has cgroups, nor every group a quota."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
