"""What the processes of the offload benchmark do: train a network of equal blocks, and say how it went.

A process imports, trains one block, gives freed memory back, and only then joins its control group: what it takes from
then on counts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from cgroup import MemoryGroup
from memory_forms import CHARACTERS, bytes_of, digest, layers_of_form, own_tensors, states
from torch import Tensor

from pipeal.core.host_memory import give_freed_memory_back, status_bytes
from pipeal.engine import Pipeline
from pipeal.engine.devices.allocator import keep_freed_memory, map_large_blocks
from pipeal.methods import Network, al
from pipeal.methods.layer import LocalLayer
from pipeal.models.charlm import CharDims, CharLM

LENGTH = 64
"""Characters of a sample."""


@dataclass(frozen=True)
class Training:
    """A network and how it is trained.

    Attributes:
        form: ``BP``, ``BP, recomputed`` or ``AL``.
        width: Of its blocks.
        depth: How many.
        tokens: Of a batch.
        threads: Intra-op.
        folder: Where layers lie that are not at work; None for memory.
        keeps: Whether the C library keeps what is freed.
    """

    form: str
    width: int
    depth: int
    tokens: int
    threads: int
    folder: str | None = None
    keeps: bool = False

    def network(self, depth: int) -> Network:
        """Of so many blocks."""
        dims = CharDims(block=LENGTH, width=self.width, heads=max(4, self.width // 64), layers=depth, dropout=0.0)
        return CharLM.network(CHARACTERS, dims=dims)

    def layers(self) -> Iterator[LocalLayer]:
        """Those of AL one after the other, so that no two need be in memory."""
        torch.manual_seed(0)
        if self.form == "AL":
            return al.make_layers(self.network(self.depth), 1e-3, None)
        return iter(layers_of_form(self.form, self.network(self.depth)))

    def batch(self, number: int, tokens: int) -> tuple[Tensor, Tensor]:
        """``(B, 64)`` each."""
        drawn = torch.Generator().manual_seed(number)
        text = torch.randint(CHARACTERS, (max(1, tokens // LENGTH), LENGTH + 1), generator=drawn)
        return text[:, :-1], text[:, 1:]

    @property
    def options(self) -> dict[str, Any]:
        """Of its pipeline."""
        where = {} if self.folder is None else {"offload": "disk", "offload_folder": self.folder}
        return {"schedule": "sequential", "threads": self.threads, **where}


def bytes_of_layers(training: Training) -> list[int]:
    """Of each layer, weights and optimizer states: two numbers for each weight."""
    return [3 * bytes_of(layer.parameters()) for layer in training.layers()]


class Trainer:
    """A process that trains; every method waits for its answer.

    Args:
        training: What.
        group: Whose limit it gets; None for all of the machine's memory.
        saved: What ``save`` wrote, to go on from there.

    Attributes:
        idle: Bytes that were resident before it made the model.
    """

    def __init__(self, training: Training, group: MemoryGroup | None = None, saved: Path | None = None) -> None:
        context = get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, training, group, saved), daemon=True)
        self._process.start()
        child.close()
        self.idle: int = self.answer()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def ask(self, what: str, *arguments: Any) -> None:
        """Begins a method of :class:`_Served`."""
        self._connection.send((what, arguments))

    def answer(self, timeout_s: float | None = None) -> Any:
        """Its next answer.

        Raises:
            EndedError: The process was ended, as it is where memory runs out.
            TimeoutError: It took longer.
        """
        try:
            if not self._connection.poll(timeout_s):
                raise TimeoutError
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join()
            raise EndedError(f"ended with {self._process.exitcode}") from error

    def do(self, what: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Both."""
        self.ask(what, *arguments)
        return self.answer(timeout_s)

    def kill(self) -> None:
        """With a signal that nothing can catch."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()


class EndedError(Exception):
    """A process was ended."""


def _serve(connection: Connection, training: Training, group: MemoryGroup | None, saved: Path | None) -> None:
    torch.set_num_threads(training.threads)
    for form in ("AL", training.form):  # libraries wake up
        small = Training(form, training.width, 1, training.tokens, training.threads)
        with Pipeline(small.layers(), ["cpu"], **small.options) as pipe:
            pipe.run([small.batch(0, 2 * LENGTH)])
    del pipe
    if training.keeps:
        keep_freed_memory()
    else:
        map_large_blocks()
    give_freed_memory_back()
    if group is not None:
        group.join()
    connection.send(status_bytes("VmRSS"))
    with _opened(training, saved) as pipe:
        served = _Served(training, pipe, connection.send)
        while True:
            try:
                what, arguments = connection.recv()
            except EOFError:
                return
            connection.send(getattr(served, what)(*arguments))


@contextmanager
def _opened(training: Training, saved: Path | None) -> Iterator[Pipeline]:
    if saved is None:
        pipe = Pipeline(training.layers(), ["cpu"], **training.options)
    else:
        pipe = Pipeline.load(saved, training.layers(), ["cpu"], **training.options)
    with pipe:
        yield pipe


class _Served:
    def __init__(self, training: Training, pipe: Pipeline, tell: Callable[[Any], None]) -> None:
        self._training, self._pipe, self._tell = training, pipe, tell

    def train(self, batches: int, tokens: int) -> list[float]:
        """Seconds of each batch."""
        took = []
        for _ in range(batches):
            batch = self._training.batch(self._pipe.next_batch, tokens)
            begin = perf_counter()
            self._pipe.run([batch])
            took.append(perf_counter() - begin)
        return took

    def begin(self, batches: int, tokens: int) -> str:
        """As ``train``, and tells the number of each batch as it begins."""
        for _ in range(batches):
            number = self._pipe.next_batch
            self._tell(number)
            self._pipe.run([self._training.batch(number, tokens)])
        return "done"

    def save(self, path: Path) -> float:
        """Seconds."""
        begin = perf_counter()
        self._pipe.save(path)
        return perf_counter() - begin

    def batch(self) -> int:
        """The number of the next one."""
        return self._pipe.next_batch

    def digest(self) -> str:
        """Of all that is learnt, layer by layer."""
        return digest(chain.from_iterable(chain(own_tensors([layer]), states([layer])) for layer in self._layers))

    def sizes(self) -> dict[str, int]:
        """Bytes of what is learnt, and of the most that was resident."""
        return {
            "weights": bytes_of(parameter for layer in self._layers for parameter in layer.parameters()),
            "optimizer": bytes_of(states(self._layers)),
            "most": status_bytes("VmHWM"),
        }

    @property
    def _layers(self) -> list[Any]:
        return [layer for stage in self._pipe.stages for _, layer in stage.layers]
