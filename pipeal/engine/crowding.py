"""How much stages that share a machine's cores slow each other: memory, caches, clock, and Python's lock.

It is measured without any pipeline: so many threads each train some neighbouring layers on inputs recorded before, one
batch after the other, and none ever waits for another. What they then take longer than each of them alone is what a
stage takes longer among so many.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

from torch import nn

from pipeal.engine.device import Precision
from pipeal.engine.measure import WARM_UP
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.placement import balance
from pipeal.engine.simulate import Crowding
from pipeal.errors import PlacementError, StallError
from pipeal.packet import TrainableLayer, Tree, layers_of, module_of

PATIENCE_S = 600.0
"""How long one crowd may take."""

_Part = tuple[list[TrainableLayer], list[Any]]
"""Layers, and the batches that come to them."""


def measure_crowding(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Sequence[Any],
    at_once: Sequence[int],
    *,
    precision: Precision = "fp32",
    rounds: int = 3,
) -> dict[int, float]:
    """How many times as long training takes while so many train at once on this machine's cores.

    Args:
        model: The layers; copies of them are trained, with one intra-op thread each.
        batches: As for :func:`pipeal.engine.measure.measure`.
        at_once: The numbers to measure, none larger than that of the layers.
        precision: As for :class:`Pipeline`.
        rounds: How often, in turns with each alone.

    Raises:
        PlacementError: More at once than there are layers.
        Exception: Whatever one of them raised.
    """
    layers = deepcopy(layers_of(model))
    if max([1, *at_once]) > len(layers):
        raise PlacementError(f"{max(at_once)} stages at once of {len(layers)} layers; expected at most one per layer")
    heard = _recorded(layers, batches, precision)
    times: dict[int, list[float]] = {number: [] for number in at_once}
    for _ in range(max(1, rounds)):
        for number in at_once:
            parts: list[_Part] = []
            for size in balance([1.0] * len(layers), number):
                first = sum(len(part) for part, _ in parts)
                parts.append((layers[first : first + size], heard[first]))
            alone = sum(_seconds([part], precision)[0] for part in parts)
            times[number].append(sum(_seconds(parts, precision)) / alone)
    return {number: median(found) for number, found in times.items()}


def crowding_of(measured: Mapping[int, float]) -> Crowding:
    """The factor for any number, between and beyond the measured ones.

    >>> crowd = crowding_of({2: 1.1, 4: 2.4})
    >>> crowd(1), crowd(2), round(crowd(3), 2), crowd(8)
    (1.0, 1.1, 1.75, 4.8)
    """
    points = sorted({1: 1.0, **measured}.items())
    numbers = [number for number, _ in points]

    def crowding(at_once: int) -> float:
        place = bisect_left(numbers, at_once)
        if place == len(numbers):
            number, times = points[-1]
            return times * at_once / number  # no more gets done at once
        (left, low), (right, high) = points[max(0, place - 1)], points[place]
        if right == at_once or left == right:
            return high
        return low + (high - low) * (at_once - left) / (right - left)

    return crowding


def _recorded(layers: Sequence[TrainableLayer], batches: Sequence[Any], precision: Precision) -> list[list[Any]]:
    """For each layer, what comes to it."""
    heard: list[list[Any]] = [[] for _ in layers]
    with ExitStack() as hooks:
        for number, layer in enumerate(layers):

            def listen(module: nn.Module, inputs: Tree, number: int = number) -> None:  # noqa: ARG001
                heard[number].append(inputs)

            hooks.callback(module_of(layer).register_forward_pre_hook(listen).remove)
        with Pipeline(layers, ["cpu"], "sequential", threads=1, precision=precision) as pipe:
            pipe.run(batches)
    return heard


def _seconds(parts: Sequence[_Part], precision: Precision) -> list[float]:
    """What each takes for its batches after warming up, while all of them are at work."""
    seconds = [0.0] * len(parts)
    failures: list[BaseException] = []
    start = threading.Barrier(len(parts))
    to_come = threading.Semaphore(0)
    over = threading.Event()

    def train(number: int, layers: list[TrainableLayer], batches: list[Any]) -> None:
        try:
            with Pipeline(layers, ["cpu"], "sequential", threads=1, precision=precision) as pipe:
                pipe.run(batches[:WARM_UP])
                start.wait(PATIENCE_S)
                begin = perf_counter()
                for count, (x, y) in enumerate(cycle(batches[WARM_UP:]), 1):
                    pipe.submit(x, y)
                    if count == len(batches) - WARM_UP:
                        seconds[number] = perf_counter() - begin
                        to_come.release()
                    if over.is_set():  # until then the others are to have it as crowded as before
                        return
        except BaseException as error:  # noqa: BLE001  raised by whoever waits
            failures.append(error)
            start.abort()
            to_come.release()

    workers = [
        threading.Thread(target=train, args=(number, *part), name=f"pipeal-crowd-{number}", daemon=True)
        for number, part in enumerate(parts)
    ]
    for worker in workers:
        worker.start()
    for _ in workers:
        if not to_come.acquire(timeout=PATIENCE_S):
            failures.append(StallError(f"{len(parts)} stages at once did not end within {PATIENCE_S:g} s"))
    over.set()
    for worker in workers:
        worker.join(PATIENCE_S)
    if failures:
        raise next((error for error in failures if not isinstance(error, threading.BrokenBarrierError)), failures[0])
    return seconds
