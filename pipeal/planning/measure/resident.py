"""The physical memory that this process takes from now on, above what it takes already."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys

import torch

from pipeal.core.host_memory import give_freed_memory_back, lifetime_peak, reset_peak, status_bytes

_COUNTS = sys.platform.startswith("linux")
"""Elsewhere a peak is all that can be had."""


class Resident:
    """The most bytes that a process holds, from when this is made, above what it holds then.

    Freed memory is given back to the system before, and the system is asked to forget its earlier peak. Where it
    refuses, the peak is that since the process began: right if what comes takes more than what was.

    Args:
        device: Of a GPU, its tensors are counted, and not the process.

    Attributes:
        before: What it held, in bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None
        gc.collect()
        if self._gpu is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._gpu)
            self.before = torch.cuda.memory_allocated(self._gpu)
            return
        give_freed_memory_back()
        reset_peak()
        self.before = status_bytes("VmRSS") if _COUNTS else lifetime_peak()

    def peak(self) -> int:
        """Bytes, until now."""
        if self._gpu is not None:
            return torch.cuda.max_memory_allocated(self._gpu) - self.before
        return (status_bytes("VmHWM") if _COUNTS else lifetime_peak()) - self.before

    def kept(self) -> int:
        """Bytes that are still held by now, freed memory given back; 0 on a GPU, and where that cannot be told."""
        if self._gpu is not None or not _COUNTS:
            return 0
        gc.collect()
        give_freed_memory_back()
        return status_bytes("VmRSS") - self.before


def untouched_bytes(place: int, size: int) -> int:
    """What of a block of memory on a CPU has no pages yet, as it was never written to; 0 where that cannot be told.

    It is known of blocks that the system maps (:func:`pipeal.engine.devices.allocator.map_large_blocks`); within a heap
    most was written to by what lay there before. oneDNN's LSTM was seen to keep workspaces that are half empty.
    """
    page = mmap.PAGESIZE
    first, last = -(-place // page), (place + size) // page  # whole pages
    if not sys.platform.startswith("linux") or last <= first:
        return 0
    found = (ctypes.c_ubyte * (last - first))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(first * page), ctypes.c_size_t((last - first) * page), found):
        return 0
    return page * sum(not flag & 1 for flag in found)
