"""The placement that is fastest on this machine: sizes from the measured costs of layers, the rest by trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, TypeAlias

import torch
from torch import nn

from pipeal.core.errors import PlacementError
from pipeal.core.modules import layers_of
from pipeal.core.options import DEFAULTS, EngineOptions
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.core.partition import balance, balance_rows
from pipeal.core.protocols import TrainableLayer
from pipeal.engine.devices import all_devices, parse_device
from pipeal.engine.devices.cpus import cores, is_busy, omp_threads
from pipeal.engine.devices.threads import threads_each
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.schedule import Action, Schedule, schedule_named
from pipeal.engine.sizes import check_sizes, layers_of_stages
from pipeal.engine.trace import Window
from pipeal.planning.measure.gpus import layout_on_gpus
from pipeal.planning.measure.layers import (
    WARM_UP,
    before_the_clock,
    counted_of,
    layer_costs,
    seconds_by_layer,
    uncollected,
)
from pipeal.planning.pure.simulate import simulate
from pipeal.planning.pure.trials import LOOK_AFTER, More, TimeLimit, Trials

LayerSeconds: TypeAlias = "Sequence[Mapping[Action, float]]"
"""What each layer takes per batch, by action."""


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


Step = Callable[[str, float, float], None]
"""Told what is being measured, the seconds spent so far, and the seconds that all of it may take."""


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """How long may be spent on looking for a placement, and who is told of it.

    Attributes:
        limit: How long it may take; None for :data:`pipeal.planning.pure.trials.MOST_S` from the call on.
        rounds: How often those that are close to the best are tried, at most.
        on_step: Called before each step.
        on_trial: Called with each candidate that was tried and its time.
        on_left_out: Called with each candidate for which memory does not suffice, and what was said of it.
    """

    limit: TimeLimit | None = None
    rounds: int = 2
    on_step: Step | None = None
    on_trial: Callable[[Placement], None] | None = None
    on_left_out: Callable[[Placement, Exception], None] | None = None


def place(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Sequence[Any],
    schedule: str | Schedule,
    options: EngineOptions = DEFAULTS,
    *,
    devices: Sequence[str] | None = None,
    **search: Any,
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
        search: As for :class:`TrialOptions`.

    Raises:
        PlacementError: The devices are not here or not of one kind, or there are too few batches.
        OutOfMemoryError: It suffices for none.
    """
    layers = layers_of(model)
    schedule = schedule_named(schedule)
    threads = options.threads
    usable = _usable(devices)
    home = usable[0]
    choices = _candidate_devices(len(layers), usable)
    if home == "cpu" and threads is None:
        counts = _halves(min(cores(), omp_threads() or cores()))
        if is_busy():  # threads that wait for one that is not at work may take fifty times as long as a single one
            counts.reverse()
    else:
        counts = [threads_each([home], schedule, threads)]
    if len(choices) == len(counts) == 1 and _are_alike(usable):
        return Placement(choices[0], [len(layers)], counts[0])
    counted_of(batches)
    trials = _Search(layers, batches, schedule, options, TrialOptions(**search))
    one, *several = choices

    def candidates() -> Iterator[Placement]:
        yield Placement(one, [len(layers)], counts[0])
        if len(usable) > 1:
            yield from trials.on_gpus(usable)
            return
        # The likeliest first, as there may be time for one more alone: a stage for each core.
        others = [Placement(one, [len(layers)], count) for count in counts[1:]]
        for names in several:
            others.append(Placement(names, trials.balanced(len(names)), threads_each(names, schedule, threads)))
        yield from sorted(others, key=lambda each: (abs(len(each.devices) - cores()), -each.threads))

    trials.run(candidates(), len(counts) + len(several))
    if home == "cpu" and threads is None:
        trials.try_fewer_threads()
    return trials.taken()


