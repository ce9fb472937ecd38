"""Predictions 3, 4, 5, 6 and 17, and waits: what the host spends where the GPU is quick."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import torch
from gpu import kernels_in, overlap
from torch import Tensor, nn

from gpu_smoke.place import Place
from gpu_smoke.predictions import OF_PIPEAL, Finding
from gpu_smoke.probes.models import NOTHING_SEEN, STAGES, data, package, pipeline
from pipeal import AE, AL, ENC, ALPackage, Pipeline
from pipeal.engine.devices.cpus import cores

THREADS = 4


def small_operators(place: Place) -> Finding:
    """Prediction 3. Additions of 16 numbers per second, by one thread and by four, each with a stream of its own."""
    seconds = 1.0 if not place.stand_in else 0.3
    _additions(place, 1, 0.1)
    one, four = (_additions(place, count, seconds) for count in (1, THREADS))
    alone, together = (_steps_per_second(place, stages) for stages in (1, STAGES))
    return Finding(
        verdict=four <= 1.2 * one,
        figure=f"{one:,.0f} additions of 16 numbers per second by one thread, {four:,.0f} by {THREADS} together",
        how=f"each thread on its own stream for {seconds:g} s; true up to 1.2 times as many",
        affected=together <= 1.2 * alone,
        affected_figure=f"transformer on small batches: {alone:,.1f} batches/s in one stage, {together:,.1f} in "
        f"{STAGES} stages of one GPU (affected up to 1.2 times as many)",
        figures={
            "additions_per_s_1_thread": one,
            "additions_per_s_4_threads": four,
            "pipeal_batches_per_s_1_stage": alone,
            "pipeal_batches_per_s_4_stages": together,
        },
    )


def optimizer_calls(place: Place) -> Finding:
    """Prediction 4. A layer of 16 small tensors in two optimizers: their own steps, one functional call, pipeal's."""
    sides = [nn.ParameterList(torch.randn(16, 16, device=place.device) for _ in range(8)) for _ in range(2)]
    optimizers = [torch.optim.Adam(side.parameters(), lr=1e-3, fused=True) for side in sides]
    parameters = [one for side in sides for one in side]
    gradients = [torch.randn_like(one) for one in parameters]

    def give() -> None:
        for one, gradient in zip(parameters, gradients, strict=True):
            one.grad = gradient

    def own_steps() -> None:
        give()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    own_steps()  # makes the states
    states = [optimizer.state[one] for optimizer, side in zip(optimizers, sides, strict=True) for one in side]
    means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    fixed: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}

    def one_call() -> None:
        with torch.no_grad():
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(parameters, gradients, means, squares, [], steps, amsgrad=False, maximize=False, **fixed)

    giving = place.host_us(give)
    two, one = place.host_us(own_steps) - giving, place.host_us(one_call)
    figures = {"two_optimizers_us": two, "functional_us": one}
    affected, seen = None, "not seen: pipeal.methods.fused.step_and_clear is not there"
    if (step_and_clear := _step_and_clear()) is not None:

        def ours() -> None:
            give()
            step_and_clear(optimizers)

        figures["pipeal_us"] = place.host_us(ours) - giving
        affected = figures["pipeal_us"] > two / 2
        seen = f"{figures['pipeal_us']:,.0f} µs for the same by pipeal (affected above half of two steps)"
    return Finding(
        verdict=two >= 3 * one,
        figure=f"two fused Adam steps and zero_grads of 8 small tensors each take {two:,.0f} µs of the host, one "
        f"functional call for all 16 takes {one:,.0f} µs",
        how="medians of 20 rounds of 20 calls, the GPU waited for in between; true from three times as long",
        affected=affected,
        affected_figure=seen,
        figures=figures,
    )


