"""How long methods take on so many devices, for pays.py: by pipeal's simulator, and by formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from statistics import fmean

import numpy as np
from pays_curves import Curve

from pipeal.core.errors import PlacementError
from pipeal.core.methods import BASELINE
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import batch_size
from pipeal.engine.runner.parts import cut as cut_to
from pipeal.methods.bp_parts import bp_parts
from pipeal.planning.measure.layers import WARM_UP, measure_in_turns
from pipeal.planning.pure.forecast import Forecast, Model, best_forecast
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.run.build import Experiment
from pipeal.run.opening import engine_options
from pipeal.run.plan_costs import first_pairs

CUTS = (1, 2, 4, 8, 16, 32)
"""Into so many parts, replicas and micro-batches cut a batch."""

ACTIONS = ("forward", "backward", "update")

Layers = tuple[LayerCost, ...]


@dataclass(frozen=True)
class Measured:
    """What the layers of a form cost, by the samples of a batch or of a part.

    Attributes:
        rows: By cut, of the largest part.
        samples: Of that part, in the mean, by cut.
        mean: Of a whole batch.
    """

    rows: Mapping[int, Layers]
    samples: Mapping[int, float]
    mean: float

    def part(self, cut: int) -> Layers:
        """Of one part of so many: seconds on straight lines between those measured, so that no part is free.

        >>> whole, tenth = LayerCost(10.0, 20.0, 1.0, out_bytes=800), LayerCost(3.0, 4.0, 1.0)
        >>> Measured({1: (whole,), 10: (tenth,)}, {1: 100.0, 10: 20.0}, 100.0).part(2)
        (LayerCost(forward_s=5.625, backward_s=10.0, update_s=1.0, out_bytes=400, ..., mean_out_bytes=400),)
        """
        sizes = sorted(self.samples.items(), key=lambda pair: pair[1])

        def line(layer: int, name: str) -> float:
            seconds = [getattr(self.rows[cut][layer], name) for cut, _ in sizes]
            return float(np.interp(self.mean / cut, [size for _, size in sizes], seconds))

        return tuple(
            replace(
                row,
                forward_s=line(number, "forward_s"),
                backward_s=line(number, "backward_s"),
                out_bytes=row.out_bytes // cut,
                mean_out_bytes=row.mean_out_bytes // cut,
            )
            for number, row in enumerate(self.rows[1])
        )


def measured_costs(
    experiment: Experiment, methods: Sequence[str], cuts: Sequence[int] = CUTS, *, rounds: int = 3, alone: bool = True
) -> dict[str, Measured]:
    """What layers cost here, by pipeal's own measurement, in turns: of backpropagation, the blocks of its network.

    Args:
        experiment: With data and configuration.
        methods: Which forms.
        cuts: Into how many parts to cut a batch.
        rounds: How often all are measured; the median counts.
        alone: Whether only the time that the core had for it counts, whatever else the machine does.
    """
    batches, seed = first_pairs(experiment), experiment.config.train.seed
    sizes = [batch_size(x) for x, _ in batches]
    cuts = [number for number in cuts if number <= min(sizes)]
    forms: dict[str, Sequence[TrainableLayer]] = {name: list(experiment.package(name, seed)) for name in methods}
    if BASELINE.name in forms:
        forms[BASELINE.name] = bp_parts(list(experiment.package(BASELINE.name, seed)))
    parts = {
        number: [cut_to(batch, range(ceil(size / number))) for batch, size in zip(batches, sizes, strict=True)]
        for number in cuts
    }
    options = engine_options(experiment.config)
    each = [replace(options, packet="as_is") if name == BASELINE.name else options for name in forms]
    rows = iter(
        measure_in_turns(
            [(layers, parts[number]) for layers in forms.values() for number in cuts],
            [own for own in each for _ in cuts],
            rounds=rounds,
            alone=alone,
        )
    )
    samples = {number: fmean(ceil(size / number) for size in sizes[WARM_UP:]) for number in cuts}
    return {name: Measured({number: next(rows) for number in cuts}, samples, fmean(sizes[WARM_UP:])) for name in forms}


@dataclass(frozen=True, order=True)
class Way:
    """One layout of a method, and what it takes.

    Attributes:
        seconds: Until the target.
        devices: That it uses.
        layout: In a word: ``stages × replicas``, replicas, or workers and local steps.
    """

    seconds: float
    devices: int
    layout: str


def local(measured: Measured, link: Link, most: int, batches: float, *, shares: bool = True) -> Iterator[Way]:
    """A method of local losses, by ``pipelined``: stages times replicas, which average gradients.

    Args:
        measured: What its layers cost.
        link: Between any two devices.
        most: Devices.
        batches: Until the target.
        shares: Whether replicas can share a batch: not where a loss compares its samples.
    """
    for replicas, stages in _grids(most, len(measured.rows[1])):
        if replicas > 1 and not shares:
            return
        found = _simulated("AL pipelined", measured.part(replicas), 0, link, stages, replicas, ceil(batches))
        yield Way(_in_all(found, batches), found.devices, f"{len(found.layout.stages)}×{replicas}")


def pipelined_backprop(measured: Measured, link: Link, most: int, batches: float) -> Iterator[Way]:
    """Backpropagation in micro-batches by GPipe or 1F1B, with replicas as well; on one device plain."""
    for replicas, stages in _grids(most, len(measured.rows[1])):
        for micro in CUTS:
            if replicas * micro > CUTS[-1] or (stages == 1 and (replicas > 1 or micro > 1)):
                continue
            for name in ("BP 1f1b", "BP gpipe"):
                found = _simulated(name, measured.part(replicas * micro), micro, link, stages, replicas, 100)
                if len(found.layout.stages) > 1 or replicas == 1:  # otherwise that of data parallel
                    layout = f"{len(found.layout.stages)}×{replicas}, M {micro}"
                    yield Way(_in_all(found, batches), found.devices, layout)


def data_parallel(measured: Measured, link: Link, most: int, batches: float) -> Iterator[Way]:
    """Backpropagation by replicas, each with its share of a batch."""
    for replicas in _powers(most):
        yield Way(data_parallel_s(measured.part(replicas), link, replicas) * batches, replicas, f"{replicas}")


def data_parallel_s(layers: Layers, link: Link, replicas: int) -> float:
    """One batch: all gradients are averaged at once in a ring, all of it beside the backward.

    No code does better: the last gradient is not there before the backward has ended.

    >>> layers = (LayerCost(1.0, 2.0, 0.5, parameter_bytes=600), LayerCost(1.0, 2.0, 0.5, parameter_bytes=400))
    >>> data_parallel_s(layers, Link(), 4), data_parallel_s(layers, Link(bytes_per_s=100.0, latency_s=1.0), 4)
    (7.0, 24.0)
    """
    forward, backward, update = (sum(getattr(row, f"{name}_s") for row in layers) for name in ACTIONS)
    return forward + max(backward, link.all_reduce_s(weights_bytes(layers), replicas)) + update


def local_sgd(measured: Measured, link: Link, most: int, curves: Sequence[Curve], target: float) -> Iterator[Way]:
    """Backpropagation by workers that average now and then, and work on when they have."""
    step = sum(row.seconds for row in measured.rows[1])
    for curve in curves:
        batches = curve.until(target)
        if curve.workers <= most and batches is not None:
            rounds = ceil(batches / (curve.workers * curve.local_steps))
            averaged = link.all_reduce_s(weights_bytes(measured.rows[1]), curve.workers)
            seconds = ceil(batches / curve.workers) * step + rounds * averaged
            yield Way(seconds, curve.workers, f"{curve.workers}, H {curve.local_steps}")


def weights_bytes(layers: Layers) -> int:
    """Of all layers."""
    return sum(row.parameter_bytes for row in layers)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _grids(most: int, layers: int) -> Iterator[tuple[int, int]]:
    """Replicas and the stages of each.

    >>> list(_grids(4, layers=3))
    [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (4, 1)]
    """
    for replicas in _powers(most):
        for stages in range(1, min(most // replicas, layers) + 1):
            yield replicas, stages


@cache
def _simulated(
    method: str, layers: Layers, micro: int, link: Link, stages: int, replicas: int, batches: int
) -> Forecast:
    """On that many devices or fewer: a slow link may ask for fewer stages."""
    setup = Setup((PlannedDevice(),) * (stages * replicas), link, replicas, batches=max(1, batches), queue_depth=0)
    costs = {"cpu": layers}
    model = Model({}, {micro: costs}, micro) if micro else Model(costs)
    try:
        return best_forecast(method, model, setup)
    except PlacementError as error:
        raise AssertionError(f"memory is not bounded: {error}") from error


def _in_all(found: Forecast, batches: float) -> float:
    """Replicas share each batch; a forecast counts those of all."""
    return found.batch_s * found.replicas * batches
