"""A rung of ladder.py trained, and measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from time import perf_counter
from typing import Any, TypeAlias

import torch
from memory_taken import Memory
from plain import train_plainly
from rung_data import Task
from rungs import Setting

from pipeal.engine import Pipeline
from pipeal.engine.devices.cpus import cores
from pipeal.engine.distributed import DistributedPipeline
from pipeal.engine.schedule import Action
from pipeal.engine.state.layer_state import load_layer_state
from pipeal.engine.state.snapshot import LayerState
from pipeal.engine.trace import Span, Window
from pipeal.methods.al import ALPackage
from pipeal.planning.measure.layers import WARM_UP, uncollected

Line: TypeAlias = Pipeline | DistributedPipeline

_RISE = 10
"""Batches over which the learning rate rises."""


@dataclass(frozen=True)
class Measured:
    """A turn of a rung.

    Attributes:
        step_s: Seconds per batch.
        samples_per_s: Texts, blocks of text, or images.
        tokens_per_s: Words or characters, without padding; 0 of images.
        peak_bytes: Of memory that the training took, on all devices together; None where that is not known.
        loss: After the turn's batches, of the evaluated samples, in nats.
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
    """Counts what the batches that pass by hold.

    Attributes:
        held: Of each batch so far, its samples and its tokens.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = iter(batches)
        self.held: list[tuple[int, int]] = []

    def take(self, number: int) -> Iterator[Any]:
        """The next ones."""
        for batch in islice(self.batches, number):
            self.held.append((len(batch), batch.tokens))
            yield batch


@uncollected()
def train(task: Task, setting: Setting, seed: int, steps: int) -> Measured:
    """A new model through so many batches, the first :data:`WARM_UP` of them unmeasured."""
    torch.set_float32_matmul_precision("high" if setting.tf32 else "highest")
    if setting.staged:
        return train_in_stages(task, setting, seed, steps)
    memory = Memory([task.device], keep=setting.keeps_memory)
    package = task.package(setting, seed)
    batches = Counted(task.batches(setting, seed))
    threads = setting.threads or cores()
    if setting.piped:
        options = {**setting.of_pipeline, "threads": threads, "seed": seed}

        def updates(batch: int) -> bool:
            return (batch + 1) % setting.accumulate == 0 or batch + 1 == steps

        with Pipeline(package, [str(task.device)], "sequential", **options) as pipe:
            found = timed(task.device, batches, steps, partial(pipe.run, lr_scale=rise, updates=updates), memory)
    else:
        torch.set_num_threads(threads)
        package.to(task.device)
        scales = map(rise, count())

        def run(some: Iterable[Any]) -> None:
            train_plainly(package, some, task.device, setting.precision, scales)

        found = timed(task.device, batches, steps, run, memory)
    return replace(found, loss=task.loss(package))


def timed(
    device: torch.device, batches: Counted, steps: int, run: Callable[[Iterable[Any]], object], memory: Memory
) -> Measured:
    """Runs them, the later ones on the clock. The loss is left for later."""
    run(batches.take(WARM_UP))
    clock = Clock(device)
    run(batches.take(steps - WARM_UP))
    seconds = clock.seconds()
    samples, tokens = (sum(counts) / seconds for counts in zip(*batches.held[WARM_UP:], strict=True))
    return Measured(seconds / (steps - WARM_UP), samples, tokens, memory.peak(), math.nan)


def train_in_stages(task: Task, setting: Setting, seed: int, steps: int) -> Measured:
    """In stages of this process; see :func:`train_in_line`."""
    placement, options = task.placement(setting), options_in_line(task, setting, seed, steps)

    def line(package: ALPackage) -> Pipeline:
        return Pipeline(package, placement.devices, "pipelined", **options)

    memory = Memory([torch.device(name) for name in placement.devices], keep=setting.keeps_memory)
    return train_in_line(task, setting, seed, steps, line, memory)


def options_in_line(task: Task, setting: Setting, seed: int, steps: int) -> dict[str, Any]:
    """What every pipeline of such stages is opened with, on every rank."""
    placement, trace = task.placement(setting), Window(0, _fed(task, setting, steps))
    placed = {"sizes": placement.sizes, "threads": placement.threads}
    return {**placed, "trace": trace, "seed": seed, **setting.of_pipeline}


def train_in_line(
    task: Task, setting: Setting, seed: int, steps: int, line: Callable[[ALPackage], Line], memory: Memory
) -> Measured:
    """Two new models in stages: one for the clock, through more batches, and one for the loss, through so many.

    Stages have to fill at first and run empty in the end. In a training of thousands of batches that is nothing, in a
    turn of six it would be most of the time: so what is measured is :func:`in_flow`.

    Args:
        task: What is trained.
        setting: How.
        seed: Of both models and their batches.
        steps: Batches of the second.
        line: Opens a pipeline, whose layers may be in other processes.
        memory: Counts from before.
    """
    found = _on_the_clock(task, setting, seed, steps, line, memory)
    states = _learnt(task, setting, seed, steps, line)
    package = task.package(setting, seed)
    for number, layer in enumerate(package):
        load_layer_state(layer, states[number].state)
    return replace(found, loss=task.loss(package))


def _on_the_clock(
    task: Task, setting: Setting, seed: int, steps: int, line: Callable[[ALPackage], Line], memory: Memory
) -> Measured:
    batches = Counted(task.batches(setting, seed))
    with line(task.package(setting, seed)) as pipe:
        pipe.run(batches.take(_fed(task, setting, steps)), rise)
        spans = pipe.spans()
    step_s, samples, tokens = in_flow(spans, batches.held)
    return Measured(step_s, samples, tokens, memory.peak(), math.nan)


def _learnt(
    task: Task, setting: Setting, seed: int, steps: int, line: Callable[[ALPackage], Line]
) -> dict[int, LayerState]:
    with line(task.package(setting, seed)) as pipe:
        pipe.run(islice(task.batches(setting, seed), steps), rise)
        return pipe.snapshot().wait()


def _fed(task: Task, setting: Setting, steps: int) -> int:
    """Batches of a line that is on the clock for so many."""
    return steps + 4 * len(task.placement(setting).devices)  # no more than three for each are on their way at once


def in_flow(spans: Sequence[Span], held: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Seconds per batch, samples and tokens per second of a pipeline while all of its stages have work.

    From when the first :data:`WARM_UP` batches have left the last stage until the first stage has done with the last
    batch. Every action within that time counts, by what it is of all that a batch costs::

        stage 0  0 1 2 3 4 5|
        stage 1    0 1|2 3 4|5
                      └ here ┘

    Args:
        spans: Of all actions on all batches.
        held: Of each batch, its samples and its tokens.
    """
    ended: dict[tuple[int, int], float] = defaultdict(float)
    cost: dict[tuple[int, Action], float] = defaultdict(float)
    for span in spans:
        ended[span.stage, span.batch] = max(ended[span.stage, span.batch], span.end)
        if span.batch >= WARM_UP:  # what is compiled is so with an action of the first ones
            cost[span.layer, span.action] += span.end - span.begin
    begin, end = ended[max(span.stage for span in spans), WARM_UP - 1], ended[0, len(held) - 1]
    done = [0.0] * len(held)
    for span in spans:
        inside = min(span.end, end) - max(span.begin, begin)
        if inside > 0:
            done[span.batch] += inside / (span.end - span.begin) * cost[span.layer, span.action]
    batches = [share / sum(cost.values()) for share in done]
    samples, tokens = (
        sum(share * count for share, count in zip(batches, counts, strict=True)) for counts in zip(*held, strict=True)
    )
    seconds = end - begin
    return seconds / sum(batches), samples / seconds, tokens / seconds


def rise(batch: int) -> float:
    """The factor on the learning rates, from a batch's number."""
    return min(1.0, (batch + 1) / _RISE)
