"""How much memory a training takes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import torch

from pipeal.core.host_memory import give_freed_memory_back, of_glibc, reset_peak, status_bytes
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
        if not sys.platform.startswith("linux"):
            return
        give_freed_memory_back()
        mallopt = of_glibc("mallopt")
        if mallopt is not None:
            # Where its own rule, which cannot be had back, ends at best: blocks of up to 32 MiB are kept. So what it
            # brings to keep all of them is more, if anything, than is measured.
            mallopt(MMAP_THRESHOLD, 2**25 if holes else 2**17)
            mallopt(TRIM_THRESHOLD, 2**26)
        if keep:
            keep_freed_memory()
        if reset_peak():  # where a sandbox forbids it, the peak is not known
            self._before = status_bytes("VmRSS")

    def peak(self) -> int | None:
        """Bytes; None where that is not known."""
        if self._before is None:
            return None
        most = sum(map(torch.cuda.max_memory_allocated, self.gpus)) if self.gpus else status_bytes("VmHWM")
        return most - self._before
