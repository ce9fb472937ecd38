"""Predictions 8, 10 and 15: how many kernels there are, and what they wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_smoke.place import Place, apart
from gpu_smoke.predictions import OF_PIPEAL, Finding
from gpu_smoke.probes.models import NOTHING_SEEN, STAGES, data, package, pipeline
from pipeal import Dropout

QUEUE = 1024
STREAMS = 16


def dropout(place: Place) -> Finding:
    """Prediction 8. Kernels of a forward, what it keeps for the backward, and the time of both: pipeal's, PyTorch's."""
    kind = torch.float32 if place.stand_in else torch.bfloat16
    x = torch.randn(place.size(2**23, 2**12), device=place.device, dtype=kind, requires_grad=True)
    figures: dict[str, float] = {}
    for name, module in (("pipeal", Dropout(0.3)), ("torch", nn.Dropout(0.3))):
        figures |= {f"{name}_{what}": value for what, value in _costs(place, module.train(), x).items()}
    as_predicted = figures["pipeal_kernels"] >= 4 and figures["pipeal_mask_bytes"] >= x.element_size()
    return Finding(
        verdict=None,
        figure=f"pipeal's dropout launches {figures['pipeal_kernels']:.0f} kernels forward and keeps a mask of "
        f"{figures['pipeal_mask_bytes']:.0f} bytes an element, PyTorch's {figures['torch_kernels']:.0f} and "
        f"{figures['torch_mask_bytes']:.0f}; forward and backward of {x.numel():,} elements take "
        f"{figures['pipeal_us']:,.0f} and {figures['torch_us']:,.0f} µs",
        how="by PyTorch's profiler; affected from four kernels and a mask as wide as the activation",
        affected=as_predicted if figures["torch_kernels"] else None,
        affected_figure="as above",
        not_tested=OF_PIPEAL if figures["torch_kernels"] else NOTHING_SEEN,
        figures=figures,
    )


def _costs(place: Place, module: nn.Module, x: Tensor) -> dict[str, float]:
    kept: list[Tensor] = []

    def keep(one: Tensor) -> Tensor:
        kept.append(one)
        return one

    with saved_tensors_hooks(keep, lambda one: one):
        module(x)
    return {
        "kernels": _launched(place, lambda: module(x)),
        "mask_bytes": max((one.element_size() for one in kept if one.numel() == x.numel()), default=0),
        "us": 1e6 * min(place.seconds(lambda: module(x).sum().backward()) for _ in range(10)),
    }


def connections(place: Place) -> Finding:
    """Prediction 10. Sixteen streams of two short kernels each, with 8 connections and with 32."""
    few, many = (
        apart(f"{__name__}:in_many_streams", place, {"CUDA_DEVICE_MAX_CONNECTIONS": count}) for count in ("8", "32")
    )
    ours = under_pipeal(place)  # the first that this process asks of CUDA
    figures = {"ms_8_connections": 1e3 * few, "ms_32_connections": 1e3 * many, "pipeal_ms": 1e3 * ours}
    return Finding(
        verdict=few >= 1.3 * many,
        figure=f"{STREAMS} streams of two kernels of 20 ms each end after {1e3 * few:,.0f} ms with 8 connections, "
        f"after {1e3 * many:,.0f} ms with 32",
        how="each in a process of its own, kernels of one thread, best of three; true from 1.3 times as long",
        affected=ours >= 1.3 * many,
        affected_figure=f"{1e3 * ours:,.0f} ms in a process that has opened a pipeline first",
        figures=figures,
    )


def in_many_streams(place: Place) -> float:
    """Seconds until kernels that only take time have ended in many streams, given stream by stream."""
    if place.stand_in:
        return place.seconds(lambda: torch.ones(8) + 1)
    cycles = _cycles(0.02)
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]

    def work() -> None:
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
                torch.cuda._sleep(cycles)

    return min(place.seconds(work) for _ in range(3))


def under_pipeal(place: Place) -> float:
    """The same where pipeal was there before CUDA started."""
    with pipeline(place, package(place, "transformer")) as pipe:
        pipe.run(data(place, "transformer", 1))
    return in_many_streams(place)


def queued_launches(place: Place) -> Finding:
    """Prediction 15. Launches behind a long kernel until one blocks, another thread's meanwhile, and pipeal's."""
    depth, other_s = _fill_queue(place)
    per_batch, blocked = _launches_of_training(place)
    figures = {
        "launches_until_blocked": float(depth),
        "other_thread_longest_ms": 1e3 * other_s,
        "pipeal_launches_per_stage_and_batch": per_batch,
        "pipeal_share_of_time_in_blocked_launches": blocked,
    }
    return Finding(
        verdict=0 < depth <= 1.1 * QUEUE and other_s >= 0.05,
        figure=f"behind a kernel of half a second launch {depth:,} is the first to take more than 10 ms (0: none of "
        f"{3 * QUEUE:,}); the longest launch of another thread on another stream then takes {1e3 * other_s:,.0f} ms",
        how="small additions, one by one; true where a launch up to number 1,126 blocks and another thread's takes "
        "50 ms or more meanwhile",
        affected=blocked >= 0.02 if per_batch else None,
        affected_figure=f"resnet in {STAGES} stages: {per_batch:,.0f} launches per stage and batch; launches of more "
        f"than 1 ms make {blocked:.1%} of the time (affected from 2 %)"
        if per_batch
        else NOTHING_SEEN,
        figures=figures,
    )


def _launched(place: Place, work: Callable[[], object]) -> int:
    """Kernels of a call; on a CPU its operators that compute something."""
    if place.stand_in:
        with _Operators() as seen:
            work()
        return seen.count
    work()
    place.wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        place.wait()
    return sum(event.device_type == DeviceType.CUDA and is_kernel(event.name) for event in profile.events() or ())


def is_kernel(name: str) -> bool:
    """Whether that is what runs, rather than a copy; PyTorch's own kernels have ``memory::`` in their names."""
    return not name.startswith(("Memcpy", "Memset"))


