"""Data parallel training held against one process with one thread, on the same batches.

    python scripts/bench/replicas.py charlm --data-root DIR [--batches 24 64 128 256] [--compile static]

torchrun starts a process with one thread for each core. In each turn, and for each size of a batch, the first of them
trains alone on all of each batch while the others rest. Then all train at once, each a model of its own on its share of
the same batches: no faster can they be together on this machine. Then they train one model together, from the same
weights. So what is compared is seconds per sample at one global batch. The first turn is for warming up, and its
weights are compared: what averaging rounds should be little of how far they have moved.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, get_args

import torch
from processes import torchrun
from rung_data import Task, task_of
from rung_training import rise
from rungs import FORMS, MODELS, Setting

from pipeal.core.options import Compile, Precision
from pipeal.data import WHOLE, Share
from pipeal.engine import Pipeline
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.engine.devices.cpus import cores
from pipeal.engine.distributed import DistributedPipeline, Launch, World, open_world, serve
from pipeal.engine.schedule import Action
from pipeal.methods.al import ALPackage
from pipeal.planning.measure.layers import WARM_UP
from pipeal.reporting.environment import environment
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import Cell, print_table

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Turn:
    """A training, as the first process saw it; milliseconds per batch.

    Attributes:
        step: By the clock.
        forward: Within it.
        backward: Within it.
        update: Within it.
        averaging: What updates waited for averages.
        input: What the stage waited for batches.
        work: What the process kept cores busy with, by all of its threads.
    """

    step: float
    forward: float
    backward: float
    update: float
    averaging: float
    input: float
    work: float


@dataclass(frozen=True)
class Held:
    """One size of a batch.

    Attributes:
        batch: Samples, of all processes together.
        alone: One process on whole batches, by turn.
        beside: All processes at once, each for itself on its share: ms per batch of the slowest, by turn.
        many: All processes, by turn.
        stolen: The share of the cores that the host of this virtual machine kept meanwhile, by turn.
        apart: How far the weights are apart, of how far they have moved, as norms.
    """

    batch: int
    alone: list[Turn] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    many: list[Turn] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)
    apart: float = 0.0

    @property
    def gains(self) -> list[float]:
        """How many times as many samples per second, by turn."""
        return [one.step / other.step for one, other in zip(self.alone, self.many, strict=True)]

    @property
    def ceiling(self) -> float:
        """What the gain would be if they need not wait for each other; the median of the turns."""
        return median(one.step / other for one, other in zip(self.alone, self.beside, strict=True))


def hold(order: dict[str, Any], processes: int) -> list[Held]:
    """In processes that torchrun starts.

    Raises:
        CalledProcessError: One of them failed, and has said with what.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder, "order.json")
        write_json(path, order)
        torchrun(processes, __file__, str(path))
        found = json.loads(path.with_name("answer.json").read_text(encoding="utf-8"))
    turns = ("alone", "many")
    return [Held(**{**row, **{name: [Turn(**turn) for turn in row[name]] for name in turns}}) for row in found]


def be_rank(path: Path) -> None:
    """One of those processes."""
    order = json.loads(path.read_text(encoding="utf-8"))
    launch = Launch.found()
    assert launch is not None
    keep_freed_memory()
    torch.set_num_threads(1)
    task, steps = task_of(order["model"], CPU, order["root"]), order["steps"]
    found = []
    with open_world(launch, order, replicas=launch.size) as world:
        for turn in range(order["turns"] + 1):
            for place, batch in enumerate(order["batches"]):
                setting = setting_of(order, batch)
                since = stolen_s(), perf_counter()
                whole = task.package(setting, turn)
                alone = _alone(whole, task, setting, turn, steps) if world.rank == 0 else None
                world.gather(None)  # the others rest until then
                package, share = task.package(setting, turn), Share(world.rank, world.size)
                beside = max(world.gather(_alone(package, task, setting, turn, steps, share).step))
                package = task.package(setting, turn)
                many = _together(package, task, setting, turn, steps, world)
                stolen = (stolen_s() - since[0]) / (perf_counter() - since[1]) / (os.cpu_count() or 1)
                if alone is None or many is None:
                    continue
                if turn == 0:
                    found.append(Held(batch, apart=apart(task.package(setting, turn), whole, package)))
                else:
                    found[place].alone.append(alone)
                    found[place].beside.append(beside)
                    found[place].many.append(many)
                    found[place].stolen.append(stolen)
                print(f"turn {turn}/{order['turns']}, {batch}: {alone.step:.1f} and {many.step:.1f} ms", flush=True)
    if launch.rank == 0:
        path.with_name("answer.json").write_text(json.dumps([asdict(row) for row in found]), encoding="utf-8")


