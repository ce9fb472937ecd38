"""Layers in mapped files: what a layer has learnt lies on disk, and in memory only while the layer is at work.

::

                 layer 3 at work        layer 3's pages may go
    reader ─► 4 into the page cache     writer ─► 3 to the disk, and out of the page cache
              …while 3 trains                     …while 4 trains

Weights, buffers and optimizer states are tensors over a shared mapping of a file, one per layer, that has no name: with
the process it is gone, whatever ends that, and no other one can open it (a process that was forked shares it, and is
not to write to it). Everything that reads or writes a layer does so as ever, by page faults; what is done here is to
ask the kernel early for what comes next, and to have it write and drop what is done, since of data that is gone through
in a circle it would drop what is needed soonest.

In memory stay gradients, from a layer's backward to its update; small tensors; what is sparse, has gaps, shares its
memory with another tensor of the layer, or is replaced after every batch.
A tensor that a module has as a plain attribute over the memory of a weight does not move with it.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeal.core.errors import ConfigError, DataError
from pipeal.core.host_memory import give_freed_memory_back
from pipeal.core.materialize import materialize
from pipeal.core.modules import layers_of, module_of
from pipeal.core.packet import Packet
from pipeal.core.protocols import Path as InferencePath
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import map_tensors, tensors
from pipeal.engine.state.home import Home
from pipeal.engine.state.layer_state import CopyTensor
from pipeal.engine.state.stateful import stateful, tensors_kept_by

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

_WRITING = 2
"""So many layers may be on their way to the disk; the next one waits."""

_MORE_FILES = "allow more open files (ulimit -n)"


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
            todo = _MORE_FILES if error.errno == errno.EMFILE else "name another offload_folder"
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
                todo = f"an offloaded layer takes three files or more; {_MORE_FILES}"
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


class DiskOffload(Home):
    """The layers of a stage in mapped files, and what is asked of the kernel as each comes and goes.

    Args:
        layers: By their numbers, in the order in which they work.
        files: That of each, from :func:`one_by_one`.
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

    def begin(self, index: int, packet: Packet) -> None:  # noqa: ARG002
        """Before a layer's forward: waits for its reading, begins the next one's, and waits while too many layers are
        on their way to the disk.

        Raises:
            DataError: The disk has refused one.
        """
        while self._writing and (len(self._writing) >= _WRITING or self._writing[0].done()):
            self._told(self._writing.popleft())
        if self._reading is not None:
            self._told(self._reading)
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
        self._writing.append(self._pool().submit(file.write))

    def lend(self, index: int, path: InferencePath) -> None:
        """Page faults bring what an inference reads."""

    def take_back(self, index: int) -> None:
        """The kernel drops it when it wants to."""

    def settle(self) -> None:
        """Waits until all is on the disk; raises as :meth:`begin`."""
        while self._writing:
            self._told(self._writing.popleft())

    def changed(self, index: int) -> None:
        """Takes what is new of it; raises as :meth:`end`."""
        self.end(index)
        self.settle()

    def copier(self, index: int, copied: CopyTensor) -> AbstractContextManager[CopyTensor]:  # noqa: ARG002
        """Copies into a further file, which is then written to the disk; raises as :meth:`MappedFile.take`."""
        kept = _kept(self._modules[index], self._optimizers[index])
        return _further_file(self._folder, (tensor for _, tensor in kept))

    def rest(self) -> None:
        """Ends the threads; what goes wrong meanwhile is not told, as something has gone wrong before."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._writing.clear()
        self._reading = None

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1 + _WRITING, "pipeal-offload")
        return self._threads

    def _told(self, done: Future[None]) -> None:
        try:
            done.result()
        except OSError as error:
            folder = self._folder or tempfile.gettempdir()
            todo = f"; {_MORE_FILES}" if error.errno == errno.EMFILE else ""  # to read a layer takes one for a moment
            raise DataError(f"{folder}: an offloaded layer: {error.strerror or error}{todo}") from error


def away(tree: T, folder: str | Path | None) -> T:
    """A copy of plain values whose tensors lie in a file of their own, as :meth:`DiskOffload.copier` makes one here.

    Raises:
        DataError: The disk is too small.
    """
    with _further_file(folder, tensors(tree)) as copied:
        return map_tensors(copied, tree)


@contextmanager
def _further_file(folder: str | Path | None, kept: Iterable[Tensor]) -> Iterator[CopyTensor]:
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


def one_by_one(
    model: nn.Module | Iterable[TrainableLayer],
    folder: str | Path | None,
    files: dict[int, MappedFile],
    seed: int,
    here: Container[int] | None = None,
) -> Iterator[TrainableLayer]:
    """The layers of a model, each with all that it has moved into a file before the next one is made: by a generator,
    or real if it is on the meta device.

    Args:
        model: They are taken from it one at a time.
        folder: As for :class:`MappedFile`, and raises as it does.
        files: Gets the file of each, by its number.
        seed: Of what becomes real.
        here: The numbers of those that have one; None for all. Others are left as they are.
    """
    for number, layer in enumerate(model if isinstance(model, Iterator) else layers_of(model)):
        if here is not None and number not in here:
            yield layer
            continue
        module = module_of(layer)
        materialize(module, seed, number)
        file = files[number] = MappedFile(folder)
        file.take(_kept(module, stateful(module)[0].values()))
        file.let_go()
        file.write()
        yield layer


def _kept(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[Any, Tensor]]:
    """What a layer keeps from batch to batch."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    yield from tensors_kept_by(optimizers)


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
