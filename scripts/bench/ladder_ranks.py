"""Rungs of ladder.py that take many processes: ``torchrun`` starts this file as each of them, with an order."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from memory_taken import Memory
from processes import torchrun
from rung_data import Task, task_of
from rung_training import Counted, Measured, options_in_line, rise, timed, train_in_line
from rungs import Setting

from pipeal.data import Share
from pipeal.engine.distributed import DistributedPipeline, Launch, World, open_world, serve
from pipeal.methods.al import ALPackage
from pipeal.planning.measure.layers import WARM_UP, uncollected
from pipeal.planning.placement import Placement
from pipeal.reporting.recorders import write_json


def in_processes(task: Task, setting: Setting, seed: int, steps: int) -> Measured:
    """A turn of a rung, in processes that torchrun starts; the memory is that of all of them together.

    Raises:
        CalledProcessError: One of them failed, and has said with what.
    """
    with TemporaryDirectory() as folder:
        order = Path(folder, "order.json")
        what = {
            "model": task.model,
            "device": task.device.type,
            "root": task.experiment.config.data.root,
            "placement": asdict(task.placement(setting)) if setting.staged else None,
            "setting": asdict(setting),
        }
        write_json(order, {**what, "seed": seed, "steps": steps})
        torchrun(setting.processes, __file__, str(order))
        said = [json.loads(_answer(order, rank).read_text(encoding="utf-8")) for rank in range(setting.processes)]
    peaks = [one["peak_bytes"] for one in said]
    return replace(Measured(**said[0]["measured"]), peak_bytes=None if None in peaks else sum(peaks))


@uncollected()
def be_rank(path: Path) -> None:
    """One of those processes: rank 0 leads and measures, the others serve it, and all say what memory they took.

    A few batches are trained before, by other models: what is loaded and compiled for the first time is no rung's.
    """
    order = json.loads(path.read_text(encoding="utf-8"))
    launch = Launch.found()
    assert launch is not None
    device = torch.device("cuda", launch.local_rank) if order["device"] == "cuda" else torch.device("cpu")
    task, setting = task_of(order["model"], device, order["root"]), Setting(**order["setting"])
    if setting.staged:
        task.placements[setting] = Placement(**order["placement"])
    torch.set_float32_matmul_precision("high" if setting.tf32 else "highest")
    with open_world(launch, {}, replicas=1 if setting.staged else launch.size) as world:
        lead, follow = (_lead_line, _follow_line) if setting.staged else (_lead, _follow)
        for steps in (WARM_UP + 1, order["steps"]):
            memory = Memory([device], keep=setting.keeps_memory)
            if world.rank == 0:
                found = lead(task, setting, world, order["seed"], steps, memory)
                said = {"measured": asdict(found), "peak_bytes": found.peak_bytes}
            else:
                said = {"peak_bytes": follow(task, setting, world, order["seed"], steps, memory)}
    write_json(_answer(path, launch.rank), said)


def _lead(task: Task, setting: Setting, world: World, seed: int, steps: int, memory: Memory) -> Measured:
    package = task.package(setting, seed)
    batches = Counted(task.batches(setting, seed, _share(world)))
    pipe = DistributedPipeline(package, world, str(task.device), seed=seed, **setting.of_pipeline)
    with pipe:
        pipe.begin_feed(0)
        found = timed(task.device, batches, steps, lambda some: pipe.run(some, rise), memory)
    return replace(found, loss=task.loss(package))


def _follow(task: Task, setting: Setting, world: World, seed: int, _: int, memory: Memory) -> int | None:
    def feed(*_: int) -> Iterator[Any]:
        return task.batches(setting, seed, _share(world))

    package = task.package(setting, seed)
    serve(package, world, str(task.device), feed=feed, seed=seed, **setting.of_pipeline)
    return memory.peak()


def _lead_line(task: Task, setting: Setting, world: World, seed: int, steps: int, memory: Memory) -> Measured:
    options = options_in_line(task, setting, seed, steps)

    def line(package: ALPackage) -> DistributedPipeline:
        return DistributedPipeline(package, world, str(task.device), **options)

    return train_in_line(task, setting, seed, steps, line, memory)


def _follow_line(task: Task, setting: Setting, world: World, seed: int, steps: int, memory: Memory) -> int | None:
    """The two lines that :func:`train_in_line` opens; the memory is that of the first, as there."""
    options = options_in_line(task, setting, seed, steps)
    serve(task.package(setting, seed), world, str(task.device), **options)
    peak = memory.peak()
    serve(task.package(setting, seed), world, str(task.device), **options)
    return peak


def _share(world: World) -> Share:
    return Share(world.rank, world.size)


def _answer(order: Path, rank: int) -> Path:
    return order.with_name(f"answer-{rank}.json")


if __name__ == "__main__":
    be_rank(Path(sys.argv[1]))
