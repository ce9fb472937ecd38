"""How much memory a training takes."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from pipeal.engine.devices.allocator import MMAP_THRESHOLD, TRIM_THRESHOLD, keep_freed_memory


class Memory:
    """The most memory that is taken from now on, beside what is taken already.

    Args:
        devices: Of GPUs their tensors are counted, of all of them together; of this process on a CPU its pages, where
            the system forgets a peak.
        keep: Whether the C library keeps what is freed (:func:`pipeal.engine.devices.allocator.keep_freed_memory`).
        holes: Whether it has a heap for large blocks; else each of 128 KiB or more goes back to the system when freed.
    """

    def __init__(self, devices: Sequence[torch.device], *, keep: bool, holes: bool = True) -> None:
        self.gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        gc.collect()
        if self.gpus:
            torch.cuda.empty_cache()
            for gpu in self.gpus:
                torch.cuda.reset_peak_memory_stats(gpu)
            self._before: int | None = sum(map(torch.cuda.memory_allocated, self.gpus))
            return
        self._before = None
        if sys.platform.startswith("linux"):
            with suppress(AttributeError):  # a C library that is not glibc
                library = ctypes.CDLL(None)
                library.malloc_trim(0)
                # Where its own rule, which cannot be had back, ends at best: blocks of up to 32 MiB are kept. So what
                # it brings to keep all of them is more, if anything, than is measured.
                library.mallopt(MMAP_THRESHOLD, 2**25 if holes else 2**17)
                library.mallopt(TRIM_THRESHOLD, 2**26)
            if keep:
                keep_freed_memory()
            with suppress(OSError):  # where a sandbox forbids it, the peak is not known
                Path("/proc/self/clear_refs").write_text("5")
                self._before = _status("VmRSS")

    def peak(self) -> int | None:
        """Bytes; None where that is not known."""
        if self._before is None:
            return None
        most = sum(map(torch.cuda.max_memory_allocated, self.gpus)) if self.gpus else _status("VmHWM")
        return most - self._before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
