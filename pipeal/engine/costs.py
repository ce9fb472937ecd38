"""The placement that is fastest on this machine: sizes from the measured costs of layers, the rest by trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipeal.engine.blame import OnOom
from pipeal.engine.compiling import Compile
from pipeal.engine.device import Precision, parse_device
from pipeal.engine.gpus import layout_on_gpus
from pipeal.engine.measure import WARM_UP, before_the_clock, counted_of, layer_costs, uncollected
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.placement import balance, layers_of_stages
from pipeal.engine.schedule import Schedule, schedule_named
from pipeal.engine.threads import cores, threads_each
from pipeal.errors import PlacementError
from pipeal.outofmemory import is_out_of_memory
from pipeal.packet import TrainableLayer, layers_of


@dataclass(frozen=True)
class Placement:
    """Where layers go, and what a trial of it took.

    Attributes:
        devices: One device per stage.
        sizes: The number of layers of each stage.
        threads: Intra-op threads of each CPU worker.
        seconds_per_batch: Measured; None where nothing else was possible.
        stage_s: What the layers of each stage took per batch, alone on its device; None where that was not measured.
    """

    devices: list[str]
    sizes: list[int]
    threads: int
    seconds_per_batch: float | None = None
    stage_s: tuple[float, ...] | None = None

    def __str__(self) -> str:
        stages = " | ".join(f"{device} × {size}" for device, size in zip(self.devices, self.sizes, strict=True))
        return f"{stages} ({self.threads} thread{'s' if self.threads > 1 else ''} each)"


def place(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Sequence[Any],
    schedule: str | Schedule,
    *,
    devices: Sequence[str] | None = None,
    threads: int | None = None,
    queue_depth: int = 2,
    precision: Precision = "fp32",
    compile: Compile = "none",
    on_oom: OnOom = "raise",
    on_one_gpu: int | None = None,
    rounds: int = 2,
    on_trial: Callable[[Placement], None] | None = None,
    on_left_out: Callable[[Placement, Exception], None] | None = None,
) -> Placement:
    """The fastest placement on this machine's devices, by trying the candidates on a copy of the layers.

    On several GPUs the candidates are one stage on the first of them, and the layout that a plan would choose, which
    may be one stage on another, for what the layers cost on each kind of them, for their memory and the links between
    them (:mod:`pipeal.engine.gpus`); on a single GPU one stage, and one per layer, as streams. On a CPU they are one
    stage on all cores, on half of them, and so on down to one, since threads that share little work wait for each other
    longer than they work; and from two stages up to twice as many as there are cores, which are shared out among them.
    Stages are balanced by the measured costs of the layers, or by their number where all of them together do not fit
    into the memory of one device.

    Args:
        model: The layers; they are not changed.
        batches: A few real batches, as :meth:`Pipeline.run` takes.
        schedule: The schedule it is for.
        devices: Which may be used, of one kind: ``["cpu"]``, or some GPUs; None for all GPUs, or the CPU without any.
        threads: Intra-op threads of each CPU worker; None to try and to share the cores out.
        queue_depth: As for :class:`Pipeline`.
        precision: As for :class:`Pipeline`.
        compile: As for :class:`Pipeline`. Each trial compiles anew, before its time is taken.
        on_oom: As for :class:`Pipeline`. A loss that is not finite ends no trial.
        on_one_gpu: The most stages that may share a GPU; None for as many as there are layers.
        rounds: How often each candidate is tried, in turns; its best round counts.
        on_trial: Called with each candidate and its time.
        on_left_out: Called with each candidate for which memory does not suffice, and what was said of it.

    Raises:
        PlacementError: The devices are not here or not of one kind, or there are too few batches.
        OutOfMemoryError: It suffices for none.
    """
    layers = layers_of(model)
    schedule = schedule_named(schedule)
    usable = _usable(devices)
    home = usable[0]
    choices = _candidate_devices(len(layers), usable, on_one_gpu or len(layers))
    counts = _halves(cores()) if home == "cpu" and threads is None else [threads or threads_each([home], schedule)]
    if len(choices) == len(counts) == 1 and _are_alike(usable):
        return Placement(choices[0], [len(layers)], counts[0])
    counted_of(batches)
    totals: list[float] | None = None
    wide: Placement | None = None
    try:
        if len(usable) > 1:
            layout = layout_on_gpus(
                layers,
                batches,
                usable,
                schedule,
                queue_depth=queue_depth,
                precision=precision,
                compile=compile,
                on_oom=on_oom,
            )
            names = [usable[stage.devices[0]] for stage in layout.stages]
            alone = tuple(stage.seconds for stage in layout.stages)
            wide = Placement(names, layout.sizes, threads or threads_each(names, schedule), stage_s=alone)
        elif len(choices) > 1:
            costs = layer_costs(
                deepcopy(layers),
                batches,
                device=home,
                threads=threads or 1,
                precision=precision,
                compile=compile,
                on_oom=on_oom,
            )
            totals = [sum(cost.values()) for cost in costs]
    except PlacementError:
        if len(usable) < 2:
            raise
        # By what was counted nothing fits; whether that is so, the trials show.
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    one, *several = choices
    left = [_balanced(one, totals, len(layers), count) for count in counts]
    left += [_balanced(names, totals, len(layers), threads or threads_each(names, schedule)) for names in several]
    if wide is not None:
        left = left[:1] if wide.devices == [home] else [left[0], wide]
    elif not _are_alike(usable):  # perhaps since one of them is too small
        others = {torch.cuda.get_device_name(gpu): gpu for gpu in reversed(usable)}.values()
        left += [replace(left[0], devices=[gpu]) for gpu in others if gpu != home]
    best: dict[str, float] = {}
    for _ in range(rounds):
        for candidate in list(left):
            try:
                seconds = _trial(layers, batches, schedule, candidate, precision, compile, on_oom, queue_depth)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or len(left) == 1:
                    raise
                left.remove(candidate)
                if on_left_out is not None:
                    on_left_out(candidate, error)
            else:
                best[str(candidate)] = min(seconds, best.get(str(candidate), seconds))
    tried = [replace(candidate, seconds_per_batch=best[str(candidate)]) for candidate in left]
    for placement in tried:
        if on_trial is not None:
            on_trial(placement)
    return min(tried, key=lambda placement: placement.seconds_per_batch or 0.0)


def _balanced(devices: list[str], totals: Sequence[float] | None, layers: int, threads: int) -> Placement:
    sizes = balance([1.0] * layers if totals is None else totals, len(devices))
    alone = None
    if totals is not None:
        alone = tuple(sum(totals[layer] for layer in own) for own in layers_of_stages(sizes))
    return Placement(devices, sizes, threads, stage_s=alone)


def _halves(most: int) -> list[int]:
    """A number, half of it, and so on.

    >>> _halves(12)
    [12, 6, 3, 1]
    """
    return [most] if most == 1 else [most, *_halves(most // 2)]


def all_devices() -> list[str]:
    """All GPUs of this machine, or the CPU without any."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]


