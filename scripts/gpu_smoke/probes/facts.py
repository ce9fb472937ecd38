"""What is there: versions, devices, and the variables that change what CUDA, NCCL and PyTorch do."""

from __future__ import annotations

import os
from importlib.metadata import distributions
from typing import Any

import torch
import torch.distributed as dist

from gpu_smoke.place import Place
from gpu_smoke.probes.nvml import driver
from pipeal.reporting.environment import environment

_TOLD = ("CUDA", "NCCL", "TORCH", "PYTORCH", "CUBLAS", "OMP_", "GLOO", "NVIDIA")


def facts(place: Place) -> dict[str, Any]:
    """Versions, devices, environment and packages."""
    return {
        **environment(),
        "driver": None if place.stand_in else _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": _nccl(),
        "devices": [] if place.stand_in else [_device(number) for number in range(torch.cuda.device_count())],
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_TOLD)},
        "packages": {one.name: one.version for one in sorted(distributions(), key=lambda one: one.name.lower())},
    }


def _driver() -> str | None:
    try:
        return driver()
    except OSError:  # the driver answers to CUDA alone
        return None


def _nccl() -> str | None:
    if not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _device(number: int) -> dict[str, Any]:
    told = torch.cuda.get_device_properties(number)
    names = ("name", "total_memory", "multi_processor_count", "L2_cache_size", "uuid")
    places = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    plain = {name: getattr(told, name, None) for name in (*names, *places)}
    return {**plain, "uuid": str(plain["uuid"]), "capability": f"{told.major}.{told.minor}"}


def gpus(_: Place) -> int:
    """How many there are."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
