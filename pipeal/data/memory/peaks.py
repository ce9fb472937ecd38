"""How much memory a step needed at most: on CUDA what the allocator gave out, on the CPU what was resident."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from pipeal.core.errors import ConfigError, DataError
from pipeal.core.host_memory import give_freed_memory_back, lifetime_peak, reset_peak, status_bytes
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.core.samples import Samples, as_iterable

__all__ = [
    "CudaPeak",
    "PeakMeter",
    "ResidentPeak",
    "collect_cuda_peak_alloc",
    "collect_peaks",
    "device_memory",
    "meter_for",
]

_Data = TypeVar("_Data")
_Feature = TypeVar("_Feature")


class PeakMeter(Protocol):
    """Measures the most memory in use between two points of a program."""

    def start(self) -> None:
        """Collects garbage, and forgets what was before."""
        ...

    def peak_bytes(self) -> int | None:
        """The most bytes in use since :meth:`start`, those before it included; None where that is not known."""
        ...


class CudaPeak:
    """The most bytes that PyTorch's allocator had given out on a CUDA device at one time.

    The context, other libraries and the allocator's own gaps are not in it: leave them a share of the memory.

    Raises:
        ConfigError: The device is no CUDA device, or not there.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = _device(device)
        if self.device.type != "cuda":
            raise ConfigError(f"device is {str(device)!r}; wanted a CUDA device, such as 'cuda:0'")
        count = torch.cuda.device_count()
        if (self.device.index or 0) >= count:
            raise ConfigError(f"device is {str(device)!r}, but there are {count} CUDA devices here")

    def start(self) -> None:
        """Gives unused blocks back, and forgets the peak so far."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """The peak since :meth:`start`."""
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_allocated(self.device))


class ResidentPeak:
    """The most bytes of this process that were in physical memory at one time.

    Linux keeps that figure (``VmHWM``) and lets a process reset its own (``5`` into ``/proc/self/clear_refs``). Before
    a step free memory goes back to the system where the C library can do that (``malloc_trim``), since what a bigger
    step left behind would count. All threads count; swapped memory does not. The kernel counts pages per core and adds
    them up now and then, so steps below a few megabytes are not measured well.

    Where the figure cannot be reset (macOS, a ``/proc`` that is not writable) there is only the peak of the process's
    whole life: it is a step's own if the step raised it, and not known otherwise. Measure small steps first there.

    Attributes:
        resets: Whether the peak of each step can be known.

    Raises:
        ConfigError: The system counts neither.
    """

    def __init__(self) -> None:
        self.resets = reset_peak()
        self._before = 0
        if not self.resets:
            lifetime_peak()

    def start(self) -> None:
        """Gives unused memory back, and forgets the peak so far."""
        gc.collect()
        give_freed_memory_back()
        if self.resets:
            reset_peak()
        else:
            self._before = lifetime_peak()

    def peak_bytes(self) -> int | None:
        """The peak since :meth:`start`; None where it cannot be reset and was not exceeded."""
        if self.resets:
            return status_bytes("VmHWM")
        peak = lifetime_peak()
        return peak if peak > self._before else None


def meter_for(device: torch.device | str) -> PeakMeter:
    """The meter of a device.

    Raises:
        ConfigError: Neither a CUDA device nor the CPU.
    """
    kind = _device(device).type
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device is {str(device)!r}; wanted a CUDA device or the CPU")
    return CudaPeak(device) if kind == "cuda" else ResidentPeak()


def collect_cuda_peak_alloc(
    dataset: Samples[_Data],
    work: Callable[[_Data], _Feature],
    device: torch.device,
    cleanup: Callable[[], None] | None = None,
) -> tuple[list[_Feature], list[int]]:
    """The peak of CUDA memory for each sample of a stream, beside what ``work`` says of the sample.

    The first few are often smaller than the rest, since PyTorch and optimizers make some buffers at first use.

    Args:
        dataset: The samples, or batches: an iterable, or a data set with ``__getitem__`` and ``__len__``.
        work: Does with one what is to be measured, such as a training step, and returns what a model of memory shall
            see of it. Return numbers, not CUDA tensors: they are kept, and would count from then on.
        device: A CUDA device.
        cleanup: Called after each step; lets go of what ``work`` has left behind, such as gradients.

    Returns:
        The features, and the peaks in bytes. Samples that ran out of memory are in neither; a warning names them.

    Raises:
        ConfigError: The device is no CUDA device (a ``ValueError``).
        DataError: ``dataset`` is nothing to iterate over.
    """
    return collect_peaks(dataset, work, CudaPeak(device), cleanup)


def collect_peaks(
    dataset: Samples[_Data],
    work: Callable[[_Data], _Feature],
    meter: PeakMeter,
    cleanup: Callable[[], None] | None = None,
) -> tuple[list[_Feature], list[int]]:
    """:func:`collect_cuda_peak_alloc` with any meter; samples whose peak is not known are in neither list, too.

    >>> features, peaks = collect_peaks([10, 20], lambda length: length, ResidentPeak())
    >>> len(features) == len(peaks)
    True
    """
    features: list[_Feature] = []
    peaks: list[int] = []
    for position, data in enumerate(as_iterable(dataset, DataError)):
        meter.start()
        found = attempt(cleanup, work, data)
        peak = meter.peak_bytes() if found else None
        if peak is None:
            unknown = "its peak is not above that of the process before, and cannot be told from it"
            why = unknown if found else "it ran out of memory"
            warnings.warn(f"sample {position} is left out of the peaks: {why}", stacklevel=2)
        else:
            features += found
            peaks.append(peak)
    return features, peaks


def attempt(cleanup: Callable[[], None] | None, step: Callable[..., _Feature], *arguments: Any) -> list[_Feature]:
    """Runs a step, and cleans up: what the step gives, as the only item; no item where it runs out of memory."""
    try:
        return _without_its_error(step, *arguments)
    finally:
        if cleanup is not None:
            cleanup()


def _without_its_error(step: Callable[..., _Feature], *arguments: Any) -> list[_Feature]:
    # A function of its own: once it has returned, the error is gone, whose traceback holds the step's tensors.
    try:
        return [step(*arguments)]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return []


def device_memory(device: torch.device | str) -> int:
    """All memory of a device in bytes; of the CPU what the machine has or this process's control group may use."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(limit)
        if path.exists() and (said := path.read_text().strip()).isdecimal():
            total = min(total, int(said))
    return total


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {device!r}; wanted a CUDA device, such as 'cuda:0', or the CPU") from error
