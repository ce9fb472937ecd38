"""Memory over depth: backpropagation, with recomputation, and Associated Learning in both orders within a stage.

    python scripts/bench/memory.py [--depths 2 8 32] [--blocks charlm] [--turns 20] [--json FILE] [--plot FILE]

1. Each depth of each form trains for two batches, the second with optimizer states, in a process of its own, on one
   thread. Two peaks are taken. *Activations*: what autograd saves for backwards, at any time, by
   ``saved_tensors_hooks``: each storage once, from when it is saved until its graph lets it go, parameters and buffers
   aside. *Resident*: physical memory beyond that of the same process after it has trained one block on two samples and
   dropped it; weights, gradients and optimizer states are part of it. *Without holes*, in a process of its own again,
   is the same where every block of 128 KiB or more goes back to the system when it is freed: what tensors take, while
   a C library's heap has holes, the more the longer tensors live that are made between those that soon go. A depth that
   is expected to take more memory or time than the limits is not run: its figures lie on the line through the two
   depths before, and are marked.
2. After that training, both orders of AL have to have the same weights and optimizer states, bit for bit.
3. Throughput: both orders train the same package on one stage, in turns in one process.
4. The fill of a pipeline, which ``layer`` makes longer: virtual stages of layers whose actions take a given time.

memory_forms.py says what is trained; memory_report.py prints kept figures.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from memory_forms import BLOCKS, Case, measure
from memory_report import CLOCKS, FORMS, ORDERS, PEAKS, Found, in_mib, ratios_of, report
from schedules import wake_on_time
from virtual import VirtualLayer

from pipeal.core.options import WithinStage
from pipeal.engine import Pipeline
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.methods import al
from pipeal.reporting.environment import environment
from pipeal.reporting.recorders import write_json

DEPTHS = (2, 8, 32, 128, 512)
THROUGHPUT_DEPTH = 8
MEASURED = (*PEAKS, "weights", "optimizer")
"""The bytes of a case."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--turns", type=int, default=20, help="of the throughput; 0 for none")
    parser.add_argument("--limit-gib", type=float, default=6.0, help="beyond which resident memory is predicted")
    parser.add_argument("--limit-s", type=float, default=300.0, help="likewise of two batches")
    parser.add_argument("--quick", action="store_true", help="depths 2, 8 and 32 of charlm, 4 turns: a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a picture there")
    options = parser.parse_args(arguments)
    if options.quick:
        options.depths, options.blocks, options.turns = [2, 8, 32], ["charlm"], 4
    depths: list[int] = options.depths
    if depths[0] < 1 or depths != sorted(set(depths)):
        parser.error(f"found --depths {depths}; expected growing numbers, at least 1")
    if options.turns < 0 or options.turns == 1:
        parser.error(f"found --turns {options.turns}; expected 0, or at least 2 to tell how they differ")
    report(measured(options.blocks, depths, options), options.plot)


def measured(blocks: Sequence[str], depths: Sequence[int], options: argparse.Namespace) -> Found:
    """Everything, kept in the JSON as far as it is known."""
    found: Found = {
        "machine": environment(),
        "load": [os.getloadavg()[0]],
        "blocks": {block: BLOCKS[block].what for block in blocks},
        "cases": [],
        "throughput": [],
        "fill": [],
    }

    def keep(kind: str, one: Found, told: str) -> None:
        found[kind].append(one)
        print(told, flush=True)
        found["load"][1:] = [os.getloadavg()[0]]
        if options.json is not None:
            write_json(options.json, found)

    for block in blocks:
        for form in FORMS:
            for one in measure_depths(block, form, depths, options.limit_gib * 2**30, options.limit_s):
                sizes = ", ".join(f"{what} {in_mib(one, what)} MiB" for what in PEAKS)
                keep("cases", one, f"{block}, {form}, depth {one['depth']}: {sizes}, {one['seconds']:.1f} s")
    if options.turns:
        for block in blocks:
            one = in_fresh_process(throughput, block, options.turns, THROUGHPUT_DEPTH)
            keep("throughput", one, f"{block}: layer / stage {median(ratios_of(one, 'wall')):.3f}")
        for one in fill(Virtual(), (8, 32), 2 if options.quick else 5):
            keep("fill", one, f"virtual stages, {one['batches']} batches: {one['measured']}")
    return found


