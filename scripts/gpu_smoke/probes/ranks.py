"""Predictions 9, 11, 13 and 14: what several processes do, and NCCL in them."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu_smoke.place import ApartError, Place, apart
from gpu_smoke.predictions import OF_PIPEAL, Finding
from pipeal import AE, AL, ENC, ALPackage
from pipeal.config.schema import EngineConfig
from pipeal.engine.distributed import DistributedPipeline, Launch, open_world, serve
from pipeal.run.team import rank_device


def nccl_backend(place: Place) -> Finding:
    """Prediction 9. Which backend a group over NCCL has by default, and with the older one asked for."""
    default = backend_name(place)
    old = apart(f"{__name__}:backend_name", place, {"TORCH_DIST_USE_NCCL2": "0"})
    return Finding(
        verdict=default != old,
        figure=f"torch {torch.__version__} builds {default}, and {old} under TORCH_DIST_USE_NCCL2=0; whether a receive "
        "that an abort has cut off looks complete needs two GPUs, and was not tested",
        how="a group of one process; true where the two differ",
    )


def backend_name(place: Place) -> str:
    """The class of a group's backend, in a group of this process alone."""
    _group_of_one(place)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(place.device))
    name = type(backend).__name__
    dist.destroy_process_group()
    return name


def one_gpu_each(place: Place) -> Finding:
    """Prediction 11. Two ranks of a pipeline, each of which sees one GPU, as some launchers have it."""
    first = first_visible(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    refused, figure = False, "two ranks that each see one GPU train"
    try:
        apart(f"{__name__}:two_stages", place, {"CUDA_VISIBLE_DEVICES": first}, processes=2, limit_s=60)
    except ApartError as error:
        said = [line for line in error.ended.output.splitlines() if "does not exist" in line]
        if not said:
            raise
        refused, figure = True, said[0].partition(": ")[2]
    return Finding(
        verdict=None,
        figure=figure,
        how="torchrun of two processes, each on the device that commands would take, under "
        f"CUDA_VISIBLE_DEVICES={first}; affected where a rank is told that its GPU does not exist; of MIG nothing is "
        "tested" + (" (this GPU is an instance of one)" if first.startswith("MIG") else ""),
        affected=refused,
        affected_figure="as before",
        not_tested=OF_PIPEAL,
    )


def first_visible(variable: str) -> str:
    """The first GPU that CUDA_VISIBLE_DEVICES names, so that no process is sent to one that this one may not use."""
    return variable.partition(",")[0].strip() or "0"


def two_stages(place: Place) -> str:
    """One of two ranks: they train as stages, each on what it takes for its device."""
    launch = Launch.found()
    assert launch is not None
    with open_world(launch, {}) as world:
        device = rank_device(world, EngineConfig(), "cpu" if place.stand_in else "cuda")
        model = _equal_layers(2)
        if world.rank:
            serve(model, world, device, threads=1)
        else:
            with DistributedPipeline(model, world, device, threads=1) as pipe:
                pipe.run([(torch.randn(16, 16), torch.randn(16, 16))] * 3)
    return device


def monitor(place: Place) -> Finding:
    """Prediction 13. A process whose launches are blocked for longer than NCCL's monitor waits for its watchdog."""
    environment = {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }
    ended = {}
    for watched in ("1",) if place.stand_in else ("1", "0"):
        try:
            apart(f"{__name__}:blocked_launches", place, {**environment, "TORCH_NCCL_ENABLE_MONITORING": watched})
            ended[watched] = "lives"
        except ApartError as error:
            if error.ended.code != -signal.SIGABRT:
                raise
            ended[watched] = "is ended by SIGABRT"
    ours = monitoring_under_pipeal(place)
    dies = ended["1"] != "lives"
    return Finding(
        verdict=True if dies else None,
        figure=f"with launches blocked for 8 s and a timeout of 3 s a process {ended['1']}; without monitoring it "
        f"{ended.get('0')}",
        how="a group of one process, an all-reduce behind a long kernel and a full queue of launches; true where the "
        "process is ended",
        affected=ours != "0",
        affected_figure=f"TORCH_NCCL_ENABLE_MONITORING is {ours or 'not set'} once pipeal has a group over NCCL",
        not_tested="" if dies else "the process lived, which does not show that it always does",
    )


def blocked_launches(place: Place) -> bool:
    """Keeps the device busy for eight seconds with a full queue of launches behind it."""
    from gpu_smoke.probes.kernels import QUEUE, _cycles

    _group_of_one(place)
    row = torch.ones(4, device=place.device)
    dist.all_reduce(row)
    place.wait()
    if place.stand_in:
        return True
    second = _cycles(1.0)
    for _ in range(8):
        torch.cuda._sleep(second)
    dist.all_reduce(row, async_op=True)
    for _ in range(2 * QUEUE):
        row.add_(1)
    place.wait()
    return True


def monitoring_under_pipeal(place: Place) -> str | None:
    """What the environment says once pipeal has made a group over NCCL, as all its groups between GPUs are made."""
    from pipeal.engine.distributed.process_groups import Seat, gpu_group

    if not place.stand_in:
        _group_of_one(place)
        gpu_group([0], Seat(place.device, "the only one", 0.0))
        dist.destroy_process_group()
    return os.environ.get("TORCH_NCCL_ENABLE_MONITORING")


def counts(place: Place) -> Finding:
    """Prediction 14. A small all-reduce over Gloo between two processes, and how many training with replicas makes."""
    found = apart(f"{__name__}:two_replicas", place, {"OMP_NUM_THREADS": "1"}, processes=2, limit_s=60)
    return Finding(
        verdict=found["gloo_us"] >= 100,
        figure=f"an all-reduce of 20 numbers over Gloo takes {found['gloo_us']:,.0f} µs between two processes",
        how="median of 300; true from 100 µs",
        affected=found["small_per_layer_and_batch"] > 0.5,
        affected_figure=f"{found['small_per_layer_and_batch']:.2f} all-reduces of counts per layer and batch, two "
        "replicas (affected above a half)",
        figures=found,
    )


def two_replicas(place: Place) -> dict[str, float]:
    """One of two ranks: they train as replicas on one device."""
    launch = Launch.found()
    assert launch is not None
    layers, batches = 4, 12
    rows: list[tuple[Tensor, Tensor]] = [(torch.randn(16, 16), torch.randn(16, 16)) for _ in range(batches)]

    def feed(_: int, first: int) -> Iterator[Any]:
        yield from rows[first:]

    settings: dict[str, Any] = {"threads": 1}
    with open_world(launch, {}, replicas=2) as world:
        model = _equal_layers(layers)
        calls: Counter[str] = Counter()
        _count_small(calls)
        if world.rank:
            serve(model, world, place.device, feed=feed, **settings)
        else:
            pipe = DistributedPipeline(model, world, place.device, **settings)
            with pipe:
                pipe.begin_feed(0)
                before = calls["small"]
                pipe.run(rows)
                made = calls["small"] - before
        row, seconds = torch.zeros(20, dtype=torch.float64), []
        for _ in range(300):
            begin = perf_counter()
            dist.all_reduce(row)
            seconds.append(perf_counter() - begin)
    if world.rank:
        return {}
    return {"gloo_us": 1e6 * median(seconds), "small_per_layer_and_batch": made / (layers * batches)}


def _count_small(calls: Counter[str]) -> None:
    """Counts all-reduces of counts from now on: of few numbers in float64, which gradients never are here."""
    kind: Any = dist.ProcessGroup
    own = kind.allreduce

    def counted(self: Any, tensors: Any, *arguments: Any, **keywords: Any) -> Any:
        given = tensors if isinstance(tensors, list) else [tensors]
        calls["small"] += given[0].dtype is torch.float64
        return own(self, tensors, *arguments, **keywords)

    kind.allreduce = counted


def _equal_layers(count: int) -> ALPackage:
    torch.manual_seed(0)

    def layer() -> AL:
        return AL(ENC(nn.Linear(16, 16), nn.Linear(16, 16)), AE(nn.Linear(16, 16), nn.Linear(16, 16)))

    return ALPackage([layer() for _ in range(count)])


def _group_of_one(place: Place) -> None:
    backend = "gloo" if place.stand_in else "nccl"
    if not place.stand_in:
        torch.cuda.set_device(place.device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