def _usable(wanted: Sequence[str] | None) -> list[str]:
    """The CPU, or different GPUs."""
    if wanted is None:
        return all_devices()
    names = list(dict.fromkeys(str(parse_device(name)) for name in wanted))
    if not names or (len(names) > 1 and "cpu" in names):
        raise PlacementError(f"found the devices {names} to choose among; expected 'cpu', or one or more GPUs")
    return names


def _are_alike(devices: Sequence[str]) -> bool:
    return len(devices) == 1 or len({torch.cuda.get_device_name(device) for device in devices}) == 1


def _candidate_devices(layers: int, usable: list[str], on_one_gpu: int) -> list[list[str]]:
    """One stage, and the numbers of stages that may help."""
    if len(usable) > 1:
        return [usable[:count] for count in sorted({1, min(len(usable), layers)})]
    if usable != ["cpu"]:
        return [usable * count for count in sorted({1, min(layers, on_one_gpu)})]
    return [["cpu"] * count for count in range(1, min(layers, 2 * cores()) + 1)] if cores() > 1 else [["cpu"]]


@uncollected()
def _trial(
    layers: list[TrainableLayer],
    batches: Sequence[Any],
    schedule: str | Schedule,
    candidate: Placement,
    precision: Precision,
    compile: Compile,
    on_oom: OnOom,
    queue_depth: int,
) -> float:
    """Seconds per batch of a candidate, on a copy."""
    with Pipeline(
        deepcopy(layers),
        candidate.devices,
        schedule,
        sizes=candidate.sizes,
        queue_depth=queue_depth,
        threads=candidate.threads,
        precision=precision,
        compile=compile,
        on_non_finite="ignore",
        on_oom=on_oom,
    ) as pipe:
        pipe.run(before_the_clock(batches, compile))
        pipe.run(batches[:WARM_UP])
        return pipe.run(batches[WARM_UP:]).seconds / (len(batches) - WARM_UP)