def in_fresh_process(function: Callable[..., Found], *arguments: Any) -> Found:
    """What a function gives in a process that begins with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def on_line(points: Sequence[tuple[int, float]], depth: int) -> float:
    """Where a line through the last two points is.

    >>> on_line([(2, 0.0), (8, 20.0), (32, 68.0)], 128)
    260.0
    """
    (before, low), (after, high) = points[-2:]
    return high + (high - low) / (after - before) * (depth - after)


def predicted(done: Sequence[Found], depth: int) -> Found:
    """A case that lies on the line through the two deepest of those that were measured."""
    found = {name: on_line([(one["depth"], one[name]) for one in done], depth) for name in (*MEASURED, "seconds")}
    whole = {name: round(found[name]) for name in MEASURED}
    same = {name: done[-1][name] for name in ("block", "form", "batches")}
    return same | {"depth": depth, **whole, "seconds": found["seconds"], "digest": None, "predicted": list(MEASURED)}


def measure_depths(block: str, form: str, depths: Sequence[int], limit_bytes: float, limit_s: float) -> Iterator[Found]:
    """The cases of a form, from the shallowest on; once one is beyond a limit, all deeper ones are predicted."""
    done: list[Found] = []
    for depth in depths:
        expected = predicted(done, depth) if len(done) > 1 else None
        if expected is not None and (expected["resident"] > limit_bytes or expected["seconds"] > limit_s):
            yield expected
            continue
        found = in_fresh_process(measure, Case(block, form, depth))
        found["without_holes"] = in_fresh_process(measure, Case(block, form, depth, holes=False))["resident"]
        if expected is not None:  # how well a depth is predicted that was measured, too
            found["would_predict"] = {name: expected[name] for name in PEAKS}
        done.append(found)
        yield found


def throughput(block: str, turns: int, depth: int) -> Found:
    """Seconds of each turn of each order on one stage; the order that begins changes, and one turn more warms up.

    By the wall's clock, and of the processor, which is disturbed less by other work on the machine.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    one = BLOCKS[block]
    layers = list(al.make_layers(one.network(depth), 1e-3, None))
    batches = [one.batch(one.samples) for _ in range(one.turn)]
    seconds: dict[str, dict[WithinStage, list[float]]] = {clock: {order: [] for order in ORDERS} for clock in CLOCKS}
    for turn in range(turns + 1):
        for order in ORDERS[:: -1 if turn % 2 else 1]:
            with Pipeline(layers, ["cpu"], "sequential", threads=1, within_stage=order) as pipe:
                begin = process_time()
                wall, processor = pipe.run(batches).seconds, process_time() - begin
            if turn:
                seconds["wall"][order].append(wall)
                seconds["processor"][order].append(processor)
    return {"block": block, "depth": depth, "batches": one.turn, "seconds": seconds}


@dataclass(frozen=True)
class Virtual:
    """Equal virtual stages of equal layers.

    Attributes:
        stages: How many.
        layers: Of each stage.
        forward_s: Of each layer.
        learn_s: Its backward and update.
    """

    stages: int = 4
    layers: int = 4
    forward_s: float = 0.005
    learn_s: float = 0.010

    def seconds(self, order: WithinStage, batches: int) -> float:
        """Of a pipelined run, without any cost of the engine: the fill, then a batch at a time."""
        to_hand_on = self.layers * self.forward_s + (order == "layer") * (self.layers - 1) * self.learn_s
        return (self.stages - 1) * to_hand_on + batches * self.layers * (self.forward_s + self.learn_s)

    def measured(self, order: WithinStage, batches: int) -> float:
        """By the real executor."""
        layers = [VirtualLayer(self.forward_s, self.learn_s) for _ in range(self.stages * self.layers)]
        devices = ["cpu"] * self.stages
        with Pipeline(layers, devices, "pipelined", threads=1, within_stage=order) as pipe:
            return pipe.run([(None, None)] * batches).seconds


def fill(virtual: Virtual, batch_counts: Sequence[int], turns: int) -> list[Found]:
    """Medians of both orders, in turns."""
    wake_on_time()
    rows = []
    for batches in batch_counts:
        took: dict[WithinStage, list[float]] = {order: [] for order in ORDERS}
        for turn in range(turns):
            for order in ORDERS[:: -1 if turn % 2 else 1]:
                took[order].append(virtual.measured(order, batches))
        calculated = {order: virtual.seconds(order, batches) for order in ORDERS}
        measured = {order: median(seconds) for order, seconds in took.items()}
        rows.append({**asdict(virtual), "batches": batches, "measured": measured, "calculated": calculated})
    return rows


if __name__ == "__main__":
    main()
