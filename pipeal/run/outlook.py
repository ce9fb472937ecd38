"""What a comparison of AL with backpropagation says beyond this machine and this depth, at its end.

::

    stages over time        as traced                         who works, who waits
    more devices            costs measured then and there     what each form would take on 2, 4 and 8
    more layers             each block looked at alone        what memory each form would take
    in short                a sentence for each, made of these figures, one for accuracy, and one for the machine
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from pathlib import Path
from textwrap import fill

from pipeal.config import RunConfig
from pipeal.core.artifacts import COSTS, TRIALS
from pipeal.core.errors import ConfigError, PipealError, first_line
from pipeal.core.methods import BASELINE, DEFAULT
from pipeal.core.tree import batch_size
from pipeal.engine.devices.cpus import ProcessorTime
from pipeal.planning.measure.layers import WARM_UP
from pipeal.planning.pure.candidates import alone_s
from pipeal.planning.pure.forecast import RIVALS, Forecast, Model, best_forecast
from pipeal.planning.pure.hardware import PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import Costs, repeated, save_costs
from pipeal.planning.pure.memory import WAYS, way_of_layers
from pipeal.reporting.tables import print_table
from pipeal.reporting.timeline import busy_shares, steady, timeline_lines
from pipeal.run.memory_rows import Built, forecast
from pipeal.run.opening import engine_options
from pipeal.run.outcome import Outcome
from pipeal.run.plan_costs import BATCHES, costs_of

_log = logging.getLogger(__name__)

DEVICES = (1, 2, 4, 8)
"""Forecast for so many; where the model has fewer layers, as if it had as many."""

DEEPER = (1, 4, 16)
"""So many times as deep as it is, memory is told."""

ROUNDS = 2
"""Of measuring costs: two forms of one model in turns, for a forecast that is shown beside them."""

BUSY = 0.1
"""The share of the processors from which on others count as at work."""

MOST_S = 120.0
"""A forecast that would take longer is left to ``pipeal plan``."""

_ENOUGH = 100
"""Test samples, for a word about chance."""

_WIDTH = 120
"""Of sentences."""

_CELLS, _BATCHES = 96, 6
"""The width of a timeline, and how many batches of the first stage it shows, about."""


def show_outlook(outcomes: Sequence[Outcome], folder: Path, before: ProcessorTime | None) -> None:
    """Measures and prints, where AL and backpropagation are among the forms; a model that does not allow it says why.

    Args:
        outcomes: Of a run that has come to its end in this process.
        folder: Of the run; what layers cost is left there, for ``pipeal plan --costs``.
        before: Read when the training began.
    """
    found = {outcome.config.train.mode: outcome for outcome in reversed(outcomes)}  # of BP the one on one device
    if DEFAULT.name not in found or BASELINE.name not in found:
        return
    al, bp = found[DEFAULT.name], found[BASELINE.name]
    said = [*_timeline(al, bp)]
    try:
        config = _measurable(al, bp)
        said += [*_devices(al, config, folder)]
        said += [*_memory(al, config)]
    except Exception as error:  # noqa: BLE001  a model's own, alone or on a part of a batch; told, as the run is done
        _log.debug("no forecast", exc_info=True)
        print(f"\nno forecast: {error if isinstance(error, PipealError) else first_line(error)}")
    said += [_accuracy(al, bp), _terms(al, bp, folder), _machine(before, ProcessorTime.now(), al.measure.name)]
    print("\nin short")
    for sentence in said:
        print(fill(sentence, _WIDTH, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False))


def _timeline(al: Outcome, bp: Outcome) -> Iterator[str]:
    """Both on one scale."""
    if not al.spans or not bp.spans:  # of a run that was taken up again, they may be of another process
        return
    begin, end = steady(al.spans)
    batches = len({span.batch for span in al.spans if begin <= span.begin < end})
    seconds = (end - begin) * min(1.0, _BATCHES / max(1, batches))
    print(
        f"\nstages over {1e3 * seconds:.0f} ms: a digit is the forward of that batch, ▒ backward and update, · waiting"
    )
    for outcome in (al, bp):
        lines = timeline_lines(outcome.spans, seconds, _CELLS)
        for stage, line in zip(reversed(range(len(lines))), lines, strict=True):
            print(f"{outcome.form.label} stage {stage}  {line}")
    busy = busy_shares(al.spans, (begin, end)).values()
    if len(busy) > 1:
        yield (
            f"timeline: each of the {len(busy)} stages of AL is at another batch, and has one to work on at least "
            f"{min(busy):.0%} of the time"
        )
    else:
        yield "timeline: AL had one stage here, as BP, so that nothing overlaps"


def _measurable(al: Outcome, bp: Outcome) -> RunConfig:
    """As it was trained, but on one thread and a device that holds all of it.

    Raises:
        ConfigError: It would take too long, or is no training that can be forecast.
    """
    config, (al_s, bp_s) = al.config, (one.totals.seconds / max(1, one.totals.batches) for one in (al, bp))
    if config.train.accumulate > 1:
        raise ConfigError(f"train.accumulate is {config.train.accumulate}, and one has an update after every batch")
    batches = ROUNDS * (WARM_UP + BATCHES)
    takes_s = batches * (len(config.engine.devices) * al_s + 3 * bp_s)  # of BP the whole batch and parts of it
    if takes_s > MOST_S:
        raise ConfigError(f"it would take about {takes_s / 60:.0f} min; pipeal plan and pipeal memory make one")
    return replace(config, engine=replace(config.engine, threads=1, offload="none", compile="none"))


def _devices(al: Outcome, config: RunConfig, folder: Path) -> Iterator[str]:
    """What both forms would take on more devices, each of which is as this one."""
    # What other programs have of the core meanwhile is left out: a busy machine has the forecast of an idle one.
    costs = costs_of(al.experiment.under(config), config.engine.devices[0], rounds=ROUNDS, alone=True)
    path = COSTS.at(folder)
    save_costs(costs, path)
    found = [Forecasts.of(costs, count, config) for count in DEVICES]
    device = "one core" if costs.kind == "cpu" else f"one {costs.kind}"
    print()
    print_table(
        f"forecast for devices of {device} each, joined by links that take no time",
        ["devices", "layers", "AL, ms", "× one", "BP, ms", "× one", "best schedule of BP", "AL over BP"],
        [
            [
                count,
                one.layers,
                1e3 * one.al.batch_s,
                f"{one.al_gain:.2f}×",
                1e3 * one.bp.batch_s,
                f"{one.bp_gain:.2f}×",
                one.bp_schedule,
                f"{one.al_over_bp:.2f}×",
            ]
            for count, one in zip(DEVICES, found, strict=True)
        ],
    )
    print(f"costs:    {path}, measured now on one thread; pipeal plan --costs takes them")
    first, last = found[0], found[-1]
    repeated_as = f" (as if it had {last.layers} layers)" if last.layers > first.layers else ""
    yield (
        f"devices:  from one device to {DEVICES[-1]}{repeated_as}, over links that take no time, AL would get "
        f"{last.al_gain:.1f} times as fast, BP as a pipeline {last.bp_gain:.1f} times ({last.bp_schedule}): there AL "
        f"would be {last.al_over_bp:.1f} times as fast as BP, on one device and as it is {first.al_over_bp:.2f} times"
    )


@dataclass(frozen=True)
class Forecasts:
    """The best of AL and of BP on some devices, and what each takes on one of them.

    Attributes:
        layers: Of the model, or as if there were so many.
        al: With a stage for each device, if there are as many layers.
        bp: In the schedule, and with the micro-batches, that suit it best.
        al_alone_s: Seconds per batch on one device.
        bp_alone_s: Likewise.
    """

    layers: int
    al: Forecast
    bp: Forecast
    al_alone_s: float
    bp_alone_s: float

    @classmethod
    def of(cls, costs: Costs, count: int, config: RunConfig) -> Forecasts:
        """On so many devices; a model of fewer layers as if it had as many."""
        own = len(costs.layers)
        layers = max(own, count) if own > 1 else own
        al = {costs.kind: repeated(costs.layers, layers, of=own)}
        bp = {parts: {costs.kind: repeated(rows, layers, of=own)} for parts, rows in costs.backprop.items()}
        device, engine = PlannedDevice(costs.kind), config.engine
        setup = Setup((device,) * count, queue_depth=engine.queue_depth, within_stage=engine.within_stage)
        model = Model(al, bp)
        rivals = [best_forecast(method, model, setup) for method in RIVALS]
        best = min(rivals, key=lambda one: one.batch_s)
        return cls(
            layers, best_forecast("AL pipelined", model, setup), best, alone_s(al, [device]), alone_s(bp[1], [device])
        )

    @property
    def al_gain(self) -> float:
        """How many times as fast as on one device."""
        return self.al_alone_s / self.al.batch_s

    @property
    def bp_gain(self) -> float:
        """Likewise."""
        return self.bp_alone_s / self.bp.batch_s

    @property
    def al_over_bp(self) -> float:
        """How many times as fast as BP AL is, on as many devices."""
        return self.bp.batch_s / self.al.batch_s

    @property
    def bp_schedule(self) -> str:
        """In words."""
        name, parts = self.bp.method.removeprefix("BP "), self.bp.micro_batches
        return "whole batches" if parts == 1 else f"{name}, {parts} micro-batches"


def _memory(al: Outcome, config: RunConfig) -> Iterator[str]:
    """What both forms would take on one device, as if they were deeper."""
    options = replace(engine_options(config), on_oom="raise")
    subject = Built(al.experiment.under(config), config.engine.devices[0], options)
    samples = batch_size(subject.batch()[0])
    _log.info(f"looking at the memory of each block on {subject.device}")
    model = forecast(subject, samples)
    depths = [model.depth * times for times in (DEEPER if model.depth > 1 else DEEPER[:1])]
    ways = [way_of_layers(config.engine.within_stage), WAYS["BP"], WAYS["BP, checkpointed"]]
    rows = [[model.parts(way, samples, depth) for way in ways] for depth in depths]
    print()
    print_table(
        f"memory on one device, MiB, {samples} samples; all: with weights, gradients and optimizer states",
        ["layers", "activations: AL", "BP", "BP, checkpointed", "all: AL", "BP", "BP, checkpointed"],
        [
            [depth, *(one.activations / 2**20 for one in row), *(one.peak / 2**20 for one in row)]
            for depth, row in zip(depths, rows, strict=True)
        ],
    )
    grown = [f"{last.activations / first.activations:.1f}" for first, last in zip(rows[0], rows[-1], strict=True)]
    peaks = [f"{one.peak / 2**20:,.0f}" for one in rows[-1]]
    yield (
        f"memory:   from {depths[0]} to {depths[-1]} layers (the later ones repeated), activations of AL become "
        f"{grown[0]} times as large, those of BP {grown[1]} times, and {grown[2]} times where every block is computed "
        f"twice; in all these take {peaks[0]}, {peaks[1]} and {peaks[2]} MiB"
    )


def _accuracy(al: Outcome, bp: Outcome) -> str:
    measure = al.measure
    one, other = (outcome.measure.at_best(outcome.rows) or outcome.measure.last(outcome.rows) for outcome in (al, bp))
    told = f"{measure.name + ':':<9} AL {one}, BP {other} on {measure.unseen} samples"
    samples = al.experiment.facts.get("test_samples")
    apart = abs(one.mean - other.mean)
    if not measure.is_share or not isfinite(apart) or not isinstance(samples, int) or samples < _ENOUGH:
        return told
    chance = 2 * sqrt(sum(share * (1 - share) for share in (one.mean, other.mean)) / samples)
    within = "no more than what" if apart <= chance else "more than what"
    seeds = "; another seed may differ by more" if al.config.train.repeat == 1 else ""
    return f"{told}: {apart:.4f} apart, {within} {samples:,} samples leave to chance ({chance:.4f}){seeds}"


def _terms(al: Outcome, bp: Outcome, folder: Path) -> str:
    """What was the same for both, and what was not."""
    ours, theirs = al.config, bp.config
    same = {
        "batches": ours.data == theirs.data,
        "epochs": ours.train.epochs == theirs.train.epochs,
        "seeds": (ours.train.seed, ours.train.repeat) == (theirs.train.seed, theirs.train.repeat),
        "learning rate": ours.train.lr == theirs.train.lr,
        "precision": ours.train.precision == theirs.train.precision,
    }
    alike = [name for name, is_same in same.items() if is_same]
    apart = "".join(f", another {name}" for name, is_same in same.items() if not is_same)
    tuned = "both were tuned over the same grid" if TRIALS.at(folder).is_file() else "neither was tuned"
    ratio = bp.epoch_s.mean / al.epoch_s.mean
    return (
        f"terms:    both had the same {', '.join(alike)}{apart}; {tuned}; their epochs came in turns, each form on "
        f"stages and threads that were named or chosen for it: {_place(al)}; {_place(bp)}; so AL was {ratio:.2f} times "
        "as fast as BP here"
    )


def _place(outcome: Outcome) -> str:
    stages, threads = len(outcome.config.engine.devices), outcome.config.engine.threads or 1
    return (
        f"{outcome.form.label} {stages} stage{'s' * (stages > 1)} of {threads} thread{'s' * (threads > 1)}, "
        f"{outcome.epoch_s.mean:.2f} s/epoch"
    )


def _machine(before: ProcessorTime | None, now: ProcessorTime | None, result: str) -> str:
    """Whether others were at work meanwhile, as the system counted it."""
    if before is None or now is None:
        return "machine:  this system does not tell whether other programs were at work; seconds are right if none were"
    share = now.others_share(before)
    told = f"machine:  other programs had {share:.0%} of the time of this machine's processors meanwhile"
    if share < BUSY:
        return f"{told}: seconds are those of these forms"
    return (
        f"{told}: it was busy, and seconds per epoch say as much of them as of these forms; forecasts, memory and "
        f"{result} leave them out"
    )
