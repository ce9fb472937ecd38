"""Forecasts held against what they are forecasts of: runs on this machine's cores, and the published scaling table.

    python scripts/bench/forecast.py [--quick] [--json FILE]

Table 1 trains for real, one intra-op thread per stage, stages in threads that share the cores. What the forecast is
made from is measured in the same turns, but without any pipeline: the cost of each layer alone, and how much longer
layers take while others are at work on the same cores. Nothing is fitted to the runs.

Table 2 has the published figures of the AL pipeline beside forecasts that know only its one-GPU column, and says how
much of a step must have been done by one thread at a time to explain the difference.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pipeal.al import ALPackage
from pipeal.engine import SCHEDULES, Pipeline, balance
from pipeal.engine.allocator import keep_freed_memory
from pipeal.engine.crowding import crowding_of, measure_crowding
from pipeal.engine.forecast import Setup, forecast
from pipeal.engine.hardware import PlannedDevice
from pipeal.engine.layercost import LayerCost
from pipeal.engine.layout import Layout, PlannedStage
from pipeal.engine.measure import WARM_UP, measure
from pipeal.models import TextDims, VisionDims, build_text, build_vision
from pipeal.train.environment import environment
from pipeal.train.tables import print_table

STAGES = (2, 4)
PIPELINED = SCHEDULES["pipelined"]

Build = Callable[[int], tuple[ALPackage, list[Any]]]
"""From a number of batches to a new package and that many batches."""


def transformer(batches: int) -> tuple[ALPackage, list[Any]]:
    """The published transformer with random words: 64 texts of 24 to 32 words each batch."""
    torch.manual_seed(0)
    words = 30_000
    package = build_text("transformer", "al", vocab_size=words, classes=4, dims=TextDims())
    lengths = islice(cycle(range(24, 33, 2)), batches)
    return package, [(torch.randint(2, words, (64, length)), torch.randint(4, (64,))) for length in lengths]


def resnet(batches: int) -> tuple[ALPackage, list[Any]]:
    """ResNet-18 at half the published width with random images: 32 of 32 pixels each batch."""
    torch.manual_seed(0)
    package = build_vision("resnet", "al", classes=10, dims=VisionDims(width=0.5))
    return package, [(torch.randn(32, 3, 32, 32), torch.randint(10, (32,))) for _ in range(batches)]


MODELS: dict[str, Build] = {"transformer": transformer, "resnet": resnet}


@dataclass(frozen=True)
class Held:
    """One model on some stages: milliseconds per batch of each turn, and what was measured of so many at once."""

    model: str
    executor: str
    stages: int
    sizes: str
    crowding: list[float]
    predicted_ms: list[float]
    measured_ms: list[float]

    @property
    def errors(self) -> list[float]:
        """Of each turn, whose parts were measured one after the other: a slow minute of the machine hits them all."""
        return [one / other - 1 for one, other in zip(self.predicted_ms, self.measured_ms, strict=True)]


def hold(model: str, build: Build, batches: int, turns: int) -> list[Held]:
    """Measures what the forecast needs and what it foresees, in turns."""
    package, given = build(batches + WARM_UP)
    held: list[Held] = []
    for turn in range(turns + 1):
        costs = measure(package, given, rounds=1)
        if not held:  # the first turn warms up
            shapes = {stages: balance([cost.seconds for cost in costs], stages) for stages in STAGES}
            held = [
                Held(model, "threads", stages, " + ".join(map(str, sizes)), [], [], [])
                for stages, sizes in shapes.items()
            ]
        for row in held:
            seconds = run(package, given, shapes[row.stages])
            crowding = measure_crowding(package, given, [row.stages], rounds=1)
            if turn:
                row.crowding.append(crowding[row.stages])
                row.measured_ms.append(1e3 * seconds / batches)
                row.predicted_ms.append(1e3 * predict(costs, shapes[row.stages], crowding, batches))
    return held


def run(package: ALPackage, batches: Sequence[Any], sizes: Sequence[int]) -> float:
    """Seconds of a real run, warmed up, from the first batch to the last update."""
    with Pipeline(package, ["cpu"] * len(sizes), sizes=sizes, threads=1) as pipe:
        pipe.run(batches[:WARM_UP])
        return pipe.run(batches[WARM_UP:]).seconds


def predict(costs: Sequence[LayerCost], sizes: Sequence[int], crowding: dict[int, float], batches: int) -> float:
    """Seconds per batch of such a run."""
    cpu = PlannedDevice("cpu")
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    stages = [
        PlannedStage(range(start, start + size), (number,), cpu, 0.0, 0.0, 0)
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    setup = Setup((cpu,) * len(sizes), batches=batches, crowding=crowding_of(crowding))
    layout = Layout(tuple(stages), any_order=True)
    return forecast("AL pipelined", PIPELINED, {"cpu": costs}, setup, layout).batch_s


PUBLISHED = {
    "12 layers": {1: 1.19, 2: 1.33, 3: 1.64, 4: 1.75, 6: 1.55},
    "n layers": {1: 1.16, 2: 1.68, 3: 2.05, 4: 2.09, 5: 1.94, 6: 1.83},
}
"""Speed-up over BP on the same GPUs, AG News, transformer, by the number of GPUs."""


@dataclass(frozen=True)
class Scaling:
    """One row of the published table, and the forecasts for it, as speed-ups over BP."""

    model: str
    gpus: int
    published: float
    al_fm: float
    pipelined: float

    @property
    def serial_share(self) -> float:
        """The share of a step that must have run alone: ``al-fm`` with that much of it serial is as published."""
        one = PUBLISHED[self.model][1]
        ideal, found = self.al_fm / one, self.published / one
        return 0.0 if self.gpus == 1 else max(0.0, (1 / found - 1 / ideal) / (1 - 1 / ideal))


def scaling(batches: int = 1000) -> list[Scaling]:
    """Equal layers, a backward of two forwards, transfers that cost nothing; BP as slow as the one-GPU column says.

    BP on several GPUs is model parallel without a pipeline there, so it takes the same time on any number of them.
    """
    rows = []
    for model, published in PUBLISHED.items():
        for gpus, speedup in published.items():
            layers = 12 if model == "12 layers" else gpus
            costs = {"gpu": [LayerCost(1.0, 2.0)] * layers}
            bp_s = published[1] * 3 * layers
            setup = Setup((PlannedDevice("gpu"),) * gpus, batches=batches)
            found = [forecast(name, SCHEDULES[name], costs, setup).batch_s for name in ("al-fm", "pipelined")]
            rows.append(Scaling(model, gpus, speedup, *(bp_s / batch_s for batch_s in found)))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer batches and turns: two minutes")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="rows of table 1")
    parser.add_argument("--batches", type=int, help="of a run of table 1; default: 24, or 10 with --quick")
    parser.add_argument("--turns", type=int, help="of table 1; default: 7, or 3 with --quick")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    batches = options.batches or (10 if options.quick else 24)
    turns = options.turns or (3 if options.quick else 7)
    facts = environment()
    print("  ".join(f"{key}: {value}" for key, value in facts.items()), f"  load average: {os.getloadavg()[0]:.1f}\n")

    keep_freed_memory()
    torch.set_num_threads(1)
    held = [row for model in options.models for row in hold(model, MODELS[model], batches, turns)]
    print_table(
        f"1. Predicted and measured, {batches} batches, medians of {turns} turns; ms per batch",
        ["model", "executor", "stages", "layers of each", "crowding", "predicted", "measured", "error", "of all turns"],
        [
            [
                *(row.model, row.executor, row.stages, row.sizes, median(row.crowding)),
                *(median(row.predicted_ms), median(row.measured_ms), f"{median(row.errors):+.1%}"),
                f"{min(row.errors):+.1%} to {max(row.errors):+.1%}",
            ]
            for row in held
        ],
    )
    print()
    rows = scaling()
    print_table(
        "2. The published scaling, as speed-up over BP on as many GPUs",
        ["layers", "GPUs", "published", "al-fm, forecast", "serial share", "pipelined, forecast"],
        [[row.model, row.gpus, row.published, row.al_fm, f"{row.serial_share:.0%}", row.pipelined] for row in rows],
    )
    print(
        "al-fm joins all threads after every batch, which caps it; what is still missing is work that one thread at a "
        "time does:\nPython's lock, held while each layer's thread is made and its kernels are launched (a thread per "
        "layer and batch: with more\nlayers there are more of them). pipelined joins nothing and keeps its threads."
    )
    if options.json is not None:
        figures = {
            "machine": facts,
            "held": [{**asdict(row), "errors": row.errors} for row in held],
            "scaling": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
