"""How much stages that share a machine's cores slow each other: memory, caches, clock, and Python's lock.

It is measured without any pipeline: so many workers each train some neighbouring layers on inputs recorded before, one
batch after the other, and none ever waits for another. What they then take longer than each of them alone is what a
stage takes longer among so many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from torch import nn

from pipeal.core.background import in_background
from pipeal.core.errors import PlacementError, StallError
from pipeal.core.modules import layers_of, module_of
from pipeal.core.options import DEFAULTS, EngineOptions
from pipeal.core.partition import balance
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree
from pipeal.engine.devices.cpus import cores
from pipeal.engine.devices.threads import intra_op_threads
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.sizes import check_sizes, layers_of_stages
from pipeal.planning.measure.layers import WARM_UP, counted_of
from pipeal.planning.pure.hardware import Contention

PATIENCE_S = 600.0
"""How long one crowd may take."""

_ALL_UP_TO = 4
"""Up to so many at once, each number is measured; of larger ones, every power of two."""

Part = tuple[list[TrainableLayer], list[Any]]
"""Layers, and the batches that come to them."""


class Roll(Protocol):
    """Counts those who have come to some point, across threads or processes."""

    def come(self) -> None:
        """One more is there."""
        ...

    def is_complete(self) -> bool:
        """Whether all are; does not wait."""
        ...


def measure_contention(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Sequence[Any],
    at_once: Sequence[int],
    *,
    sizes: Sequence[int] | None = None,
    options: EngineOptions = DEFAULTS,
    rounds: int = 3,
) -> dict[int, float]:
    """How many times as long training takes while so many train at once on this machine's cores.

    Args:
        model: The layers; copies of them are trained, with one intra-op thread each.
        batches: As for :func:`pipeal.planning.measure.layers.measure`.
        at_once: The numbers to measure, none larger than that of the parts; :func:`crowds` knows which tell enough.
        sizes: The number of layers of each part, from the first layer on; None for parts that are as many as the
            largest crowd and as even as can be. A smaller crowd is some of them, in each round others.
        options: How they will be run, on one core each. A loss that is not finite ends no measurement.
        rounds: How often, in turns with each alone.

    Raises:
        PlacementError: More at once than there are parts or layers, sizes that do not fit, or too few batches.
        Exception: Whatever one of them raised.
    """
    layers = deepcopy(layers_of(model))
    counted_of(batches)
    most = max([1, *at_once])
    sizes = balance([1.0] * len(layers), most) if sizes is None else check_sizes(sizes, len(layers), len(sizes))
    if most > len(sizes):
        raise PlacementError(f"{most} stages at once of {len(sizes)} parts; expected at most one for each of them")
    with intra_op_threads(1):  # given back to the process, too, in which each of the threads to come sets its own
        parts = parts_of(layers, recorded(layers, batches, options), sizes)
        turns = [
            crowding_in_turn(
                turn, len(parts), at_once, lambda chosen: _seconds([parts[place] for place in chosen], options)
            )
            for turn in range(max(1, rounds))
        ]
    return {number: median(found[number] for found in turns) for number in at_once}


def crowding_in_turn(
    turn: int, parts: int, at_once: Iterable[int], train: Callable[[Sequence[int]], Sequence[float]]
) -> dict[int, float]:
    """How many times as long parts take while so many train at once, against each of them alone before.

    Args:
        turn: In each turn a crowd is other parts.
        parts: How many there are.
        at_once: The numbers to measure.
        train: Trains the chosen parts at once; what each of them took.

    >>> crowding_in_turn(1, 3, [2], lambda chosen: [1.0 + place * len(chosen) for place in chosen])
    {2: 1.5}
    """
    alone = [train([place])[0] for place in range(parts)]
    found = {}
    for number in at_once:
        chosen = [(turn * number + other) % parts for other in range(number)]
        found[number] = sum(train(chosen)) / sum(alone[place] for place in chosen)
    return found


def crowds(layers: int) -> list[int]:
    """The numbers of stages at once that tell enough of this machine: around the cores, and up to twice as many."""
    most = min(layers, 2 * cores())
    powers = [1 << place for place in range(most.bit_length())]
    return sorted(number for number in {*range(2, _ALL_UP_TO + 1), *powers, cores(), most} if 2 <= number <= most)


def contention_of(measured: Mapping[int, float]) -> Contention:
    """The factor for any number, between and beyond the measured ones.

    >>> crowd = contention_of({2: 1.1, 4: 2.4})
    >>> crowd(1), crowd(2), round(crowd(3), 2), crowd(8)
    (1.0, 1.1, 1.75, 4.8)
    """
    numbers, times = zip(*sorted({1: 1.0, **measured}.items()), strict=True)

    def crowding(at_once: int) -> float:
        beyond = max(1.0, at_once / numbers[-1])  # no more gets done at once
        return beyond * float(np.interp(at_once, numbers, times))

    return crowding


def recorded(
    layers: Sequence[TrainableLayer], batches: Sequence[Any], options: EngineOptions = DEFAULTS
) -> list[list[Any]]:
    """For each layer, what comes to it while all of them train on some batches."""
    heard: list[list[Any]] = [[] for _ in layers]
    with ExitStack() as hooks:
        for number, layer in enumerate(layers):

            def listen(module: nn.Module, inputs: Tree, number: int = number) -> None:  # noqa: ARG001
                heard[number].append(inputs)

            hooks.callback(module_of(layer).register_forward_pre_hook(listen).remove)
        with _alone(layers, options) as pipe:
            pipe.run(batches)
    return heard


def parts_of(layers: Sequence[TrainableLayer], heard: Sequence[list[Any]], sizes: Sequence[int]) -> list[Part]:
    """Neighbouring layers, so many in each part, with what was :func:`recorded` to come to the first of them."""
    return [(list(layers[own.start : own.stop]), heard[own.start]) for own in layers_of_stages(sizes)]


def seconds_among(part: Part, here: Roll, done: Roll, options: EngineOptions = DEFAULTS) -> float:
    """What a part takes for its batches after warming up, once all are here, and until all have done the same.

    It goes on until then: the others are to have it as crowded as it was.

    Raises:
        PlacementError: Too few batches.
        StallError: Not all came, or had done, in time.
    """
    layers, batches = part
    until = perf_counter() + PATIENCE_S
    counted = counted_of(batches)
    begin = seconds = 0.0
    trained = 0
    with _alone(layers, options) as pipe:
        pipe.run(batches[:WARM_UP])
        here.come()
        for x, y in cycle(batches[WARM_UP:]):
            now = perf_counter()
            if not begin:
                if here.is_complete():
                    begin = now
            elif not seconds and trained == counted:
                seconds = now - begin
                done.come()
            if seconds and done.is_complete():
                return seconds
            if now > until:
                raise StallError(f"stages at once: not all {'had done' if begin else 'came'} within {PATIENCE_S:g} s")
            pipe.submit(x, y)
            if begin:
                trained += 1
    raise AssertionError("batches come again and again")


def _alone(layers: Sequence[TrainableLayer], options: EngineOptions) -> Pipeline:
    """On one core. A loss that is not finite ends no measurement."""
    return Pipeline(layers, ["cpu"], "sequential", options=replace(options, threads=1, on_non_finite="ignore"))


class _Threads:
    """A roll of threads; one that fails excuses all others."""

    def __init__(self, number: int) -> None:
        self._missing = number
        self._lock = threading.Lock()

    def come(self) -> None:
        with self._lock:
            self._missing -= 1

    def excuse(self) -> None:
        with self._lock:
            self._missing = 0

    def is_complete(self) -> bool:
        return self._missing <= 0


def _seconds(parts: Sequence[Part], options: EngineOptions) -> list[float]:
    """What each takes while all of them are at work.

    Raises:
        StallError: One of them did not come back; it is left behind, as a daemon.
    """
    here, done = _Threads(len(parts)), _Threads(len(parts))

    def train(part: Part) -> float:
        try:
            return seconds_among(part, here, done, options)
        except BaseException:
            here.excuse()  # the others need not wait for it
            done.excuse()
            raise

    found = [in_background(partial(train, part), "pipeal-crowd") for part in parts]
    ended, left = wait(found, 2 * PATIENCE_S)
    for seconds in ended:
        seconds.result()  # raises what one of them raised
    if left:
        raise StallError(f"{len(parts)} stages at once did not end within {2 * PATIENCE_S:g} s")
    return [seconds.result() for seconds in found]