def events(place: Place) -> Finding:
    """Prediction 5. What six timed events and nine elapsed_time cost, and how many of them pipeal makes."""
    figures: dict[str, float] = {}
    verdict, figure = None, "not measured: there are no events without a GPU"
    if not place.stand_in:
        stream = torch.cuda.Stream()

        def one_layer() -> None:
            made = [stream.record_event(torch.cuda.Event(enable_timing=True)) for _ in range(6)]
            past.append(made)

        past: list[Any] = []
        making = place.host_us(one_layer)
        place.wait()
        done = past[-1]
        reading = place.host_us(lambda: [done[0].elapsed_time(done[number % 6]) for number in range(9)])
        figures |= {"six_events_us": making, "nine_elapsed_time_us": reading}
        verdict = making + reading >= 25
        figure = f"six timed events take {making:,.0f} µs of the host, nine elapsed_time {reading:,.0f} µs"
    layers, stages, count = 8, 2, place.size(40, 8)
    model, batches = _small_model(place, layers), _small_batches(place, count)
    with Pipeline(model, [place.device] * stages) as pipe:
        pipe.run(batches[:4])
        with _counted_events() as calls:
            pipe.run(batches)
    each = {name: calls[name] / (layers * count) for name in ("record", "elapsed_time") if name in calls}
    counted = len(each) == 2
    figures |= {f"pipeal_{name}_per_layer_and_batch": value for name, value in each.items()}
    return Finding(
        verdict=verdict,
        figure=figure,
        how="medians of 20 rounds of 20; true from 25 µs together",
        affected=each["elapsed_time"] >= 4.5 if counted else None,
        affected_figure=f"untraced, {layers} layers in {stages} stages: {each['record']:.1f} events and "
        f"{each['elapsed_time']:.1f} elapsed_time per layer and batch (affected from 4.5 elapsed_time)"
        if counted
        else "not seen: this PyTorch's events have methods that cannot be counted",
        not_tested="events are CUDA's" if verdict is None else "",
        figures=figures,
    )


class Slow(nn.Module):
    """A block whose host sleeps, and whose device has next to nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        early = self.map(x)
        sleep(5e-3)
        return early + 1


def busy_share(place: Place) -> Finding:
    """Prediction 6. A layer whose host sleeps within the forward: what the report says, and what kernels did."""
    side = AE(nn.Linear(16, 16), nn.Linear(16, 16))
    model = ALPackage([AL(ENC(Slow(), nn.Linear(16, 16)), side)])
    batches = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(20)]
    with Pipeline(model, [place.device]) as pipe:
        pipe.run(batches[:3])
        with torch.profiler.profile(activities=_activities(place)) as seen:
            report = pipe.run(batches)
    share, told = max(report.busy_share), [one for one in report.kernel_share if one is not None]
    claimed = max(told, default=share)
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        seen.export_chrome_trace(str(trace))
        seen_kernels = kernels_in(trace)
    kernels = overlap(seen_kernels).busy
    return Finding(
        verdict=None,
        figure=f"the report's host-open share is {share:.0%} while kernels ran {kernels:.1%} of the time",
        how="a layer that sleeps 5 ms on the host in each forward; kernels by PyTorch's profiler",
        affected=abs(claimed - kernels) > 0.1 if seen_kernels else None,
        affected_figure=f"the report has kernels run {claimed:.1%} of the time"
        + ("" if told else ", having one figure for host and kernels")
        + " (affected where that is off by more than 10 % of the time)",
        not_tested=OF_PIPEAL if seen_kernels else NOTHING_SEEN,
        figures={"busy_share": share, "kernel_share": claimed, "kernels_ran": kernels},
    )


def intra_op_threads(place: Place) -> Finding:
    """Prediction 17. How many intra-op threads a pipeline takes whose stages are all on a GPU."""
    with pipeline(place, package(place, "transformer")) as pipe:
        pipe.run(data(place, "transformer", 2))
        found = pipe.threads or 1  # None where no stage is on a CPU: their workers have one each
    os_threads = _threads_of_process()
    return Finding(
        verdict=None,
        figure=f"a pipeline of {STAGES} stages on a GPU takes {found} intra-op threads on {cores()} cores; the process "
        f"then has {os_threads} threads of all kinds",
        how="what the open pipeline says",
        affected=found > 1 if cores() > 1 else None,
        affected_figure=f"{found} threads (affected above one)",
        not_tested=OF_PIPEAL if cores() > 1 else "this process has one core",
        figures={"pipeal_threads": found, "cores": cores(), "threads_of_process": os_threads},
    )


def waits(place: Place) -> Finding:
    """How often the host waits for the GPU while batches are submitted, by PyTorch's own check."""
    figures: dict[str, float] = {}
    for name in ("transformer", "resnet"):
        batches = data(place, name, place.size(12, 4))
        with pipeline(place, package(place, name)) as pipe:
            pipe.run(batches[:4])
            with warnings.catch_warnings(record=True) as caught, _warned_of_waits(place):
                warnings.simplefilter("always")
                begin = perf_counter()
                for x, y in batches:
                    pipe.submit(x, y)
                submitted = perf_counter() - begin
            pipe.drain()
        found = [one for one in caught if "synchroniz" in str(one.message)]
        figures[f"{name}_waits_per_batch"] = len(found) / len(batches)
        figures[f"{name}_submitted_ms_per_batch"] = 1e3 * submitted / len(batches)
    said = "; ".join(f"{name.replace('_', ' ')} {value:,.2f}" for name, value in figures.items())
    return Finding(None, said, "torch.cuda.set_sync_debug_mode('warn') while batches are submitted", figures=figures)


