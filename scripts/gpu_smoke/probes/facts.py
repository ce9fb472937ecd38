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

_TOLD = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_CACHE_DISABLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_LAUNCH_MODE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_TF32_OVERRIDE",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_CUDNN_SDPA_ENABLED",
    "TORCH_DIST_USE_NCCL2",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_CUDA_EVENT_CACHE",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
)
"""Name by name, as what begins with NVIDIA or TORCH may be a key that no file should hold."""


def facts(place: Place) -> dict[str, Any]:
    """Versions, devices, environment and packages."""
    return {
        **environment(),
        "driver": None if place.stand_in else _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": _nccl(),
        "devices": [] if place.stand_in else [_device(number) for number in range(torch.cuda.device_count())],
        "environment": {name: os.environ[name] for name in _TOLD if name in os.environ},
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
