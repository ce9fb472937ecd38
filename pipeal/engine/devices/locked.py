"""Memory of the host that a GPU reads and writes by itself, and of no more bytes than were asked for.

PyTorch's own (``pin_memory=True``) is rounded up to a power of two, so that it is used again for the next size: a third
of it is lost on average, and it is kept when it is freed. For a model that does not fit onto a GPU that is too much;
here the pages of an own mapping are locked, and the system has them back with the last tensor over them. The mapping is
shared, so that a process that forks, as loaders of data do, goes on with the pages that the GPU knows.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from pipeal.core.errors import PlacementError
from pipeal.core.outofmemory import in_units

_FOR_ALL_GPUS = 1  # cudaHostRegisterPortable


def locked_memory(size: int, device: torch.device) -> Tensor:
    """So many bytes, as a tensor ``(size,)`` of ``uint8``; they stay locked as long as a tensor over them lives.

    Args:
        size: Bytes, at least 1.
        device: A GPU that is to copy from and to it.

    Raises:
        PlacementError: The system, or the driver, refuses so much.
    """
    try:
        mapped = _Locked(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise PlacementError(_refused(size, getattr(error, "strerror", None) or str(error))) from error
    flat = torch.frombuffer(mapped, dtype=torch.uint8, count=size)
    runtime, place = torch.cuda.cudart(), flat.data_ptr()
    with torch.cuda.device(device):
        status = runtime.cudaHostRegister(place, size, _FOR_ALL_GPUS)
        if status != runtime.cudaError.success:
            with suppress(RuntimeError):
                torch.ones(1, device=device)  # the runtime tells its last error once more, to the next kernel
            raise PlacementError(_refused(size, runtime.cudaGetErrorString(status)))
    mapped.unlock, mapped.locker = lambda: runtime.cudaHostUnregister(place), os.getpid()
    return flat


def _refused(size: int, why: str) -> str:
    return (
        f"offload='host': {in_units(size)} more of page-locked memory for a layer were refused ({why}); give the "
        "process more memory, use fewer or narrower layers, or offload='none'"
    )


class _Locked(mmap.mmap):
    """Unlocked before it is unmapped (a callback of a weak reference would come after that), by who locked it: a
    process that was forked has no CUDA."""

    unlock: Callable[[], object] | None = None
    locker = 0

    def __del__(self) -> None:
        if self.unlock is not None and self.locker == os.getpid():
            self.unlock()
