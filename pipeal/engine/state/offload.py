"""Layers in mapped files: what a layer has learnt lies on disk, and in memory only while the layer is at work.

::

                 layer 3 at work        layer 3's pages may go
    reader ─► 4 into the page cache     writer ─► 3 to the disk, and out of the page cache
              …while 3 trains                     …while 4 trains

Weights, buffers and optimizer states are tensors over a shared mapping of a file, one per layer, that has no name: with
the process it is gone, whatever ends that, and no other process can touch it. Everything that reads or writes a layer
does so as ever, by page faults; what is done here is to ask the kernel early for what comes next, and to have it write
and drop what is done, since of data that is gone through in a circle it would drop what is needed soonest.

Gradients stay in memory, from a layer's backward to its update.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, DataError, first_line
from pipeal.engine.devices.allocator import give_freed_memory_back
from pipeal.engine.state.stateful import stateful

_LINE = 64
"""Bytes to which tensors are aligned, as in PyTorch's own memory."""

_SMALL = 1024
"""Tensors of fewer bytes stay in memory: counters, mostly."""

_WRITING = 2
"""So many layers may be on their way to the disk; the next one waits."""


class MappedFile:
    """Tensors in a file without a name.

    Args:
        folder: On the disk that is meant; None for the system's folder of temporary files.

    Raises:
        ConfigError: This system has no such files.
        DataError: The folder takes no file.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        if not hasattr(os, "posix_fallocate") or not hasattr(mmap.mmap, "madvise"):
            raise ConfigError("offload='disk' needs a system with posix_fallocate and madvise; use 'none'")
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  open as long as its tensors are
        except OSError as error:
            raise DataError(f"{self.folder}: {first_line(error)}; expected a folder for offloaded layers") from error
        self._size = 0
        self._maps: list[mmap.mmap] = []
        self._stretches: list[tuple[int, int]] = []  # of addresses

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's data is in it."""
        address = tensor.data_ptr()
        return any(first <= address < end for first, end in self._stretches)

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Moves the data of tensors into it, all at once; tensors that are small or have gaps stay where they are.

        Raises:
            DataError: The disk is too small; nothing has been moved.
        """
        moved = [one for one in tensors if one.nbytes >= _SMALL and _is_dense(one) and not self.holds(one)]
        if moved:
            for tensor, place in zip(moved, self._room(moved), strict=True):
                tensor.data = place.copy_(tensor.detach())
            give_freed_memory_back()

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that lies in it, or in memory where it is small; raises as :meth:`take`."""
        found = tensor.detach().clone(memory_format=torch.preserve_format) if tensor.nbytes < _SMALL else None
        return self._room([tensor])[0].copy_(tensor.detach()) if found is None else found

    def read_ahead(self) -> None:
        """Asks for all of it to be brought into the page cache."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def let_go(self) -> None:
        """Takes its pages out of this process; they stay in the page cache."""
        for one in self._maps:
            one.madvise(mmap.MADV_DONTNEED)

    def write(self) -> None:
        """Waits until it is on the disk, and drops it from the page cache. What is used meanwhile comes back."""
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _room(self, tensors: list[Tensor]) -> list[Tensor]:
        sizes = [-(-one.nbytes // _LINE) * _LINE for one in tensors]
        size = -(-sum(sizes) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file.fileno(), self._size, size)
        except OSError as error:
            free = os.statvfs(self.folder)
            raise DataError(
                f"{self.folder}: {first_line(error)}; {size / 2**20:.0f} MiB more were needed for an offloaded layer, "
                f"{free.f_bavail * free.f_frsize / 2**20:.0f} MiB are free; name another folder by offload_folder"
            ) from error
        mapped = mmap.mmap(self._file.fileno(), size, offset=self._size)
        self._size += size
        self._maps.append(mapped)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping
        self._stretches.append((whole.data_ptr(), whole.data_ptr() + size))
        places, begin = [], 0
        for tensor, taken in zip(tensors, sizes, strict=True):
            flat = whole[begin : begin + tensor.nbytes].view(tensor.dtype)
            places.append(flat.as_strided(tensor.shape, tensor.stride() if _is_dense(tensor) else _row(tensor)))
            begin += taken
        return places


class Offloaded:
    """The layers of a stage in mapped files, and what is asked of the kernel as each comes and goes.

    Args:
        layers: By their numbers, in the order in which they work.
        files: That of each, from :func:`offloaded`.
        folder: As for :class:`MappedFile`.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], files: Mapping[int, MappedFile], folder: str | Path | None
    ) -> None:
        self._folder = folder
        self._files = files
        self._modules = layers
        self._optimizers = {index: list(stateful(module)[0].values()) for index, module in layers.items()}
        order = list(layers)
        self._next = dict(zip(order, order[1:] + order[:1], strict=True))
        self._threads: ThreadPoolExecutor | None = None
        self._reading: Future[None] | None = None
        self._writing: deque[Future[None]] = deque()

    def begin(self, index: int) -> None:
        """Before a layer's forward: asks for the next one, and waits while too many are on their way to the disk.

        Raises:
            DataError: The disk has refused one.
        """
        while self._writing and (len(self._writing) >= _WRITING or self._writing[0].done()):
            _told(self._writing.popleft(), self._folder)
        if self._reading is not None:
            _told(self._reading, self._folder)
        if self._next[index] != index:
            self._reading = self._pool().submit(self._files[self._next[index]].read_ahead)

    def end(self, index: int) -> None:
        """After a layer's update: takes what its optimizers have made, and sends all of it to the disk.

        Raises:
            DataError: The disk is too small.
        """
        file = self._files[index]
        file.take(_kept(self._modules[index], self._optimizers[index]))
        file.let_go()
        give_freed_memory_back()
        self._writing.append(self._pool().submit(file.write))

    def copier(self) -> MappedFile:
        """A further file, for copies."""
        return MappedFile(self._folder)

    def rest(self) -> None:
        """Waits until all is on the disk, and ends the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._writing.clear()
        self._reading = None

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, "pipeal-offload")
        return self._threads


def offloaded(module: nn.Module, folder: str | Path | None) -> MappedFile:
    """A file for a layer, with all that it has so far; raises as :class:`MappedFile`."""
    file = MappedFile(folder)
    file.take(_kept(module, stateful(module)[0].values()))
    file.let_go()
    file.write()
    return file


def _kept(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """What a layer keeps from batch to batch."""
    yield from module.parameters()
    yield from module.buffers()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _told(done: Future[None], folder: str | Path | None) -> None:
    try:
        done.result()
    except OSError as error:
        raise DataError(f"{folder or tempfile.gettempdir()}: an offloaded layer: {first_line(error)}") from error


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill a stretch of memory, each once."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True


def _row(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta").stride()
