"""Tensors in a file without a name, which ends with the process: mapped, read ahead, written and let go of."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pipeal.core.errors import ConfigError, DataError
from pipeal.core.host_memory import give_freed_memory_back
from pipeal.core.tree import map_tensors, tensors
from pipeal.engine.state.layer_state import CopyTensor

Named: TypeAlias = "Iterable[tuple[Any, Tensor]]"
"""Tensors, each with what it is to the layer."""

T = TypeVar("T")

_LINE = 64
"""Bytes to which tensors are aligned, as in PyTorch's own memory."""

_SMALL = 1024
"""Tensors of fewer bytes stay in memory: counters, mostly."""

_MOST_PLACES = 4
"""What is replaced by another tensor after every batch, instead of being written to, stays in memory in the end: its
places could not be used again, since somebody may still have the tensor from before."""

MORE_FILES = "allow more open files (ulimit -n)"
"""What to do where they are too few."""


class MappedFile:
    """Tensors in a file without a name.

    Args:
        folder: On the disk that is meant; None for the system's folder of temporary files.

    Raises:
        ConfigError: This system has no such files.
        DataError: The folder takes no file.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError(f"offload='disk' needs Linux, found {sys.platform}; use 'none'")
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  open as long as its tensors are
        except OSError as error:
            todo = MORE_FILES if error.errno == errno.EMFILE else "name another offload_folder"
            raise DataError(
                f"{self.folder}: {error.strerror or error}; expected a folder for offloaded layers; {todo}"
            ) from error
        self._chunks: list[_Chunk] = []
        self._moved: Counter[Any] = Counter()

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(chunk.size for chunk in self._chunks)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's data is in it."""
        return any(chunk.begin <= tensor.data_ptr() < chunk.begin + chunk.size for chunk in self._chunks)

    def take(self, named: Named) -> None:
        """Moves the data of tensors into it that are not there, all at once.

        Raises:
            DataError: The disk is too small; nothing has been moved.
        """
        found = {id(tensor): (name, tensor) for name, tensor in named if _has_memory(tensor)}.values()
        owners = Counter(tensor.untyped_storage().data_ptr() for _, tensor in found)
        fresh = [
            (name, tensor)
            for name, tensor in found
            if _can_move(tensor)
            and owners[tensor.untyped_storage().data_ptr()] == 1  # of two over one memory, neither may move
            and not self.holds(tensor)
            and self._moved[name] < _MOST_PLACES
        ]
        self.reserve(sum(_aligned(tensor.nbytes) for _, tensor in fresh))
        for name, tensor in fresh:
            self._moved[name] += 1
            tensor.data = self._place(tensor).copy_(tensor.detach())
        if fresh:
            give_freed_memory_back()  # not where all is there already: the next layer would fault its memory in again

    def reserve(self, size: int) -> None:
        """Makes room for tensors of so many bytes together, each rounded up to whole lines; raises as :meth:`take`."""
        if size:
            self._chunks.append(self._chunk(size))

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that lies in it, or in memory where it cannot; raises as :meth:`take`."""
        if tensor.layout is not torch.strided or tensor.nbytes < _SMALL or not _is_dense(tensor):
            return tensor.detach().clone()
        if not self._chunks or self._chunks[-1].left < _aligned(tensor.nbytes):
            self.reserve(_aligned(tensor.nbytes))
        return self._place(tensor).copy_(tensor.detach())

    def read_ahead(self) -> None:
        """Brings all of it into the page cache."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        # Waits until it is there, copies nothing, and leaves the page tables alone, which the layer at work changes
        # (MADV_POPULATE_READ holds their lock); faults that wait for single pages took a third of a small batch's time.
        with open(os.devnull, "wb", buffering=0) as nowhere:
            done = 0
            while done < self.size:
                sent = os.sendfile(nowhere.fileno(), self._file.fileno(), done, self.size - done)
                if not sent:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += sent

    def let_go(self) -> None:
        """Takes its pages out of this process; they stay in the page cache."""
        for chunk in self._chunks:
            chunk.mapped.madvise(mmap.MADV_DONTNEED)

    def write(self) -> None:
        """Waits until it is on the disk, and drops it from the page cache. What is used meanwhile comes back."""
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _chunk(self, size: int) -> _Chunk:
        size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file.fileno(), self.size, size)
            mapped = mmap.mmap(self._file.fileno(), size, offset=self.size)
        except OSError as error:
            if error.errno == errno.EMFILE:
                todo = f"an offloaded layer takes three files or more; {MORE_FILES}"
            else:
                free = os.statvfs(self.folder)
                todo = (
                    f"{size / 2**20:.1f} MiB more were needed for an offloaded layer, "
                    f"{free.f_bavail * free.f_frsize / 2**20:.0f} MiB are free; "
                    + ("allow larger files (ulimit -f)" if error.errno == errno.EFBIG else "make room there")
                    + ", or name another folder by offload_folder"
                )
            raise DataError(f"{self.folder}: {error.strerror or error}; {todo}") from error
        return _Chunk(mapped, size, torch.frombuffer(mapped, dtype=torch.uint8).data_ptr())

    def _place(self, tensor: Tensor) -> Tensor:
        """A place for a dense tensor in the last chunk, with a storage of exactly its bytes."""
        chunk = self._chunks[-1]
        flat = torch.frombuffer(chunk.mapped, dtype=torch.uint8, count=tensor.nbytes, offset=chunk.taken)
        chunk.taken += _aligned(tensor.nbytes)
        return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


@dataclass
class _Chunk:
    mapped: mmap.mmap
    size: int
    begin: int
    taken: int = 0

    @property
    def left(self) -> int:
        return self.size - self.taken


def away(tree: T, folder: str | Path | None) -> T:
    """A copy of plain values whose tensors lie in a file of their own, which is then on the disk.

    Raises:
        DataError: The disk is too small.
    """
    with further_file(folder, tensors(tree)) as copied:
        return map_tensors(copied, tree)


@contextmanager
def further_file(folder: str | Path | None, kept: Iterable[Tensor]) -> Iterator[CopyTensor]:
    """Within it, what copies tensors into a file with room for these, which is then written to the disk."""
    file = MappedFile(folder)
    file.reserve(sum(_aligned(tensor.nbytes) for tensor in kept if _can_move(tensor)))
    yield file.copy
    file.let_go()
    file.write()


def check_folder(folder: str | Path) -> None:
    """Asks whether layers can be offloaded into a folder, which is made where it is missing.

    Raises:
        ConfigError: This system has no such files.
        DataError: The folder takes no file.
    """
    MappedFile(folder)


def _has_memory(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _can_move(tensor: Tensor) -> bool:
    if not _has_memory(tensor) or tensor.nbytes < _SMALL or not _is_dense(tensor):
        return False
    return bool(tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes)


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill a stretch of memory, each once."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True
