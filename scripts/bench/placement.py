"""What placement takes, and what it brings: the best layout found, and lopsided packages placed by it, in turns.

    python scripts/bench/placement.py [--quick] [--json scripts/bench/results/placement.json]

Table 1 is the time of the search. Table 2 trains packages whose layers cost very different times: stages of as many
layers each against stages that the measured costs balance, in turns in one process. Virtual layers only take time, so
that any number of them overlap. Real ones share the cores, and there balance pays less than its sum says: it is the
balanced stages that keep both cores busy, and two busy cores are each slower than one alone. How much slower is
measured without a pipeline (crowding), and the forecast that knows it stands beside what the runs took.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from held import predict
from torch import nn
from virtual import VirtualLayer

from pipeal import AE, AL, ENC, ALPackage, LabelAE, Pipeline
from pipeal.core.modules import layers_of
from pipeal.core.protocols import TrainableLayer
from pipeal.engine import balance
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.planning.measure.contention import measure_contention
from pipeal.planning.measure.layers import measure
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.layout import best_layout
from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table

LAYERS, DEVICES = 200, 64


@dataclass(frozen=True)
class Search:
    """The time of one search: of this process alone, and on the wall."""

    what: str
    cpu_ms: float
    wall_ms: float
    stages: int


@dataclass(frozen=True)
class Lopsided:
    """One package on some stages: medians in ms per batch.

    Attributes:
        by_costs: The gain that the slowest stages' sums of costs alone would give.
        crowding: How many times as long all stages take at once; None for layers that do not share cores.
        forecast: The gain of the forecast, which knows both.
    """

    package: str
    stages: int
    equal_sizes: str
    equal_ms: float
    balanced_sizes: str
    balanced_ms: float
    by_costs: float
    crowding: float | None
    forecast: float

    @property
    def gain(self) -> float:
        return self.equal_ms / self.balanced_ms


def searches(repeats: int) -> list[Search]:
    """200 layers on 64 devices of one kind or several, with limits, links and shared stages; medians."""
    draw = Random(0)

    def layer() -> LayerCost:
        seconds = draw.random(), 2 * draw.random(), 0.2 * draw.random()
        sizes = draw.randrange(10**6), draw.randrange(10**6), draw.randrange(10**6)
        return LayerCost(*seconds, *sizes, activation_bytes=10**7)

    one, other = ([layer() for _ in range(LAYERS)] for _ in range(2))
    costs = {"a": one, "b": other}
    same, small = [PlannedDevice("a")] * DEVICES, [PlannedDevice("a", memory_bytes=80_000_000)] * DEVICES
    two = [PlannedDevice("a"), PlannedDevice("b")] * (DEVICES // 2)
    all_different = [PlannedDevice("a", 1 + number / DEVICES) for number in range(DEVICES)]
    cases: dict[str, tuple[list[PlannedDevice], int]] = {
        "one kind": (same, 1),
        "one kind, memory limits": (small, 1),
        "two kinds, in any order": (two, 1),
        "64 speeds, in the order given": (all_different, 1),
        "one kind, stages on up to 8": (same, 8),
        "two kinds, stages on up to 4": (two, 4),
    }
    found = []
    for what, (devices, most) in cases.items():
        cpu, wall, stages = [], [], 0
        for _ in range(repeats):
            begin, began = process_time(), perf_counter()
            setup = Setup(tuple(devices), Link(1e6, 1e-3), stage_replicas=most)
            stages = len(best_layout(costs, setup).stages)
            cpu.append(process_time() - begin)
            wall.append(perf_counter() - began)
        found.append(Search(what, 1e3 * median(cpu), 1e3 * median(wall), stages))
    return found


def virtual() -> tuple[Sequence[TrainableLayer], list[Any]]:
    """Ten layers, the first as slow as the other nine."""
    layers: list[TrainableLayer] = [VirtualLayer(0.015, 0.030), *(VirtualLayer(0.002, 0.003) for _ in range(9))]
    return layers, [(None, None)] * 20


def perceptrons() -> tuple[Sequence[TrainableLayer], list[Any]]:
    """Eight layers, the last four twelve times as deep as the first four; random batches of 16 classes."""
    torch.manual_seed(0)
    width, code, classes = 256, 32, 16
    sides: list[AE] = [LabelAE(nn.Linear(classes, code), nn.Linear(code, classes), classes)]
    sides += [AE(nn.Linear(code, code), nn.Linear(code, code)) for _ in range(7)]

    def block(depth: int) -> nn.Module:
        parts = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
        return nn.Sequential(*parts)

    depths = [1] * 4 + [12] * 4
    package = ALPackage(
        [AL(ENC(block(depth), nn.Linear(width, code)), side) for depth, side in zip(depths, sides, strict=True)]
    )
    batches = [(torch.randn(512, width), torch.randint(classes, (512,))) for _ in range(16)]
    return layers_of(package), batches


PACKAGES: dict[str, tuple[Callable[[], tuple[Sequence[TrainableLayer], list[Any]]], int]] = {
    "virtual": (virtual, 2),
    "perceptrons": (perceptrons, 2),
}


def compare(name: str, turns: int) -> Lopsided:
    """Equal counts and balanced ones, in turns."""
    build, stages = PACKAGES[name]
    layers, batches = build()
    costs = measure(layers, batches[:8], rounds=3)
    sizes = {
        "equal": balance([1.0] * len(layers), stages),
        "balanced": balance([cost.seconds for cost in costs], stages),
    }
    crowding: dict[int, float] = {}
    if not isinstance(layers[0], VirtualLayer):
        crowding = measure_contention(layers, batches[:8], [stages], sizes=sizes["balanced"])
    took: dict[str, list[float]] = {kind: [] for kind in sizes}
    for turn in range(turns + 1):
        for kind, own in sizes.items():
            with Pipeline(layers, ["cpu"] * stages, sizes=own, threads=1) as pipe:
                seconds = pipe.run(batches).seconds
            if turn:
                took[kind].append(1e3 * seconds / len(batches))
    shown = {kind: " + ".join(map(str, own)) for kind, own in sizes.items()}
    slowest = {kind: max(_sums(costs, own)) for kind, own in sizes.items()}
    foreseen = {kind: predict(costs, own, crowding or None, len(batches)) for kind, own in sizes.items()}
    return Lopsided(
        *(name, stages, shown["equal"], median(took["equal"]), shown["balanced"], median(took["balanced"])),
        by_costs=slowest["equal"] / slowest["balanced"],
        crowding=crowding.get(stages),
        forecast=foreseen["equal"] / foreseen["balanced"],
    )


def _sums(costs: Sequence[LayerCost], sizes: Sequence[int]) -> list[float]:
    """Seconds per batch of each stage."""
    left = iter(costs)
    return [sum(cost.seconds for cost in islice(left, size)) for size in sizes]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    turns = 3 if options.quick else 9
    facts = environment()
    print("  ".join(f"{key}: {value}" for key, value in facts.items()), f"  load average: {os.getloadavg()[0]:.1f}\n")
    found = searches(turns)
    print_table(
        f"1. The best layout of {LAYERS} layers on {DEVICES} devices, medians of {turns}",
        ["devices", "CPU, ms", "wall, ms", "stages"],
        [[row.what, row.cpu_ms, row.wall_ms, row.stages] for row in found],
    )
    print()
    keep_freed_memory()
    torch.set_num_threads(1)
    placed = [compare(name, turns) for name in PACKAGES]
    print_table(
        f"2. Lopsided packages, in turns, medians of {turns}; ms per batch",
        [
            *("package", "stages", "as many layers each", "took", "balanced by costs", "took", "gain"),
            *("by costs alone", "crowding", "forecast"),
        ],
        [
            [
                *(row.package, row.stages, row.equal_sizes, row.equal_ms),
                *(row.balanced_sizes, row.balanced_ms, f"{row.gain:.2f}×"),
                *(f"{row.by_costs:.2f}×", row.crowding, f"{row.forecast:.2f}×"),
            ]
            for row in placed
        ],
    )
    if options.json is not None:
        figures = {
            "machine": facts,
            "searches": [asdict(row) for row in found],
            "placed": [{**asdict(row), "gain": row.gain} for row in placed],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
