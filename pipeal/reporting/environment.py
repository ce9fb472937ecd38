"""The circumstances of a number: hardware, versions, and the most memory that its run took."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from pipeal import __version__
from pipeal.engine.devices.cpus import cores


def environment() -> dict[str, str | int | list[str]]:
    """What a run's summary says about where it ran."""
    return {
        "pipeal": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": cores(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def peak_memory_bytes(devices: Iterable[str]) -> dict[str, int]:
    """The peak of this process since it began, and of what it allocated on each GPU it uses.

    Args:
        devices: The device of each stage, such as ``cuda:0``; those on the CPU share the process.

    Returns:
        Bytes: under ``process``, what lay in physical memory; under each GPU's name, the tensors on it.
    """
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = {"process": largest if sys.platform == "darwin" else largest * 1024}
    for device in dict.fromkeys(devices):
        if torch.device(device).type == "cuda":
            peaks[device] = torch.cuda.max_memory_allocated(device)
    return peaks


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
