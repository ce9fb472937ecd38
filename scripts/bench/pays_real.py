"""Cells of pays.py for real: trainings on one device, and two processes in two networks with a long link between them.

The two processes share this machine, so what their layers cost is measured in two processes at once, by the wall's
clock, and their forecast is made of that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from long_line import DEVICE, Line, LinkKind, Say, long_line, started
from pays_curves import Curve, configured, opened, passing
from pays_times import ACTIONS, data_parallel_s, measured_costs

from pipeal.core.methods import BASELINE, DEFAULT
from pipeal.data import WHOLE, Share
from pipeal.engine.distributed import DistributedPipeline, Launch, open_world, serve
from pipeal.engine.schedule import SCHEDULES
from pipeal.planning.pure.forecast import forecast
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.layout import best_layout
from pipeal.run.build import Experiment
from pipeal.run.opening import course_of, new_layers, open_pipeline
from pipeal.training.learning_rate import epoch_scale

Found = dict[str, Any]
"""A cell: batches, forecast and measured seconds, and the machine's load."""

WARM_UP = 10
"""Batches before those that count."""


def link_of(kind: LinkKind) -> Link:
    """The same, to a forecast."""
    return Link(1 / kind.payload_s(1) if kind.bits_per_s else float("inf"), kind.delay_s)


def on_one_device(experiment: Experiment, curve: Curve, batches: int, batch_s: float) -> Found:
    """Trains for so many batches in this process."""
    config = configured(experiment, curve.method, curve.rate)
    own, seed = experiment.under(config), config.train.seed
    with closing(own.train_batches(seed)) as feed:
        scale = epoch_scale(course_of(config), 0, len(feed), 0)
        given = islice(passing(feed, config.train.epochs), batches)
        with open_pipeline(new_layers(own, config, 1), config, seed) as pipe:
            seconds = pipe.run(given, scale).seconds
    return _cell(f"{curve.method}, one device", batches, batch_s * batches, seconds)


def far_apart(order: Found, kind: LinkKind) -> list[Found]:
    """AL in two stages, and data parallel backpropagation of two replicas, over a link.

    Args:
        order: ``experiment``, the arguments of :func:`opened`; ``rate``, ``batches`` and ``rounds``.
        kind: Of the link.
    """
    both = [started(_measure, order) for _ in range(2)]
    rows = [one.hear() for one in both]
    for one in both:
        one.end()
    al, bp = (tuple(map(_mean_of, zip(*(row[name] for row in rows), strict=True))) for name in ("al", "bp"))
    link, batches = link_of(kind), order["batches"]
    costs, near = {"cpu": al}, Setup((PlannedDevice(),) * 2, queue_depth=0)
    layout = best_layout(costs, near)
    far = Setup(near.devices, link, batches=batches, queue_depth=0)
    forecast_s = batches * forecast("AL", SCHEDULES["pipelined"], costs, far, layout).batch_s
    with long_line(2, kind) as line:
        al_s = _together(
            line, {**order, "method": DEFAULT.name, "sizes": layout.sizes, "schedule": "pipelined", "replicas": 1}
        )
        bp_s = _together(
            line, {**order, "method": BASELINE.name, "sizes": None, "schedule": "sequential", "replicas": 2}
        )
    return [
        _cell(f"al, 2 stages, {kind}", batches, forecast_s, al_s),
        _cell(f"bp, 2 replicas, {kind}", batches, batches * data_parallel_s(bp, link, 2), bp_s),
    ]


def _cell(what: str, batches: int, forecast_s: float, measured_s: float) -> Found:
    return {
        "cell": what,
        "batches": batches,
        "forecast_s": forecast_s,
        "measured_s": measured_s,
        "load": os.getloadavg()[0],
    }


def _measure(say: Say, order: Found) -> None:
    """What layers cost in this process: of AL on whole batches, of BP on halves."""
    torch.set_num_threads(1)
    experiment = opened(*order["experiment"])
    found = measured_costs(experiment, [DEFAULT.name, BASELINE.name], (1, 2), rounds=order["rounds"], alone=False)
    say({"al": found[DEFAULT.name].rows[1], "bp": found[BASELINE.name].part(2)})


def _mean_of(rows: Sequence[LayerCost]) -> LayerCost:
    forward, backward, update = (fmean(getattr(row, f"{name}_s") for row in rows) for name in ACTIONS)
    return replace(rows[0], forward_s=forward, backward_s=backward, update_s=update)


def _together(line: Line, order: Found) -> float:
    """The seconds that two processes take for the batches that count."""
    both = [line.start(rank, _be_rank, order, Launch(rank, 2, 0, 1, line.address(0), 29519)) for rank in range(2)]
    seconds = both[0].hear()
    if any(codes := [one.end() for one in both]):
        raise RuntimeError(f"the two processes ended with {codes}")
    return float(seconds)


def _be_rank(say: Say, order: Found, launch: Launch) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    torch.set_num_threads(1)
    experiment = opened(*order["experiment"])
    config = configured(experiment, order["method"], order["rate"])
    own, seed, replicas = experiment.under(config), config.train.seed, order["replicas"]
    layers = list(new_layers(own, config, 1))
    options: Found = {"seed": seed, "threads": 1, "sizes": order["sizes"], "schedule": order["schedule"]}
    with open_world(launch, {"pays": order["method"]}, replicas=replicas, timeout_s=300.0) as world:
        share = Share(world.rank, replicas) if replicas > 1 else WHOLE

        def feed(*_: int) -> Iterator[Any]:
            return passing(own.batches(seed, share), config.train.epochs)

        if world.rank:
            serve(layers, world, feed=feed if replicas > 1 else None, **options)
            return
        distributed = DistributedPipeline(layers, world, **options)
        with distributed as pipe:
            if replicas > 1:
                distributed.begin_feed(0)
            batches = feed()
            pipe.run(islice(batches, WARM_UP))
            begin = perf_counter()
            pipe.run(islice(batches, order["batches"]))
            say(perf_counter() - begin)
