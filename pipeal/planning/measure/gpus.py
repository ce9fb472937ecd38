"""The best layout on several GPUs: their kinds, their memory and their links, measured."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from pipeal.core.options import DEFAULTS, EngineOptions
from pipeal.core.protocols import TrainableLayer
from pipeal.engine.schedule import Schedule
from pipeal.planning.measure.layers import measure
from pipeal.planning.pure.forecast import forecast
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layout import Layout

_STEP = 2**28
"""Free memory is counted in so many bytes, so that GPUs of one kind are alike."""

_USABLE = 0.9
"""The share of the free memory that a plan may fill: what a backward needs for a moment comes on top."""


def layout_on_gpus(
    layers: Sequence[TrainableLayer],
    batches: Sequence[Any],
    gpus: Sequence[str],
    schedule: Schedule,
    options: EngineOptions = DEFAULTS,
) -> Layout:
    """The layout for some GPUs that a plan would choose: of its candidates the one that is fastest in the simulation.

    A stage's devices are their places among the GPUs.

    Args:
        layers: Copies of them are trained, on one GPU of each kind.
        batches: As for :func:`pipeal.planning.measure.layers.measure`.
        gpus: Their names, at least 2.
        schedule: What it is for.
        options: How the layers will be run.

    Raises:
        OutOfMemoryError: All layers together do not fit into one of them, to be measured.
        PlacementError: No layout fits.
    """
    kinds = [torch.cuda.get_device_name(gpu) for gpu in gpus]
    costs = {
        kind: measure(layers, batches, options, device=gpus[kinds.index(kind)], rounds=1)
        for kind in dict.fromkeys(kinds)
    }
    torch.cuda.empty_cache()  # what the copies took is free again
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in gpus]
    devices = [
        PlannedDevice(kind, memory_bytes=int(_USABLE * size) // _STEP * _STEP)
        for kind, size in zip(kinds, free, strict=True)
    ]
    setup = Setup(tuple(devices), measure_link(gpus[0], gpus[1]), queue_depth=options.queue_depth)
    return forecast(schedule.name, schedule, costs, setup).layout


def measure_link(source: str, target: str, size: int = 2**26, repeats: int = 5) -> Link:
    """What copies from one GPU to another take: a large one, and a tiny one."""
    large, tiny = (min(_copy_s(source, target, count) for _ in range(repeats)) for count in (size, 4))
    return Link(size / max(large - tiny, 1e-9), tiny)


def _copy_s(source: str, target: str, size: int) -> float:
    here, there = (torch.empty(size, dtype=torch.uint8, device=gpu) for gpu in (source, target))
    for gpu in (source, target):
        torch.cuda.synchronize(gpu)
    begin = perf_counter()
    there.copy_(here)
    for gpu in (source, target):
        torch.cuda.synchronize(gpu)
    return perf_counter() - begin
