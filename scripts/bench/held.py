"""Real runs that forecasts are held against, in turns with what a forecast is made from.

    forecast.py imports this; under torchrun it is a program of its own, one process per stage:
    torchrun --nproc-per-node 2 scripts/bench/held.py transformer --batches 24 --turns 7

Nothing is fitted to the runs. In each turn everything is measured anew, without any pipeline: the cost of each layer
alone; how much longer neighbouring layers take while others are at work on the same cores, in threads or in processes
as the run itself; and between processes what it takes the cores to carry a packet. So a slow minute of the machine
hits all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from processes import torchrun
from schedules import transformer

from pipeal.core.tree import Tree
from pipeal.engine import SCHEDULES, Pipeline, balance
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.engine.distributed.channel import Wire
from pipeal.engine.distributed.launch import Launch
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.world import World, open_world
from pipeal.engine.sizes import layers_of_stages
from pipeal.methods.al import ALPackage
from pipeal.models import VisionDims, build_vision
from pipeal.planning.measure.contention import (
    contention_of,
    crowding_in_turn,
    measure_contention,
    parts_of,
    recorded,
    seconds_among,
)
from pipeal.planning.measure.layers import WARM_UP, measure
from pipeal.planning.pure.forecast import forecast
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.layout import Layout, PlannedStage

PIPELINED = SCHEDULES["pipelined"]

MEASURED = 10
"""Batches that costs and crowding are measured with, beside those for warming up."""

Build = Callable[[int], tuple[ALPackage, list[Any]]]
"""From a number of batches to a new package and that many batches."""


def resnet(batches: int) -> tuple[ALPackage, list[Any]]:
    """ResNet-18 at half the published width with random images: 32 of 32 pixels each batch."""
    torch.manual_seed(0)
    package = build_vision("resnet", "al", classes=10, dims=VisionDims(width=0.5))
    return package, [(torch.randn(32, 3, 32, 32), torch.randint(10, (32,))) for _ in range(batches)]


MODELS: dict[str, Build] = {"transformer": transformer, "resnet": resnet}


@dataclass(frozen=True)
class Held:
    """One model on some stages, by turn.

    Attributes:
        model: Its name.
        executor: ``threads`` or ``processes``.
        stages: How many.
        sizes: The layers of each.
        crowding: By how many were at work at once: how many times as long it took.
        carried_ms: What carrying a packet takes the cores, of each hop.
        predicted_ms: Per batch.
        measured_ms: Per batch.
        others: The share of the cores that other programs had meanwhile.
    """

    model: str
    executor: str
    stages: int
    sizes: tuple[int, ...]
    crowding: list[dict[int, float]] = field(default_factory=list)
    carried_ms: list[list[float]] = field(default_factory=list)
    predicted_ms: list[float] = field(default_factory=list)
    measured_ms: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        """Of each turn."""
        return [one / other - 1 for one, other in zip(self.predicted_ms, self.measured_ms, strict=True)]

    @property
    def error(self) -> float:
        """Of the medians: what is predicted and measured over all turns."""
        return median(self.predicted_ms) / median(self.measured_ms) - 1


def hold_threads(model: str, stages: int, batches: int, turns: int) -> Held:
    """Stages as threads of this process; the first turn warms up."""
    package, given = MODELS[model](max(batches, MEASURED) + WARM_UP)
    some = given[: MEASURED + WARM_UP]
    held: Held | None = None
    for turn in range(turns + 1):
        begin = machine_s(), process_time(), perf_counter()
        costs = measure(package, some, rounds=1)
        held = held or Held(model, "threads", stages, _even(costs, stages))
        seconds = _run(package, given[: batches + WARM_UP], held.sizes)
        crowding = measure_contention(package, some, range(2, stages + 1), sizes=held.sizes)
        if turn:
            held.crowding.append(crowding)
            held.measured_ms.append(1e3 * seconds / batches)
            held.predicted_ms.append(1e3 * predict(costs, held.sizes, crowding, batches))
            held.others.append(others_share(begin, process_time()))
    assert held is not None
    return held


def hold_processes(model: str, stages: int, batches: int, turns: int) -> Held:
    """Stages as processes that torchrun starts."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "held.json"
        counts = ("--batches", str(batches), "--turns", str(turns))
        torchrun(stages, __file__, model, *counts, "--json", str(found))
        return read_held(json.loads(found.read_text(encoding="utf-8")))


def read_held(row: Mapping[str, Any]) -> Held:
    """A row as JSON has it."""
    crowding = [{int(number): times for number, times in turn.items()} for turn in row["crowding"]]
    return Held(**{**row, "sizes": tuple(row["sizes"]), "crowding": crowding})


def machine_s() -> float:
    """The seconds that all cores together have worked since the machine started; Linux."""
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def others_share(begin: tuple[float, float, float], own_s: float) -> float:
    """The share of the cores that was not ours, since a time of the machine, of our own work and of the clock."""
    machine, before, since = begin
    return max(0.0, (machine_s() - machine - (own_s - before)) / (perf_counter() - since) / (os.cpu_count() or 1))


def predict(
    costs: Sequence[LayerCost],
    sizes: Sequence[int],
    crowding: Mapping[int, float] | None,
    batches: int,
    link: Link | None = None,
) -> float:
    """Seconds per batch of a run on stages that share the cores, or with no crowding on devices of their own."""
    cpu = PlannedDevice("cpu")
    stages = [
        PlannedStage(layers, (number,), cpu, 0.0, 0.0, 0) for number, layers in enumerate(layers_of_stages(sizes))
    ]
    share = None if crowding is None else contention_of(crowding)
    setup = Setup((cpu,) * len(sizes), link or Link(), batches=batches, contention=share)
    layout = Layout(tuple(stages), any_order=True)
    return forecast("AL pipelined", PIPELINED, {"cpu": costs}, setup, layout).batch_s