class _Operators(TorchDispatchMode):
    """Counts operators, without those that only look at memory another way."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = str(function)
        self.count += not any(part in name for part in ("view", "empty", "detach", "slice"))
        return function(*arguments, **(keywords or {}))


def _cycles(seconds: float) -> int:
    """Of the GPU's clock, as it goes under load."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    tried = 20_000_000
    for _ in range(3):
        begin.record()
        torch.cuda._sleep(tried)
        end.record()
        end.synchronize()
    return int(tried * seconds / (begin.elapsed_time(end) / 1e3))


def _fill_queue(place: Place) -> tuple[int, float]:
    """The number of the first launch that blocks, and the longest one of another thread meanwhile, in seconds."""
    x, other = (torch.ones(16, device=place.device) for _ in range(2))
    place.wait()
    longest, filling = [0.0], threading.Event()

    def beside() -> None:
        with _own_stream(place):
            other.add_(1)
            filling.wait()
            while filling.is_set():
                begin = perf_counter()
                other.add_(1)
                longest[0] = max(longest[0], perf_counter() - begin)
                sleep(2e-3)  # few enough that its own queue never fills

    thread = threading.Thread(target=beside)
    thread.start()
    blocked = 0
    with _own_stream(place):
        x.add_(1)  # loads the kernel
        if not place.stand_in:
            torch.cuda._sleep(_cycles(0.5))
        filling.set()
        for number in range(1, 3 * QUEUE + 1):
            begin = perf_counter()
            x.add_(1)
            if perf_counter() - begin > 1e-2:
                blocked = number
                break
        filling.clear()
    thread.join()
    place.wait()
    return blocked, longest[0]


@contextmanager
def _own_stream(place: Place) -> Iterator[None]:
    if place.stand_in:
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def _launches_of_training(place: Place) -> tuple[float, float]:
    """Of resnet: launches per stage and batch, and the share of the time in which a stage's host was in a long one."""
    count = place.size(10, 2)
    batches = data(place, "resnet", count)
    with pipeline(place, package(place, "resnet")) as pipe:
        pipe.run(batches[:3])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *_cuda(place)]) as profile:
            seconds = pipe.run(batches).seconds
    launches = [event for event in profile.events() or () if event.name.startswith("cudaLaunchKernel")]
    long_us = sum(event.cpu_time_total for event in launches if event.cpu_time_total > 1_000)
    return len(launches) / count / STAGES, long_us / 1e6 / STAGES / seconds


def _cuda(place: Place) -> list[Any]:
    return [] if place.stand_in else [torch.profiler.ProfilerActivity.CUDA]