def fit(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Sequence[Any],
    schedule: str | Schedule,
    devices: Sequence[str],
    options: EngineOptions = DEFAULTS,
    *,
    sizes: Sequence[int] | None = None,
    parts: Sequence[TrainableLayer] | None = None,
    **search: Any,
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
        search: As for :class:`TrialOptions`.

    Raises:
        PlacementError: Devices, sizes and layers do not fit, or there are too few batches.
        OutOfMemoryError: It does not suffice.
    """
    layers = layers_of(model)
    units = layers if parts is None else list(parts)
    schedule = schedule_named(schedule)
    trials = _Search(layers, batches, schedule, options, TrialOptions(**search))
    names = list(devices)
    found = balance([1.0] * len(units), len(names)) if sizes is None else check_sizes(sizes, len(units), len(names))
    alone = None
    if sizes is None and 1 < len(names) < len(units):
        try:
            kinds = {_kind(name): name for name in names}
            by_kind = {kind: trials.costs_on(name, units) for kind, name in kinds.items()}
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            trials.step(_BY_NUMBER)
        else:
            rows = [[sum(cost.values()) for cost in by_kind[_kind(name)]] for name in names]
            found = balance_rows(rows)
            stages = zip(rows, layers_of_stages(found), strict=True)
            alone = tuple(sum(row[own.start : own.stop]) for row, own in stages)
    row = parts is not None and len(names) > 1
    share = threads_each(names[:1] if row else names, schedule, options.threads)
    settled = Placement(names, found, share, stage_s=alone)
    if options.threads is not None or share == 1 or not any(parse_device(name).type == "cpu" for name in names):
        return settled
    trials.run([settled, replace(settled, threads=share // 2)], 2)
    trials.try_fewer_threads()
    return trials.taken()


class _Search:
    """Trials of placements of some layers, and what was measured for them."""

    def __init__(
        self,
        layers: list[TrainableLayer],
        batches: Sequence[Any],
        schedule: Schedule,
        options: EngineOptions,
        how: TrialOptions,
    ) -> None:
        self._layers = layers
        # More shapes would each be compiled for every candidate.
        self._batches = batches if options.compile == "none" else batches[: WARM_UP + LOOK_AFTER]
        self._schedule = schedule
        self._options = options
        self._how = how
        self._limit = how.limit or TimeLimit()
        self._costs: LayerSeconds | None = None
        self._too_large: Exception | None = None
        self._trials = Trials(self._measure, self._limit, rounds=how.rounds, left_out=self._leave_out)

    def step(self, what: str) -> None:
        """Says what is done next."""
        if self._how.on_step is not None:
            self._how.on_step(what, self._limit.spent_s, self._limit.bound_s)

    def costs_on(self, device: str, units: Sequence[TrainableLayer]) -> LayerSeconds:
        """Seconds of each layer, or of what else is given, by action."""
        self.step(f"measuring layers on {device}")
        costs = layer_costs(
            deepcopy(list(units)),
            self._batches,
            replace(self._options, compile="none"),
            device=device,
            goes_on=lambda: self._limit.left_s > self._limit.bound_s * _LEFT_FOR_TRIALS,
        )
        self._limit.learn(sum(sum(cost.values()) for cost in costs))
        return costs

    def balanced(self, stages: int) -> list[int]:
        """Sizes of equal cost, for what layers took in the trial of one stage; of equal numbers if that did not fit."""
        count = len(self._layers)
        return balance([1.0] * count if self._costs is None else [sum(cost.values()) for cost in self._costs], stages)

    def on_gpus(self, usable: Sequence[str]) -> Iterator[Placement]:
        """What a plan would choose, or one of each kind where by what was counted nothing fits: the trials show it."""
        self.step("measuring layers")
        threads = self._options.threads
        try:
            layout = layout_on_gpus(self._layers, self._batches, usable, self._schedule, self._options)
        except (PlacementError, MemoryError, RuntimeError) as error:
            if not (isinstance(error, PlacementError) or is_out_of_memory(error)):
                raise
            if self._costs is None:
                self.step(_BY_NUMBER)
        else:
            names = [usable[stage.devices[0]] for stage in layout.stages]
            if names != usable[:1]:
                alone = tuple(stage.seconds for stage in layout.stages)
                yield Placement(names, layout.sizes, threads_each(names, self._schedule, threads), stage_s=alone)
            return
        names = list(usable[: len(self._layers)])
        others = {torch.cuda.get_device_name(gpu): [gpu] for gpu in reversed(usable)}.values()
        for each in [names, *others]:
            if each != usable[:1]:
                yield Placement(each, self.balanced(len(each)), threads_each(each, self._schedule, threads))

    def run(self, candidates: Iterable[Placement], count: int) -> None:
        """Tries some, about so many."""
        self._trials.run(candidates, count)

    def try_fewer_threads(self) -> None:
        """Tries the fastest that has several stages, or else one, with half its threads, and so on while that helps."""
        tried = self._trials.times
        several = [times for times in tried if len(times.candidate.devices) > 1] or tried
        best = min(several, key=lambda times: times.seconds, default=None)
        while best is not None and best.candidate.threads > 1:
            fewer = replace(best.candidate, threads=best.candidate.threads // 2)
            before = len(tried)
            if all(times.candidate != fewer for times in tried):
                self.run([fewer], 1)
            if len(tried) == before or tried[-1].seconds >= best.seconds:
                return
            best = tried[-1]

    def taken(self) -> Placement:
        """The best, once those that are close have been tried again; all are told, those of fewest stages first.

        Raises:
            OutOfMemoryError: None fitted.
        """
        if self._too_large is not None and not self._trials.times:
            raise self._too_large
        self._trials.repeat()
        best = self._trials.best
        tried = {
            id(times): replace(times.candidate, seconds_per_batch=times.seconds, stage_s=self._alone(times.candidate))
            for times in self._trials.times
        }
        if self._how.on_trial is not None:
            for placement in sorted(tried.values(), key=lambda each: (len(each.devices), -each.threads)):
                self._how.on_trial(placement)
        return tried[id(best)]

    def _alone(self, candidate: Placement) -> tuple[float, ...] | None:
        """What the layers of each stage took per batch in the trial of one stage, unless that is known better."""
        if candidate.stage_s is not None or self._costs is None:
            return candidate.stage_s
        return tuple(sum(stage.values()) for stage in self._stage_costs(candidate))

    @uncollected()
    def _measure(self, candidate: Placement, more: More) -> float:
        """Seconds per batch, on a copy, in the long run: what filling the stages took is reckoned out."""
        self.step(f"trying {candidate}")
        batches = self._batches
        stages = self._stage_costs(candidate)
        with Pipeline(
            deepcopy(self._layers),
            candidate.devices,
            self._schedule,
            sizes=candidate.sizes,
            trace=Window(0, _ALL),
            options=replace(self._options, threads=candidate.threads, on_non_finite="ignore"),
        ) as pipe:
            before = before_the_clock(batches, self._options.compile)
            pipe.run(before)
            warmed = len(before) + 1
            warming_s = pipe.run(batches[:1]).seconds
            if not more(warming_s, warm=False):
                return warming_s
            if warming_s < _QUICK_S:
                pipe.run(batches[1:WARM_UP])
                warmed += WARM_UP - 1
            timed = cycle(batches[WARM_UP:])
            look = pipe.run(islice(timed, LOOK_AFTER)).seconds * _in_the_long_run(self._schedule, stages, LOOK_AFTER)
            count = more(look / LOOK_AFTER)
            rest = 0.0
            if count:
                rest = pipe.run(islice(timed, count)).seconds * _in_the_long_run(self._schedule, stages, count)
            if self._costs is None and len(candidate.devices) == 1:
                self._costs = seconds_by_layer(
                    (span for span in pipe.spans() if span.batch >= warmed), len(self._layers), LOOK_AFTER + count
                )
        return (look + rest) / (LOOK_AFTER + count)

    def _stage_costs(self, candidate: Placement) -> list[Mapping[Action, float]]:
        """What each stage takes, by action; where that is not known, as if all took the same."""
        costs = self._costs
        if costs is None or sum(candidate.sizes) != len(costs):
            return [dict.fromkeys(Action, 1.0) for _ in candidate.devices]
        return [
            {action: sum(costs[layer][action] for layer in own) for action in Action}
            for own in layers_of_stages(candidate.sizes)
        ]

    def _leave_out(self, candidate: Placement, error: Exception) -> bool:
        if not is_out_of_memory(error):
            return False
        self._too_large = error.with_traceback(None)  # whose frames hold what did not fit
        if self._how.on_left_out is not None:
            self._how.on_left_out(candidate, error)
        return True


_LEFT_FOR_TRIALS = 0.75
"""Of the bound, the share that measuring layers leaves, if it can."""


def _kind(device: str) -> str:
    found = parse_device(device)
    return torch.cuda.get_device_name(found) if found.type == "cuda" else found.type


def _halves(most: int) -> list[int]:
    """A number, half of it, and so on.

    >>> _halves(12)
    [12, 6, 3, 1]
    """
    return [most] if most == 1 else [most, *_halves(most // 2)]


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


def _candidate_devices(layers: int, usable: list[str]) -> list[list[str]]:
    """One stage, and the numbers of stages that may help."""
    if len(usable) > 1:
        return [usable[:count] for count in sorted({1, min(len(usable), layers)})]
    if usable != ["cpu"]:
        return [usable * count for count in sorted({1, layers})]
    return [["cpu"] * count for count in range(1, min(layers, 2 * cores()) + 1)] if cores() > 1 else [["cpu"]]


_BY_NUMBER = "layers are divided by number: memory does not suffice to measure them"

_QUICK_S = 0.25
"""Batches that take longer need but one of them to warm up."""


_ALL = 1 << 30
"""More batches than a trial has."""


def _in_the_long_run(schedule: Schedule, stages: Sequence[Mapping[Action, float]], batches: int) -> float:
    """How many times as long a batch takes among many as among so few, of which the first fill the stages."""
    if schedule.serial or len(stages) == 1:
        return 1.0
    few, many = (simulate(schedule, list(stages), count).makespan_s / count for count in (batches, _MANY))
    return many / few if few else 1.0


_MANY = 64
