"""The trial of placements: each trains a copy of the layers for a few batches, within a bound of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any, TypeAlias

from pipeal.core.options import EngineOptions
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.core.protocols import TrainableLayer
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.schedule import Action, Schedule
from pipeal.engine.sizes import layers_of_stages
from pipeal.engine.trace import Window
from pipeal.planning.measure.layers import (
    WARM_UP,
    layer_costs,
    seconds_by_layer,
    uncollected,
)
from pipeal.planning.placement import Placement
from pipeal.planning.pure.simulate import simulate
from pipeal.planning.pure.stage_cost import task_seconds
from pipeal.planning.pure.trials import LOOK_AFTER, More, TimeLimit, Trials

LayerSeconds: TypeAlias = "Sequence[Mapping[Action, float]]"
"""What each layer takes per batch, by action."""

_LEFT_FOR_TRIALS = 0.75
"""Of the bound, the share that measuring layers leaves, if it can."""

_QUICK_S = 0.25
"""Batches that take longer need but one of them to warm up."""

_ALL = 1 << 30
"""More batches than a trial has."""

_MANY = 64
"""So many batches are a long run: what filling the stages takes no longer counts."""


def _unheard(*_: object) -> None:
    """For callers that want no news."""


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """How long may be spent on looking for a placement, and who is told of it.

    Attributes:
        limit: How long it may take; None for :data:`pipeal.planning.pure.trials.MOST_S` from the call on.
        rounds: How often those that are close to the best are tried, at most.
        on_step: Called before each step: what is measured, the seconds spent so far, and those that all may take.
        on_trial: Called with each candidate that was tried and its time.
        on_left_out: Called with each candidate for which memory does not suffice, and what was said of it.
    """

    limit: TimeLimit = field(default_factory=TimeLimit)
    rounds: int = 2
    on_step: Callable[[str, float, float], None] = _unheard
    on_trial: Callable[[Placement], None] = _unheard
    on_left_out: Callable[[Placement, Exception], None] = _unheard


class Search:
    """Trials of placements of some layers, and what was measured for them.

    Args:
        layers: What is placed; copies of them are trained.
        batches: A few real batches.
        schedule: The schedule it is for.
        options: How the layers will be run; each trial has its own number of threads.
        how: How long it may take, and who is told.

    Attributes:
        trials: What was tried, and decides what is tried again.
        costs: What each layer took in the trial of one stage; None before that, and where they did not fit into one.
    """

    def __init__(
        self,
        layers: list[TrainableLayer],
        batches: Sequence[Any],
        schedule: Schedule,
        options: EngineOptions,
        how: TrialOptions,
    ) -> None:
        self.costs: LayerSeconds | None = None
        self.layers = layers
        # More shapes would each be compiled for every candidate.
        self.batches = batches if options.compile == "none" else batches[: WARM_UP + LOOK_AFTER]
        self.schedule = schedule
        self.options = options
        self._how = how
        self._limit = how.limit
        self._too_large: Exception | None = None
        self.trials = Trials(self._measure, self._limit, rounds=how.rounds, left_out=self._leave_out)

    def step(self, what: str) -> None:
        """Says what is done next."""
        self._how.on_step(what, self._limit.spent_s, self._limit.bound_s)

    def costs_on(self, device: str, units: Sequence[TrainableLayer]) -> LayerSeconds:
        """Seconds of each layer, or of what else is given, by action."""
        self.step(f"measuring layers on {device}")
        costs = layer_costs(
            deepcopy(list(units)),
            self.batches,
            replace(self.options, compile="none"),
            device=device,
            goes_on=lambda: self._limit.left_s > self._limit.bound_s * _LEFT_FOR_TRIALS,
        )
        self._limit.learn(sum(sum(cost.values()) for cost in costs))
        return costs

    def try_fewer_threads(self) -> None:
        """Tries the fastest that has several stages, or else one, with half its threads, and so on while that helps."""
        tried = self.trials.times
        several = [times for times in tried if len(times.candidate.devices) > 1] or tried
        best = min(several, key=lambda times: times.seconds, default=None)
        while best is not None and best.candidate.threads > 1:
            fewer = replace(best.candidate, threads=best.candidate.threads // 2)
            before = len(tried)
            if all(times.candidate != fewer for times in tried):
                self.trials.run([fewer], 1)
            if len(tried) == before or tried[-1].seconds >= best.seconds:
                return
            best = tried[-1]

    def taken(self) -> Placement:
        """The best, once those that are close have been tried again; all are told, those of fewest stages first.

        Raises:
            OutOfMemoryError: None fitted.
        """
        if self._too_large is not None and not self.trials.times:
            raise self._too_large
        self.trials.repeat()
        tried = {
            id(times): replace(times.candidate, seconds_per_batch=times.seconds, stage_s=self._alone(times.candidate))
            for times in self.trials.times
        }
        for placement in sorted(tried.values(), key=lambda each: (len(each.devices), -each.threads)):
            self._how.on_trial(placement)
        return tried[id(self.trials.best)]

    def _alone(self, candidate: Placement) -> tuple[float, ...] | None:
        """What the layers of each stage took per batch in the trial of one stage, unless that is known better."""
        if candidate.stage_s is not None or self.costs is None:
            return candidate.stage_s
        return tuple(sum(stage.values()) for stage in self._stage_costs(candidate))

    @uncollected()
    def _measure(self, candidate: Placement, more: More) -> float:
        """Seconds per batch, on a copy, in the long run: what filling the stages took is reckoned out."""
        self.step(f"trying {candidate}")
        stages = self._stage_costs(candidate)
        with Pipeline(
            deepcopy(self.layers),
            candidate.devices,
            self.schedule,
            sizes=candidate.sizes,
            trace=Window(0, _ALL),
            options=replace(self.options, threads=candidate.threads, on_non_finite="ignore"),
        ) as pipe:
            before = [] if self.options.compile == "none" else self.batches  # nothing is left to compile on the clock
            pipe.run(before)
            warmed = len(before) + 1
            warming_s = pipe.run(self.batches[:1]).seconds
            if not more(warming_s, warm=False):
                return warming_s
            if warming_s < _QUICK_S:
                pipe.run(self.batches[1:WARM_UP])
                warmed += WARM_UP - 1
            timed = cycle(self.batches[WARM_UP:])

            def timed_s(count: int) -> float:
                return pipe.run(islice(timed, count)).seconds * _in_the_long_run(self.schedule, stages, count)

            look = timed_s(LOOK_AFTER)
            count = more(look / LOOK_AFTER)
            rest = timed_s(count) if count else 0.0
            if self.costs is None and len(candidate.devices) == 1:
                self.costs = seconds_by_layer(
                    (span for span in pipe.spans() if span.batch >= warmed), len(self.layers), LOOK_AFTER + count
                )
        return (look + rest) / (LOOK_AFTER + count)

    def _stage_costs(self, candidate: Placement) -> list[Mapping[Action, float]]:
        """What each stage takes, by action; where that is not known, as if all took the same."""
        costs = self.costs
        if costs is None or sum(candidate.sizes) != len(costs):
            return [dict.fromkeys(Action, 1.0) for _ in candidate.devices]
        return [
            task_seconds([costs[layer] for layer in own], by_layer=self.schedule.by_layer)
            for own in layers_of_stages(candidate.sizes)
        ]

    def _leave_out(self, candidate: Placement, error: Exception) -> bool:
        if not is_out_of_memory(error):
            return False
        self._too_large = error.with_traceback(None)  # whose frames hold what did not fit
        self._how.on_left_out(candidate, error)
        return True


def _in_the_long_run(schedule: Schedule, stages: Sequence[Mapping[Action, float]], batches: int) -> float:
    """How many times as long a batch takes among many as among so few, of which the first fill the stages."""
    if schedule.serial or len(stages) == 1:
        return 1.0
    few, many = (simulate(schedule, list(stages), count).makespan_s / count for count in (batches, _MANY))
    return many / few if few else 1.0
