"""The most memory that a run took."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable

import torch


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
