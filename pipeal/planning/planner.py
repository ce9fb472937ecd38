"""The fastest placement on this machine: which are candidates, and what a user says to find it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn

from pipeal.core.errors import DataError, PlacementError
from pipeal.core.modules import layers_of, module_of
from pipeal.core.options import DEFAULTS, EngineOptions, with_keywords
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.core.partition import balance, balance_rows
from pipeal.core.protocols import TrainableLayer
from pipeal.core.samples import iterate, pair_of
from pipeal.core.tree import move
from pipeal.engine.checks import require_layers
from pipeal.engine.devices import all_devices, device_names, parse_device
from pipeal.engine.devices.cpus import cores, is_busy, omp_threads
from pipeal.engine.devices.threads import threads_each
from pipeal.engine.schedule import Schedule, schedule_named
from pipeal.engine.sizes import check_sizes, layers_of_stages
from pipeal.planning.measure.gpus import layout_on_gpus
from pipeal.planning.measure.layers import WARM_UP, counted_of, layer_costs
from pipeal.planning.placement import Placement
from pipeal.planning.pure.trials import MOST, TimeLimit
from pipeal.planning.search import Search, TrialOptions

TRIAL_BATCHES = WARM_UP + MOST
"""So many batches are drawn, and each candidate is tried on all of them."""

_FOR_LAYERS = 0.25
"""Of the time that trials may take, the share in which layers are measured one by one, if they can be."""

_log = logging.getLogger(__name__)

_BY_NUMBER = "layers are divided by number: memory does not suffice to measure them"


def plan(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Iterable[Any],
    schedule: str | Schedule = "pipelined",
    *,
    devices: str | None = None,
    on_trial: Callable[[Placement], None] | None = None,
    options: EngineOptions | None = None,
    **keywords: Any,
) -> Placement:
    """The fastest placement of a model on this machine, by trial of some on a copy of its layers.

    With ``offload`` nothing is tried, since memory need not suffice for a copy: see :func:`estimate`.

    ::

        placement = pipeal.plan(package, batches)
        print(placement)                                   # cpu: 2 layers | cpu: 1 layer (1 thread each)
        with pipeal.Pipeline(package, placement) as pipe:
            pipe.run(batches)

    Args:
        model: As for :class:`pipeal.Pipeline`; it is not changed.
        batches: Pairs ``(x, y)``, or objects with attributes ``x`` and ``y``. The first :data:`TRIAL_BATCHES` are
            drawn, which are gone from an iterator; fewer are gone through several times.
        schedule: The schedule it is for.
        devices: Which may be used: ``"cpu"``, or GPUs such as ``"cuda:0,cuda:1"``; None, or ``"auto"``, for all
            GPUs, or the CPU without any.
        on_trial: Called with each candidate and its time.
        options: Give the pipeline the same. Where they leave ``threads`` open, several numbers are tried.
        keywords: As for :class:`pipeal.Pipeline`.

    Returns:
        What the ``devices`` of a pipeline takes: devices, sizes of stages, and threads.

    Raises:
        DataError: There are no batches, or one is no pair.
        PlacementError: The devices are not here, or not of one kind; or the model has no layers.
        OutOfMemoryError: Memory suffices for no placement.
    """
    few = [pair_of(batch) for batch in islice(iterate(batches), TRIAL_BATCHES)]
    if not few:
        raise DataError("found no batches to plan with; expected at least one")
    return place(
        model,
        list(islice(cycle(few), TRIAL_BATCHES)),
        schedule,
        with_keywords(options, keywords),
        devices=None if devices in (None, "auto") else device_names(devices),
        **({} if on_trial is None else {"on_trial": on_trial}),
    )


def place(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Sequence[Any],
    schedule: str | Schedule,
    options: EngineOptions = DEFAULTS,
    *,
    devices: Sequence[str] | None = None,
    **search_options: Any,
) -> Placement:
    """The fastest placement on this machine's devices, by trying the candidates on a copy of the layers.

    On several GPUs the candidates are one stage on the first of them, and the layout that a plan would choose, which
    may be one stage on another, for what the layers cost on each kind of them, for their memory and the links between
    them (:mod:`pipeal.planning.measure.gpus`); on a single GPU one stage, and one per layer, as streams. On a CPU they
    are one stage on all cores, on half of them, and so on down to one, since threads that share little work wait for
    each other longer than they work; and from two stages up to twice as many as there are cores, which are shared out
    among them, the fastest of these with half its threads as well, and so on while that helps.
    One stage is tried first. The others are balanced by what the layers took in it, or by their number where all of
    them together do not fit into the memory of one device. How many candidates are tried, and on how many batches, is
    bounded by time
    (:mod:`pipeal.planning.pure.trials`).

    Args:
        model: The layers; they are not changed.
        batches: A few real batches, as :meth:`Pipeline.run` takes.
        schedule: The schedule it is for.
        options: How the layers will be run; threads that are left open are tried. Each trial compiles again, before its
            time is taken; layers are measured, to balance stages, as they are. A loss that is not finite ends no trial.
        devices: Which may be used, of one kind: ``["cpu"]``, or some GPUs; None for all GPUs, or the CPU without any.
        search_options: As for :class:`TrialOptions`.

    Raises:
        PlacementError: The devices are not here or not of one kind, or there are too few batches, or no layers.
        OutOfMemoryError: It suffices for none.
    """
    layers = layers_of(model)
    require_layers(layers)
    schedule = schedule_named(schedule).within(options.within_stage)
    usable = _usable(devices)
    if options.offload != "none":
        return estimate(layers, usable[: len(layers)], schedule, options)
    counts = _thread_counts(usable, schedule, options)
    choices = _candidate_devices(len(layers), usable)
    if len(choices) == len(counts) == len({_kind(device) for device in usable}) == 1:
        return Placement(choices[0], [len(layers)], counts[0])
    counted_of(batches)
    search = Search(layers, batches, schedule, options, TrialOptions(**search_options))
    search.trials.run(_candidates(search, usable, choices, counts), len(counts) + len(choices) - 1)
    if usable == ["cpu"] and options.threads is None:
        search.try_fewer_threads()
    return search.taken()


def fit(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Sequence[Any],
    schedule: str | Schedule,
    devices: Sequence[str],
    options: EngineOptions = DEFAULTS,
    *,
    sizes: Sequence[int] | None = None,
    parts: Sequence[TrainableLayer] | None = None,
    **search_options: Any,
) -> Placement:
    """Stages of equal cost on the devices that a user named, and the threads that are fastest there.

    Layers are measured on a device of each kind, on copies. Threads are tried as :func:`place` tries them: from the
    share that each stage has of the cores, down by halves while that helps. Both are bounded by time.

    Args:
        model: The layers; they are not changed.
        batches: A few real batches, as :meth:`Pipeline.run` takes.
        schedule: The schedule it is for.
        devices: One for each stage.
        options: As for :func:`place`.
        sizes: The layers, or blocks, of each; None for equal cost, and for equal numbers where memory does not suffice
            to measure it.
        parts: What a single layer that is to be spread over the devices is divided into, to be measured.
        search_options: As for :class:`TrialOptions`.

    Raises:
        PlacementError: Devices, sizes and layers do not fit, or there are too few batches.
        OutOfMemoryError: It does not suffice.
    """
    layers = layers_of(model)
    units = layers if parts is None else list(parts)
    schedule = schedule_named(schedule).within(options.within_stage)
    if options.offload != "none":
        return estimate(layers, devices, schedule, options, sizes=sizes, parts=parts)
    search = Search(layers, batches, schedule, options, TrialOptions(**search_options))
    names, alone = list(devices), None
    if sizes is None:
        sizes, alone = _equal_cost(search, names, units)
    settled = replace(estimate(layers, names, schedule, options, sizes=sizes, parts=parts), stage_s=alone)
    share = settled.threads
    if options.threads is not None or share == 1 or not any(parse_device(name).type == "cpu" for name in names):
        return settled
    search.trials.run([settled, replace(settled, threads=share // 2)], 2)
    search.try_fewer_threads()
    return search.taken()


def balance_one_by_one(
    layers: Iterable[TrainableLayer],
    count: int,
    batches: Sequence[Any],
    stages: int,
    options: EngineOptions = DEFAULTS,
    *,
    device: str = "cpu",
) -> list[int]:
    """Sizes of stages of equal cost on like devices; no more than one layer is here at a time.

    Args:
        layers: Each is measured on what the one before hands on, trained by that, and let go of before the next is
            asked for.
        count: How many there are.
        batches: As for :func:`fit`.
        stages: How many.
        options: As for :func:`place`.
        device: Where to measure.

    Raises:
        PlacementError: There are fewer layers than stages, or too few batches.
    """
    limit, seconds = TimeLimit(), list[float]()
    here, options = torch.device(device), replace(options, compile="none", offload="none")
    try:
        for layer in layers:
            until = limit.bound_s * _FOR_LAYERS * (len(seconds) + 1) / count
            (cost,) = layer_costs([layer], batches, options, device=device, goes_on=lambda: limit.spent_s < until)  # noqa: B023
            seconds.append(sum(cost.values()))
            if limit.spent_s > until:  # as few as will do
                batches = batches[: WARM_UP + 1]
            with torch.no_grad():
                batches = [layer(*move(pair_of(batch), here)) for batch in batches]
            del layer
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _log.info(_BY_NUMBER)
        return balance([1.0] * count, stages)
    return balance(seconds, stages)


def estimate(
    layers: Sequence[TrainableLayer],
    devices: Sequence[str],
    schedule: Schedule,
    options: EngineOptions,
    *,
    sizes: Sequence[int] | None = None,
    parts: Sequence[TrainableLayer] | None = None,
) -> Placement:
    """A stage on each device, of layers of about equally many weights together; nothing is tried.

    Without sizes it is for layers that are offloaded, which may be on the meta device here: a trial would hold copies
    of all. As many bytes of a layer come and go as it has weights, and its products grow with them. On a CPU one
    stage, unless more are named, since each stage has a layer in memory.

    Args:
        layers: Of the model.
        devices: One for each stage.
        schedule: The schedule it is for.
        options: As for :func:`place`.
        sizes: As for :func:`fit`, as is ``parts``.

    Raises:
        PlacementError: Devices, sizes and layers do not fit.
    """
    units = layers if parts is None else parts
    names = list(devices)
    if sizes is None:
        weights = [sum(weight.numel() for weight in module_of(unit).parameters()) for unit in units]
        found = balance([1.0 + count for count in weights], len(names))
    else:
        found = check_sizes(sizes, len(units), len(names))
    row = parts is not None and len(names) > 1
    return Placement(names, found, threads_each(names[:1] if row else names, schedule, options.threads))


def _equal_cost(
    search: Search, names: list[str], units: Sequence[TrainableLayer]
) -> tuple[list[int], tuple[float, ...] | None]:
    """Sizes of stages of equal cost, and what each of these takes alone; by number where that cannot be measured."""
    evenly = balance([1.0] * len(units), len(names))
    if not 1 < len(names) < len(units):
        return evenly, None
    try:
        by_kind = {kind: search.costs_on(name, units) for kind, name in {_kind(name): name for name in names}.items()}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        search.step(_BY_NUMBER)
        return evenly, None
    rows = [[sum(cost.values()) for cost in by_kind[_kind(name)]] for name in names]
    sizes = balance_rows(rows)
    stages = zip(rows, layers_of_stages(sizes), strict=True)
    return sizes, tuple(sum(row[own.start : own.stop]) for row, own in stages)


def _candidates(
    search: Search, usable: Sequence[str], choices: Sequence[list[str]], counts: Sequence[int]
) -> Iterator[Placement]:
    """What is tried, one stage first: what its layers take there balances the stages of the others."""
    one, *several = choices
    whole = [len(search.layers)]
    yield Placement(one, whole, counts[0])
    if len(usable) > 1:
        yield from _on_gpus(search, usable)
        return
    others = [Placement(one, whole, count) for count in counts[1:]]
    others += [_balanced(search, names) for names in several]
    # The likeliest first, as there may be time for one more alone: a stage for each core.
    yield from sorted(others, key=lambda each: (abs(len(each.devices) - cores()), -each.threads))


def _on_gpus(search: Search, usable: Sequence[str]) -> Iterator[Placement]:
    """What a plan would choose, or one of each kind where by what was counted nothing fits: the trials show it."""
    search.step("measuring layers")
    try:
        layout = layout_on_gpus(search.layers, search.batches, usable, search.schedule, search.options)
    except (PlacementError, MemoryError, RuntimeError) as error:
        if not (isinstance(error, PlacementError) or is_out_of_memory(error)):
            raise
        if search.costs is None:
            search.step(_BY_NUMBER)
        names = list(usable[: len(search.layers)])
        others = {torch.cuda.get_device_name(gpu): [gpu] for gpu in reversed(usable)}.values()
        yield from (_balanced(search, each) for each in [names, *others] if each != usable[:1])
        return
    names = [usable[stage.devices[0]] for stage in layout.stages]
    if names != usable[:1]:
        threads = threads_each(names, search.schedule, search.options.threads)
        yield Placement(names, layout.sizes, threads, stage_s=tuple(stage.seconds for stage in layout.stages))


def _balanced(search: Search, names: list[str]) -> Placement:
    """Stages of equal cost, for what layers took in the trial of one stage; of equal numbers if that did not fit."""
    costs = search.costs
    each = [1.0] * len(search.layers) if costs is None else [sum(cost.values()) for cost in costs]
    return Placement(names, balance(each, len(names)), threads_each(names, search.schedule, search.options.threads))


def _thread_counts(usable: Sequence[str], schedule: Schedule, options: EngineOptions) -> list[int]:
    """The numbers of threads that are tried for one stage, in order."""
    if usable[0] != "cpu" or options.threads is not None:
        return [threads_each(usable[:1], schedule, options.threads)]
    most = min(cores(), omp_threads() or cores())
    counts = [most >> times for times in range(most.bit_length())]  # 12, 6, 3, 1
    # On a busy machine, threads that wait for one that is not at work may take fifty times as long as a single one.
    return counts[::-1] if is_busy() else counts


def _kind(device: str) -> str:
    found = parse_device(device)
    return torch.cuda.get_device_name(device) if found.type == "cuda" else found.type


def _usable(wanted: Sequence[str] | None) -> list[str]:
    """The CPU, or different GPUs."""
    if wanted is None:
        return all_devices()
    names = list(dict.fromkeys(str(parse_device(name)) for name in wanted))
    if not names or (len(names) > 1 and "cpu" in names):
        raise PlacementError(f"found the devices {names} to choose among; expected 'cpu', or one or more GPUs")
    return names


def _candidate_devices(layers: int, usable: list[str]) -> list[list[str]]:
    """One stage, and the numbers of stages that may help."""
    if len(usable) > 1:
        return [usable[:count] for count in sorted({1, min(len(usable), layers)})]
    if usable != ["cpu"]:
        return [usable * count for count in sorted({1, layers})]
    return [["cpu"] * count for count in range(1, min(layers, 2 * cores()) + 1)] if cores() > 1 else [["cpu"]]
