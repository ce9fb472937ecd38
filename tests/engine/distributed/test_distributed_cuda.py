"""Ranks with GPUs: two on one go by way of the host, two with their own over NCCL; bits are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeal import Pipeline
from pipeal.engine import SCHEDULES, Snapshot, load_layer_state
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.process_groups import Groups, Seat, gpu_group
from pipeal.engine.distributed.world import World

from ..test_cuda import batches, package
from .lines import on_each, thread_ranks
from .processes import Job, run

pytestmark = pytest.mark.cuda


def left(snapshot: Snapshot, losses: list[Tensor], logits: list[Tensor]) -> list[Tensor]:
    """Weights, losses and logits, on the CPU."""
    model = package()
    for number, found in snapshot.wait(60).items():
        load_layer_state(model[number], found.state)
    return [*(value.cpu() for value in model.state_dict().values()), *losses, *(one.cpu() for one in logits)]


def work_of(pipe: Pipeline) -> tuple[Snapshot, list[Tensor], list[Tensor]]:
    data = batches(8)
    report = pipe.run(data, lambda batch: 1 / (1 + batch))
    logits = [*pipe.predict_each([x for x, _ in data]), pipe.predict(data[0][0], 2)]
    return pipe.snapshot(), report.losses, logits


def trained(world: World, model: Any, device: str, schedule: str, **settings: Any) -> Any:
    if world.rank:
        return serve(model, world, device, schedule, **settings)
    with DistributedPipeline(model, world, device, schedule, **settings) as pipe:
        return work_of(pipe)


def one_process(devices: list[str]) -> list[Tensor]:
    with Pipeline(package(), devices, threads=1) as pipe:
        found = work_of(pipe)
    return left(*found)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]])
def test_two_ranks_of_which_one_gpu_is_enough(devices: list[str], schedule: str) -> None:
    with thread_ranks(2) as worlds:
        models = [package() for _ in worlds]
        found = on_each(
            worlds, lambda world: trained(world, models[world.rank], devices[world.rank], schedule, threads=1)
        )
    assert all(map(torch.equal, left(*found[0]), one_process(devices)))


def test_replicas_on_one_gpu_learn_together() -> None:
    """By way of the host, as NCCL refuses two ranks on one GPU."""
    data = batches(6)

    def feed(_: int, first: int) -> Iterator[Any]:
        yield from ((x[20:], y[20:]) for x, y in data[first:])

    def work(world: World, model: Any) -> Any:
        if world.rank:
            return serve(model, world, "cuda:0", threads=1, feed=feed)
        with DistributedPipeline(model, world, "cuda:0", threads=1) as pipe:
            pipe.begin_feed(0)
            return pipe.run([(x[:20], y[:20]) for x, y in data]).losses

    with thread_ranks(2, replicas=2) as worlds:
        models = [package(drop=0.0) for _ in worlds]
        losses = on_each(worlds, lambda world: work(world, models[world.rank]))[0]
        for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(mine, other)
    with Pipeline(package(drop=0.0), ["cuda:0"], threads=1) as pipe:
        for mine, wanted in zip(losses, pipe.run(data).losses, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4)


def alone(world: World) -> tuple[Tensor, str]:
    """The life of a group of NCCL, as far as one GPU shows it, and its backend's class; the world then closes what has
    been aborted."""
    world.open_groups()
    group = gpu_group([world.rank], Seat("cuda:0", "the only one", 0.0))
    row = torch.ones(4, device="cuda:0")
    group.allreduce([row]).wait()
    found = row.cpu()
    backend = type(group._get_backend(torch.device("cuda"))).__name__
    groups = Groups(alike_on_gpus=group)
    groups.abort(30)
    groups.close()
    return found, backend


def test_a_group_over_nccl_works_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction 9 of the GPU reading: newer versions of torch have two backends for NCCL."""
    built = []
    for newer in ("0", "1"):
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", newer)
        (tmp_path / newer).mkdir()
        row, backend = run(alone, 1, tmp_path / newer)[0]
        assert torch.equal(row, torch.ones(4))
        built.append(backend)
    if not hasattr(dist, "ProcessGroupNCCL2"):
        pytest.skip(f"torch {torch.__version__} has one backend for NCCL, {built[0]}, which works")
    assert built[0] != built[1]


def over_nccl(world: World, replicated: bool, swapped: bool = False) -> list[Tensor] | None:
    data = batches(8)

    def feed(_: int, first: int) -> Iterator[Any]:
        yield from data[first:]

    device = f"cuda:{1 - world.rank if swapped else world.rank}"
    if not replicated:
        found = trained(world, package(), device, "pipelined", threads=1)
        return None if found is None else left(*found)
    model = package()
    if world.rank:
        serve(model, world, device, threads=1, feed=feed)
    else:
        with DistributedPipeline(model, world, device, threads=1) as pipe:
            pipe.begin_feed(0)
            pipe.run(data)
    return [value.cpu() for value in model.state_dict().values()]


def line(world: World) -> list[Tensor] | None:
    return over_nccl(world, replicated=False)


def column(world: World) -> list[Tensor] | None:
    return over_nccl(world, replicated=True)


def swapped_line(world: World) -> list[Tensor] | None:
    return over_nccl(world, replicated=False, swapped=True)


def swapped_column(world: World) -> list[Tensor] | None:
    return over_nccl(world, replicated=True, swapped=True)


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@needs_two
@pytest.mark.parametrize("newer", ["0", "1"])
@pytest.mark.parametrize(("job", "devices"), [(line, ["cuda:0", "cuda:1"]), (swapped_line, ["cuda:1", "cuda:0"])])
def test_two_gpus_over_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job, devices: list[str], newer: str
) -> None:
    """Whichever of them a rank has: NCCL is not left to guess it from the rank's number."""
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", newer)
    found = run(job, 2, tmp_path)[0]
    assert all(map(torch.equal, found, one_process(devices)))


@needs_two
@pytest.mark.parametrize("job", [column, swapped_column])
def test_replicas_on_two_gpus_over_nccl(tmp_path: Path, job: Job) -> None:
    first, second = run(job, 2, tmp_path, replicas=2)
    assert all(map(torch.equal, first, second))
