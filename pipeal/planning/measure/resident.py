"""The physical memory that this process takes from now on, above what it takes already."""

from __future__ import annotations

import ctypes
import gc
import mmap
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch


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
        if sys.platform.startswith("linux"):
            with suppress(AttributeError):  # a C library that is not glibc
                ctypes.CDLL(None).malloc_trim(0)
            with suppress(OSError):  # a sandbox may forbid it
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.before = _status("VmRSS")

    def peak(self) -> int:
        """Bytes, until now."""
        if self._gpu is not None:
            return torch.cuda.max_memory_allocated(self._gpu) - self.before
        return _status("VmHWM") - self.before


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


def _status(name: str) -> int:
    status = Path("/proc/self/status")
    if not status.exists():  # where a peak is all that can be had
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    lines = status.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
