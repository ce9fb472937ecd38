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
import tempfile
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.core.errors import DataError
from pipeal.core.materialize import materialize
from pipeal.core.modules import layers_of, module_of
from pipeal.core.packet import Packet
from pipeal.core.protocols import Path as InferencePath
from pipeal.core.protocols import TrainableLayer
from pipeal.engine.state.home import Home
from pipeal.engine.state.layer_state import CopyTensor
from pipeal.engine.state.mapped_file import MORE_FILES, MappedFile, further_file
from pipeal.engine.state.stateful import stateful, tensors_kept_by

_WRITING = 2
"""So many layers may be on their way to the disk; the next one waits."""


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
        return further_file(self._folder, (tensor for _, tensor in kept))

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
            todo = f"; {MORE_FILES}" if error.errno == errno.EMFILE else ""  # to read a layer takes one for a moment
            raise DataError(f"{folder}: an offloaded layer: {error.strerror or error}{todo}") from error


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
