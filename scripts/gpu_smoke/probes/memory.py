"""Predictions 7, 12 and 16, and training: memory of the GPU, and of its host."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gpu_smoke.place import Place, apart
from gpu_smoke.predictions import Finding
from gpu_smoke.probes.models import STAGES, data, package, pipeline
from gpu_smoke.probes.nvml import free_bytes
from pipeal import AE, AL, ENC, ALPackage, Pipeline
from pipeal.engine.devices import make_current

MIB = 2**20


def workspaces(place: Place) -> Finding:
    """Prediction 7. What a first matrix product in a new stream leaves allocated, and peaks of 10 and 80 batches."""
    a = torch.randn(256, 256, device=place.device)
    torch.mm(a, a)
    grown = []
    for _ in range(4):
        before = _allocated(place)
        _product_in_new_stream(place, a)
        grown.append((_allocated(place) - before) / MIB)
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    before = _allocated(place)
    if clear is not None and not place.stand_in:
        clear()
    cleared = (before - _allocated(place)) / MIB
    few, many = (_peak(place, place.size(count, 4)) for count in (10, 80))
    ratio = many / few if few else 0.0
    return Finding(
        verdict=median(grown) >= 30,
        figure=f"{median(grown):,.1f} MiB stay allocated after the first product in each new stream; clearing them "
        f"gives {cleared:,.1f} MiB back",
        how="256 × 256 float32 in four new streams, median; true from 30 MiB",
        affected=ratio > 1.25,
        affected_figure=f"in a process of its own, 80 batches peak at {many:,.0f} MiB, 10 batches at {few:,.0f} MiB, "
        f"{ratio:.2f} times (affected above 1.25)",
        figures={"mib_per_stream": median(grown), "mib_cleared": cleared, "peak_mib_10": few, "peak_mib_80": many},
    )


def first_gpu(place: Place) -> Finding:
    """Prediction 12. What a process that trains on the second GPU takes on the first; else what a context takes."""
    context_mib = context(place)
    gpus = 0 if place.stand_in else torch.cuda.device_count()
    figures, how = {"context_mib": context_mib}, "free memory of cuda:0 as the driver has it; true from 100 MiB"
    figure = f"a context alone takes {context_mib:,.0f} MiB"
    if gpus < 2:
        return Finding(None, figure, how, not_tested=f"needs two GPUs, found {gpus}", figures=figures)
    before = free_bytes(0)  # this process has its context there by now
    for name in ("bare", "plain", "rank"):
        figures[f"{name}_mib_on_first"] = (before - apart(f"{__name__}:{name}_on_second", place)) / MIB
    return Finding(
        verdict=figures["bare_mib_on_first"] >= 100,
        figure=f"a process that only names cuda:1 takes {figures['bare_mib_on_first']:,.0f} MiB of cuda:0; {figure}",
        how=how,
        affected=figures["rank_mib_on_first"] >= 100,
        affected_figure=f"with cuda:1 made current, as ranks do, a pipeline on it takes "
        f"{figures['rank_mib_on_first']:,.0f} MiB of cuda:0 (affected from 100 MiB); without, as at a prompt, "
        f"{figures['plain_mib_on_first']:,.0f} MiB",
        figures=figures,
    )


def context(place: Place) -> float:
    """What this process takes with nothing but a context, in MiB."""
    if place.stand_in:
        return 0.0
    before = free_bytes(0)
    torch.ones(1, device=place.device)
    torch.cuda.synchronize()
    return (before - free_bytes(0)) / MIB


def bare_on_second(_: Place) -> int:
    """What is free on the first GPU, in bytes, while this process has used the second alone."""
    x = torch.randn(256, 256, device="cuda:1")
    torch.mm(x, x).sum().item()
    return free_bytes(0)


def rank_on_second(place: Place) -> int:
    """As :func:`plain_on_second`, with the GPU made current first, as a rank of a distributed pipeline does."""
    make_current("cuda:1")
    return plain_on_second(place)


def plain_on_second(_: Place) -> int:
    """As :func:`bare_on_second`, after a pipeline on the second GPU has trained."""
    with Pipeline(_equal_layers(2), ["cuda:1"] * 2) as pipe:
        pipe.run([(torch.randn(64, 64), torch.randn(64, 16)) for _ in range(4)])
    return free_bytes(0)


def snapshots(place: Place) -> Finding:
    """Prediction 16. A pipeline's first snapshots; pinned memory asked for tensor by tensor, at first and again."""
    batches = data(place, "transformer", 4)
    with pipeline(place, package(place, "transformer")) as pipe:
        pipe.run(batches)
        waits = []
        for _ in range(4):
            pipe.run(batches[:1])
            begin = perf_counter()
            pipe.snapshot().wait(60)
            waits.append(perf_counter() - begin)
    later = median(waits[1:])
    # In another process: what was asked for once is kept, for this one's pipeline as well.
    first, second, size, count = apart(f"{__name__}:pinned", place)
    return Finding(
        verdict=first >= 0.1 and first >= 3 * second,
        figure=f"{1e3 * first:,.0f} ms to ask for {size:,.0f} MiB of pinned memory in {count:.0f} tensors, "
        f"{1e3 * second:,.0f} ms again",
        how="transformer of published size with two moments each; true from 100 ms and three times the second",
        affected=waits[0] - later >= 0.1,
        affected_figure=f"the first snapshot is there after {1e3 * waits[0]:,.0f} ms, later ones after "
        f"{1e3 * later:,.0f} ms (affected from 100 ms more)",
        figures={
            "pinned_first_ms": 1e3 * first,
            "pinned_again_ms": 1e3 * second,
            "pipeal_first_snapshot_ms": 1e3 * waits[0],
            "pipeal_later_snapshot_ms": 1e3 * later,
        },
    )