def _additions(place: Place, threads: int, seconds: float) -> float:
    """Additions per second of all threads together."""
    ready, counts = threading.Barrier(threads), [0] * threads

    def work(number: int) -> None:
        with nullcontext() if place.stand_in else torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(16, device=place.device)
            x.add_(1)
            ready.wait(10.0)  # for a thread that raised before
            until = perf_counter() + seconds
            while perf_counter() < until:
                for _ in range(200):
                    x.add_(1)
                counts[number] += 200
                if not place.stand_in:
                    torch.cuda.current_stream().synchronize()

    with ThreadPoolExecutor(threads) as pool:
        # A thread that raised would have made fewer additions, and the prediction look true.
        for worker in [pool.submit(work, number) for number in range(threads)]:
            worker.result()
    return sum(counts) / seconds


def _steps_per_second(place: Place, stages: int) -> float:
    batches = data(place, "transformer", size="small-batches")
    schedule = "pipelined" if stages > 1 else "sequential"
    with pipeline(place, package(place, "transformer"), stages, schedule, threads=1) as pipe:
        pipe.run(batches[:3])
        rounds = [pipe.run(batches * place.size(3, 1)) for _ in range(3)]
    return median(report.batches / report.seconds for report in rounds)


def _step_and_clear() -> Callable[[Any], None] | None:
    try:
        from pipeal.methods.fused import step_and_clear
    except ImportError:
        return None
    return step_and_clear


def _small_model(place: Place, layers: int) -> ALPackage:
    torch.manual_seed(0)

    def layer() -> AL:
        return AL(ENC(nn.Linear(16, 16), nn.Linear(16, 16)), AE(nn.Linear(16, 16), nn.Linear(16, 16)))

    return ALPackage([layer() for _ in range(layers)]).to(place.device)


def _small_batches(place: Place, count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 16, device=place.device), torch.randn(8, 16, device=place.device)) for _ in range(count)]


@contextmanager
def _counted_events() -> Iterator[Counter[str]]:
    """Counts what is asked of CUDA's events within it; a method that cannot be counted has no count."""
    kind: Any = torch.cuda.Event
    kept = {name: kind.__dict__[name] for name in ("record", "elapsed_time") if name in kind.__dict__}
    calls = Counter(dict.fromkeys(kept, 0))

    def counting(name: str, function: Any) -> Any:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **keywords)

        return counted

    for name, function in kept.items():
        setattr(kind, name, counting(name, function))
    try:
        yield calls
    finally:
        for name, function in kept.items():
            setattr(kind, name, function)


def _activities(place: Place) -> list[Any]:
    kinds = torch.profiler.ProfilerActivity
    return [kinds.CPU] if place.stand_in else [kinds.CUDA]


@contextmanager
def _warned_of_waits(place: Place) -> Iterator[None]:
    if place.stand_in:
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _threads_of_process() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))
