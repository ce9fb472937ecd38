"""What layers cost on this machine, and the placement that is fastest there: measured with real batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeal.engine.compiling import Compile
from pipeal.engine.device import Precision
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.placement import balance
from pipeal.engine.schedule import Action, Schedule, schedule_named
from pipeal.engine.threads import cores, threads_each
from pipeal.engine.trace import Window
from pipeal.errors import PlacementError
from pipeal.packet import TrainableLayer, layers_of

WARM_UP = 2
"""Batches that come first and are not counted: allocators fill, kernels are chosen."""


@dataclass(frozen=True)
class Placement:
    """Where layers go, and what a trial of it took.

    Attributes:
        devices: One device per stage.
        sizes: The number of layers of each stage.
        threads: Intra-op threads of each CPU worker.
        seconds_per_batch: Measured; None where nothing else was possible.
    """

    devices: list[str]
    sizes: list[int]
    threads: int
    seconds_per_batch: float | None = None

    def __str__(self) -> str:
        stages = " | ".join(f"{device} × {size}" for device, size in zip(self.devices, self.sizes, strict=True))
        return f"{stages} ({self.threads} thread{'s' if self.threads > 1 else ''} each)"


def layer_costs(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Sequence[Any],
    *,
    device: str = "cpu",
    threads: int = 1,
    precision: Precision = "fp32",
    compile: Compile = "none",
) -> list[dict[Action, float]]:
    """The seconds of each layer's forward, backward and update per batch, the layers run one after the other.

    Trains the layers it is given; pass a copy to keep them.

    Args:
        model: The layers.
        batches: Batches as :meth:`Pipeline.run` takes; the first :data:`WARM_UP` are not counted. Layers that are
            compiled train on all of them once before that, to have seen every shape.
        device: Where to measure.
        threads: Intra-op threads on a CPU.
        precision: As for :class:`Pipeline`.
        compile: As for :class:`Pipeline`.

    Raises:
        PlacementError: Too few batches.
    """
    counted = len(batches) - WARM_UP
    if counted < 1:
        raise PlacementError(f"{len(batches)} batches to measure with; expected at least {WARM_UP + 1}")
    layers = layers_of(model)
    before = _before_the_clock(batches, compile)
    window = Window(len(before) + WARM_UP, counted)
    with Pipeline(
        layers, [device], "sequential", threads=threads, precision=precision, compile=compile, trace=window
    ) as pipe:
        pipe.run(before)
        pipe.run(batches)
        spans = pipe.spans()
    totals: dict[tuple[int, Action], float] = defaultdict(float)
    for span in spans:
        totals[span.layer, span.action] += span.end - span.begin
    return [{action: totals[layer, action] / counted for action in Action} for layer in range(len(layers))]


def place(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Sequence[Any],
    schedule: str | Schedule,
    *,
    precision: Precision = "fp32",
    compile: Compile = "none",
    rounds: int = 2,
    on_trial: Callable[[Placement], None] | None = None,
) -> Placement:
    """The fastest placement on this machine's devices, by trying the candidates on a copy of the layers.

    On GPUs the candidates are one stage, and as many stages as there are GPUs (on a single GPU: one stage per
    layer, as streams). On a CPU they are one stage on all cores, and from two stages up to twice as many as there
    are cores, the cores shared out among them. Stages are balanced by the measured costs of the layers.

    Args:
        model: The layers; they are not changed.
        batches: A few real batches, as :meth:`Pipeline.run` takes.
        schedule: The schedule it is for.
        precision: As for :class:`Pipeline`.
        compile: As for :class:`Pipeline`. Each trial compiles anew, before its time is taken.
        rounds: How often each candidate is tried, in turns; its best round counts.
        on_trial: Called with each candidate and its time.
    """
    layers = layers_of(model)
    schedule = schedule_named(schedule)
    gpus = torch.cuda.device_count()
    home = "cuda:0" if gpus else "cpu"
    choices = _candidate_devices(len(layers), gpus)
    if len(choices) == 1:
        return Placement(choices[0], [len(layers)], threads_each(choices[0], schedule))
    costs = layer_costs(deepcopy(layers), batches, device=home, precision=precision, compile=compile)
    totals = [sum(cost.values()) for cost in costs]
    candidates = [
        Placement(devices, balance(totals, len(devices)), threads_each(devices, schedule)) for devices in choices
    ]
    best: dict[int, float] = {}
    for _ in range(rounds):
        for index, candidate in enumerate(candidates):
            seconds = _trial(layers, batches, schedule, candidate, precision, compile)
            best[index] = min(seconds, best.get(index, seconds))
    tried = [
        Placement(candidate.devices, candidate.sizes, candidate.threads, best[index])
        for index, candidate in enumerate(candidates)
    ]
    for placement in tried:
        if on_trial is not None:
            on_trial(placement)
    return min(tried, key=lambda placement: placement.seconds_per_batch or 0.0)


def _candidate_devices(layers: int, gpus: int) -> list[list[str]]:
    """One stage, and the numbers of stages that may help."""
    if gpus > 1:
        counts = sorted({1, min(gpus, layers)})
        return [[f"cuda:{index}" for index in range(count)] for count in counts]
    if gpus == 1:
        return [["cuda:0"] * count for count in sorted({1, layers})]
    return [["cpu"] * count for count in range(1, min(layers, 2 * cores()) + 1)] if cores() > 1 else [["cpu"]]


def _trial(
    layers: list[TrainableLayer],
    batches: Sequence[Any],
    schedule: str | Schedule,
    candidate: Placement,
    precision: Precision,
    compile: Compile,
) -> float:
    """Seconds per batch of a candidate, on a copy."""
    with Pipeline(
        deepcopy(layers),
        candidate.devices,
        schedule,
        sizes=candidate.sizes,
        threads=candidate.threads,
        precision=precision,
        compile=compile,
    ) as pipe:
        pipe.run(_before_the_clock(batches, compile))
        pipe.run(batches[:WARM_UP])
        return pipe.run(batches[WARM_UP:]).seconds / (len(batches) - WARM_UP)


def _before_the_clock(batches: Sequence[Any], compile: Compile) -> Sequence[Any]:
    """What layers train on so that nothing is left to compile."""
    return [] if compile == "none" else batches