def pinned(place: Place) -> tuple[float, float, float, float]:
    """Seconds to ask for tensors as a transformer and its optimizers have them, and again; in MiB, and how many."""
    shapes = [one.shape for one in package(place, "transformer").parameters() for _ in range(3)]
    if not place.stand_in:
        torch.empty(1, pin_memory=True)  # CUDA has begun
    first, second = _pinned(place, shapes), _pinned(place, shapes)
    return first, second, sum(shape.numel() for shape in shapes) * 4 / MIB, len(shapes)


def training(place: Place) -> Finding:
    """What training takes of the GPU: tensors, what the allocator keeps, and all that the driver gave."""
    figures: dict[str, float] = {}
    for name in ("transformer", "resnet"):
        for form, stages in (("bp", 1), ("al", 1), ("al", STAGES)):
            batches = data(place, name, place.size(8, 2))
            what = f"{name}_{form}_{stages}"
            if not place.stand_in:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            schedule = "pipelined" if stages > 1 else "sequential"
            with pipeline(place, package(place, name, form), stages, schedule) as pipe:
                pipe.run(batches)
                if not place.stand_in:
                    free, total = torch.cuda.mem_get_info()
                    figures[f"{what}_allocated_mib"] = torch.cuda.max_memory_allocated() / MIB
                    figures[f"{what}_reserved_mib"] = torch.cuda.max_memory_reserved() / MIB
                    figures[f"{what}_driver_mib"] = (total - free) / MIB
    said = "; ".join(f"{name} {value:,.0f}" for name, value in figures.items())
    return Finding(
        None,
        said or "nothing: there is no GPU",
        "peaks of 8 batches of 256, by form and stages; of the driver, everything that is not free",
        figures=figures,
    )


def _allocated(place: Place) -> int:
    place.wait()
    return 0 if place.stand_in else torch.cuda.memory_allocated()


def _product_in_new_stream(place: Place, a: Tensor) -> None:
    if place.stand_in:
        torch.mm(a, a)
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.mm(a, a)


def _equal_layers(count: int) -> ALPackage:
    torch.manual_seed(0)

    def layer() -> AL:
        f = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
        return AL(ENC(f, nn.Linear(64, 16)), AE(nn.Linear(16, 16), nn.Linear(16, 16)))

    return ALPackage([layer() for _ in range(count)])


def _peak(place: Place, count: int) -> float:
    """As the test of memory over batches measures it, which drops workspaces of other tests first, in MiB."""
    one = torch.randn(place.size(4096, 64), 64), torch.randn(place.size(4096, 64), 16)
    with Pipeline(_equal_layers(4), [place.device] * 4, queue_depth=2) as pipe:
        pipe.run([one] * 4)
        if not place.stand_in:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        pipe.run([one] * count)
    return 0.0 if place.stand_in else torch.cuda.max_memory_allocated() / MIB


def _pinned(place: Place, shapes: list[Any]) -> float:
    """Seconds to ask for tensors of such shapes, all of which are then let go of."""
    begin = perf_counter()
    held = [torch.empty(shape, pin_memory=not place.stand_in) for shape in shapes]
    seconds = perf_counter() - begin
    del held
    return seconds
