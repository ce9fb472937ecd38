"""A rung of ladder.py trained, and measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from time import perf_counter
from typing import Any

import torch
from memory_taken import Memory
from plain import train_plainly
from rung_data import Task
from rungs import Setting

from pipeal.engine import Pipeline
from pipeal.engine.threads import cores

WARM_UP = 2
"""Batches of a turn that are not timed."""

_RISE = 10
"""Batches over which the learning rate rises."""


@dataclass(frozen=True)
class Measured:
    """A turn of a rung.

    Attributes:
        step_s: Seconds per batch.
        samples_per_s: Texts, blocks of text, or images.
        tokens_per_s: Words or characters, without padding; 0 of images.
        peak_bytes: Of memory that the training took; None where that is not known.
        loss: After the last batch, of the evaluated samples, in nats.
    """

    step_s: float
    samples_per_s: float
    tokens_per_s: float
    peak_bytes: int | None
    loss: float

    def __str__(self) -> str:
        return f"{1e3 * self.step_s:.1f} ms, {self.samples_per_s:,.0f} samples/s, loss {self.loss:.4f}"


class Clock:
    """Seconds since it was made, GPUs' work included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._wait()
        self.begin = perf_counter()

    def seconds(self) -> float:
        """So far."""
        self._wait()
        return perf_counter() - self.begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Counted:
    """Counts the samples and tokens of batches that pass by."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = iter(batches)
        self.samples = self.tokens = 0

    def take(self, number: int) -> Iterator[Any]:
        """The next ones; what was counted before is forgotten."""
        self.samples = self.tokens = 0
        for batch in islice(self.batches, number):
            self.samples += len(batch)
            self.tokens += batch.tokens
            yield batch


def train(task: Task, setting: Setting, seed: int, steps: int) -> Measured:
    """A new model through so many batches, the first of them unmeasured."""
    placement = task.placement(setting) if setting.staged else None
    memory = Memory(task.device, keep=setting.keeps_memory)
    torch.set_float32_matmul_precision("high" if setting.tf32 else "highest")
    package = task.package(setting, seed)
    batches = Counted(task.batches(setting, seed))
    if placement is None and setting.compile == "none":
        torch.set_num_threads(setting.threads or cores())
        package.to(task.device)
        numbers = count()

        def run(some: Iterable[Any]) -> None:
            train_plainly(package, some, task.device, setting.precision, (rise(number) for number in numbers))

        found = timed(task.device, batches, steps, run, memory)
    else:
        devices = [str(task.device)] if placement is None else placement.devices
        schedule = "sequential" if placement is None else "pipelined"
        options: dict[str, Any] = {
            "sizes": None if placement is None else placement.sizes,
            "threads": cores() if placement is None else placement.threads,
            "precision": setting.precision,
            "compile": setting.compile,
            "seed": seed,
        }
        with Pipeline(package, devices, schedule, **options) as pipe:
            found = timed(task.device, batches, steps, lambda some: pipe.run(some, rise), memory)
    return replace(found, loss=task.loss(package))


def timed(
    device: torch.device, batches: Counted, steps: int, run: Callable[[Iterable[Any]], object], memory: Memory
) -> Measured:
    """Runs them, the later ones on the clock. The loss is left for later."""
    run(batches.take(WARM_UP))
    clock = Clock(device)
    run(batches.take(steps - WARM_UP))
    seconds = clock.seconds()
    return Measured(
        seconds / (steps - WARM_UP), batches.samples / seconds, batches.tokens / seconds, memory.peak(), math.nan
    )


def rise(batch: int) -> float:
    """The factor on the learning rates, from a batch's number."""
    return min(1.0, (batch + 1) / _RISE)