def setting_of(order: dict[str, Any], batch: int) -> Setting:
    """What both train: our fastest form."""
    fast = Setting(order["form"], "ours", folded=True, by_length=True, channels_last=True, fused=True, engine=True)
    return replace(fast, precision=order["precision"], compile=order["compile"], batch=batch)


def stolen_s() -> float:
    """The seconds that the host of this virtual machine has kept its cores from it since it started; Linux."""
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def apart(start: ALPackage, one: ALPackage, other: ALPackage) -> float:
    """How far two trainings from one start are apart, of how far the first one has come."""
    between = moved = 0.0
    for begin, a, b in zip(start.parameters(), one.parameters(), other.parameters(), strict=True):
        between += float((a - b).detach().double().square().sum())
        moved += float((a - begin).detach().double().square().sum())
    return math.sqrt(between / moved)


def _alone(package: ALPackage, task: Task, setting: Setting, seed: int, steps: int, share: Share = WHOLE) -> Turn:
    with Pipeline(package, ["cpu"], seed=seed, threads=1, **setting.of_pipeline) as pipe:
        return _timed(pipe, task.batches(setting, seed, share), steps)


def _together(package: ALPackage, task: Task, setting: Setting, seed: int, steps: int, world: World) -> Turn | None:
    """On every rank; what the first one saw."""

    def own(*_: int) -> Iterator[Any]:
        return task.batches(setting, seed, Share(world.rank, world.size))

    options: dict[str, Any] = {"seed": seed, "threads": 1, **setting.of_pipeline}
    if world.rank:
        serve(package, world, feed=own, **options)
        return None
    pipe = DistributedPipeline(package, world, **options)
    with pipe:
        pipe.begin_feed(0)
        return _timed(pipe, own(), steps)


def _timed(pipe: Pipeline, batches: Iterator[Any], steps: int) -> Turn:
    pipe.run(islice(batches, WARM_UP), rise)
    begin = process_time()
    report = pipe.run(islice(batches, steps), rise)
    work = process_time() - begin
    (times,) = report.stages
    waiting = times.waiting
    seconds = [report.seconds, *(times.busy[action] for action in Action), waiting["join"], waiting["input"], work]
    return Turn(*(1e3 * one / steps for one in seconds))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--form", choices=FORMS, default="bp")
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32")
    parser.add_argument("--compile", choices=get_args(Compile), default="none")
    parser.add_argument("--batches", nargs="+", type=int, default=[24, 64, 128, 256], help="samples of a step, of all")
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--processes", type=int, default=cores())
    parser.add_argument("--steps", type=int, default=40, help=f"batches of a training, after {WARM_UP} for warming up")
    parser.add_argument("--turns", type=int, default=5, help="after one for warming up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    asked = {
        name: getattr(options, name) for name in ("model", "form", "precision", "compile", "batches", "steps", "turns")
    }
    facts = environment()
    print("  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    found = hold({**asked, "root": options.data_root}, options.processes)
    print_table(
        f"{options.model}, {options.form.upper()}, {options.precision}, compile {options.compile}, "
        f"{options.processes} processes of one thread, "
        f"{options.steps} batches, medians of {options.turns} turns; ms per batch",
        [
            "batch",
            "processes",
            "step",
            "F",
            "B",
            "U",
            "averaging",
            "input",
            "work",
            "gain",
            "of the turns",
            "ceiling",
            "stolen",
            "apart",
        ],
        [row for held in found for row in rows_of(held, options.processes)],
    )
    print(
        "gain: in samples per second; ceiling: of processes that train at once, and each for itself;\n"
        "F, B, U, averaging (the wait for it) and input (the wait for a batch) lie in the step;\n"
        "work: of all threads of the first process; stolen: what a virtual machine's host kept of the cores,\n"
        "at most: beyond some percent figures say little; apart: the weights of both, of how far they have moved"
    )
    if options.json is not None:
        figures = {"machine": facts, **asked, "processes": options.processes}
        rows = [
            {**asdict(held), "gains": held.gains, "gain": median(held.gains), "ceiling": held.ceiling} for held in found
        ]
        write_json(options.json, {**figures, "held": rows})


def rows_of(held: Held, processes: int) -> list[list[Cell]]:
    """Of the table: one process, and all of them."""

    def middle(turns: Sequence[Turn]) -> list[Cell]:
        return [median(column) for column in zip(*(astuple(turn) for turn in turns), strict=True)]

    gains = held.gains
    spread = f"{min(gains):.2f} to {max(gains):.2f}"
    return [
        [held.batch, 1, *middle(held.alone), None, None, None, None, None],
        [
            held.batch,
            processes,
            *middle(held.many),
            f"{median(gains):.2f}×",
            spread,
            f"{held.ceiling:.2f}×",
            f"{max(held.stolen):.0%}",
            f"{held.apart:.1e}",
        ],
    ]


if __name__ == "__main__":
    if Launch.found() is None:
        main()
    else:
        be_rank(Path(sys.argv[1]))
