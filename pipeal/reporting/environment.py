"""The circumstances of a number: hardware and versions."""

from __future__ import annotations

import platform
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


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