def _even(costs: Sequence[LayerCost], stages: int) -> tuple[int, ...]:
    return tuple(balance([cost.seconds for cost in costs], stages))


def _run(package: ALPackage, batches: Sequence[Any], sizes: Sequence[int]) -> float:
    """Seconds of a real run, warmed up, from the first batch to the last update."""
    with Pipeline(package, ["cpu"] * len(sizes), sizes=sizes, threads=1) as pipe:
        pipe.run(batches[:WARM_UP])
        return pipe.run(batches[WARM_UP:]).seconds


class _Ranks:
    """A roll of ranks, which call for one after the other in the same order."""

    count = 0

    def __init__(self, store: dist.Store, size: int) -> None:
        _Ranks.count += 1
        self._store, self._size, self._key = store, size, f"bench/roll/{_Ranks.count}"

    def come(self) -> None:
        self._store.add(self._key, 1)

    def is_complete(self) -> bool:
        return self._store.add(self._key, 0) >= self._size


def hold_ranks(world: World, model: str, batches: int, turns: int) -> Held:
    """On every rank; the first turn warms up."""
    package, given = MODELS[model](max(batches, MEASURED) + WARM_UP)
    some = given[: MEASURED + WARM_UP]
    layers = list(deepcopy(package))
    heard = recorded(layers, some)
    largest = max(range(len(some)), key=lambda number: some[number][0].numel())  # whose bytes are those of the costs
    wire = Wire(world.endpoint, *world.wire_numbers(1))
    held: Held | None = None
    for turn in range(turns + 1):
        begin = machine_s(), sum(world.gather(process_time())), perf_counter()
        costs = [LayerCost(**cost) for cost in _on_rank_0(world, lambda: _costs(package, some))]
        held = held or Held(model, "processes", world.size, _even(costs, world.size))
        seconds = _run_ranks(world, deepcopy(package), given[: batches + WARM_UP], held.sizes)
        crowding = _crowding(world, parts_of(layers, heard, held.sizes), turn)
        starts = [layers.start for layers in layers_of_stages(held.sizes)[1:]]
        carried_s = [_carried_s(world, wire, hop, heard[start][largest]) for hop, start in enumerate(starts)]
        sent = [costs[start - 1].out_bytes for start in starts]
        others = others_share(begin, sum(world.gather(process_time())))
        if turn:
            held.crowding.append(crowding)
            held.carried_ms.append([1e3 * one for one in carried_s])
            held.measured_ms.append(1e3 * seconds / batches)
            link = Link(sum(sent) / sum(carried_s))
            held.predicted_ms.append(1e3 * predict(costs, held.sizes, crowding, batches, link))
            held.others.append(others)
    assert held is not None
    return held


def _costs(package: ALPackage, batches: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(cost) for cost in measure(package, batches, rounds=1)]


def _on_rank_0(world: World, work: Callable[[], Any]) -> Any:
    """What rank 0 finds while all others rest."""
    return world.gather(work() if world.rank == 0 else None)[0]


def _run_ranks(world: World, package: ALPackage, batches: Sequence[Any], sizes: Sequence[int]) -> float:
    """As :func:`_run`, over processes; on rank 0."""
    world.gather(None)
    if world.rank:
        serve(package, world, sizes=sizes, threads=1)
        return 0.0
    with DistributedPipeline(package, world, sizes=sizes, threads=1) as pipe:
        pipe.run(batches[:WARM_UP])
        return pipe.run(batches[WARM_UP:]).seconds


def _crowding(world: World, parts: Sequence[Any], turn: int) -> dict[int, float]:
    """As :func:`measure_contention`, each part in a process of its own: medians of three."""

    def train(ranks: Sequence[int]) -> list[float]:
        here, done = (_Ranks(world.store, len(ranks)) for _ in range(2))
        world.gather(None)
        seconds = world.gather(seconds_among(parts[world.rank], here, done) if world.rank in ranks else 0.0)
        return [seconds[rank] for rank in ranks]

    found = [crowding_in_turn(3 * turn + again, world.size, range(2, world.size + 1), train) for again in range(3)]
    return {number: median(one[number] for one in found) for number in found[0]}


def _carried_s(world: World, wire: Wire, hop: int, packet: Tree, count: int = 20) -> float:
    """What the cores work, at both ends together, to carry a packet from one stage to the next."""
    facts = {"sequence": 0, "batch": 0, "lr_scale": 1.0}
    spent = 0.0
    for _ in range(2):  # the first one warms up
        world.gather(None)
        begin = process_time()
        for _ in range(count):
            if world.rank == hop:
                wire.send(hop + 1, "packet", facts, packet)
            elif world.rank == hop + 1:
                wire.body(wire.receive([hop]))
        spent = process_time() - begin if world.rank in (hop, hop + 1) else 0.0
    return sum(world.gather(spent)) / count


def main(arguments: Sequence[str] | None = None) -> None:
    """What each process of a run does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--batches", type=int, required=True, help="of a run")
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rank 0 leaves what was found")
    options = parser.parse_args(arguments)
    launch = Launch.found()
    if launch is None:
        parser.error("start it with torchrun")
    keep_freed_memory()
    torch.set_num_threads(1)
    with open_world(launch, vars(options) | {"json": None}) as world:
        held = hold_ranks(world, options.model, options.batches, options.turns)
        if world.rank == 0:
            text = json.dumps(asdict(held), indent=2) + "\n"
            print(text) if options.json is None else options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
