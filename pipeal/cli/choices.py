"""The choices that a configuration leaves open, made: devices, sizes, threads, precision."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from io import StringIO
from itertools import groupby, islice
from typing import Literal

from rich.console import Console

from pipeal.cli.build import Experiment
from pipeal.cli.options import device_names
from pipeal.cli.say import Say
from pipeal.config import RunConfig
from pipeal.data import EpochBatches
from pipeal.engine import balance, parse_device, schedule_named
from pipeal.engine.compiling import check_compile
from pipeal.engine.costs import Placement, all_devices, place
from pipeal.engine.device import Precision, fastest_precision
from pipeal.engine.graphed import STAGES_MOST, check_cuda_graphs
from pipeal.engine.measure import WARM_UP
from pipeal.engine.placement import check_sizes
from pipeal.engine.settings import check_precision, matmul_precision
from pipeal.engine.threads import cores, threads_each
from pipeal.errors import ConfigError, PlacementError, first_line
from pipeal.train.tables import print_table

Form = Literal["al", "bp"]

TRIAL_BATCHES = 10
"""Batches a placement is tried with, beside those for warming up."""


def choose(experiment: Experiment, form: Form, say: Say, config: RunConfig | None = None) -> RunConfig:
    """The configuration of one form with nothing left open: the same file, given again, repeats the run.

    Args:
        experiment: What is to be run.
        form: Which form of it.
        say: Told what is being done.
        config: What to complete, with threads that stay if there are any; the experiment's configuration if None.

    Raises:
        PipealError: Devices, sizes or batches do not fit; nothing has been written by then.
    """
    # Against AL stages with some threads each, backpropagation gets as many as are best for it; once in a run's life.
    rival = config is None and form == "bp" and experiment.config.train.mode == "compare"
    config = config or experiment.config
    _check_threads(config.engine.threads)
    if form == "bp":  # one layer: there is nothing to overlap, and nothing to hand to a thread
        if experiment.config.train.mode == "bp" and config.engine.sizes not in (None, (1,)):
            raise ConfigError(f"engine.sizes: found {list(config.engine.sizes or ())}; the BP form is one layer, [1]")
        config = replace(config, engine=replace(config.engine, schedule="sequential", sizes=None))
    with closing(experiment.train_batches(config.train.seed)) as batches:  # batching that does not fit is told here
        if config.engine.devices == "auto":
            _check_graphs(config, all_devices())
            precision = _precision(config, *all_devices())
            with matmul_precision(config.engine.matmul):
                threads = None if rival else config.engine.threads
                placement = _tried(experiment, config, form, batches, precision, threads, say)
        else:
            placement = _asked_for(config, form, layers=len(experiment.package(form, config.train.seed)))
            precision = _precision(config, *placement.devices)
    devices = [parse_device(device) for device in placement.devices]
    check_precision(precision, devices)
    check_compile(config.engine.compile, devices)
    _check_graphs(config, placement.devices)
    engine = replace(
        config.engine,
        devices=tuple(placement.devices),
        sizes=tuple(placement.sizes),
        threads=placement.threads if config.engine.threads is None or rival else config.engine.threads,
    )
    say(f"{form.upper()} on {replace(placement, threads=engine.threads or 1)}, {engine.schedule}, {precision}")
    return replace(config, engine=engine, train=replace(config.train, mode=form, precision=precision))


def _check_graphs(config: RunConfig, devices: Sequence[str]) -> None:
    check_cuda_graphs(
        config.engine.cuda_graphs,
        map(parse_device, devices),
        compile=config.engine.compile,
        on_non_finite=config.train.on_non_finite,
        on_oom=config.engine.on_oom,
    )


def _check_threads(wanted: int | None) -> None:
    """So many as the system would refuse end the process where nothing can be said any more: OpenMP exits by itself."""
    most = max(64, 4 * cores())
    if wanted is not None and wanted > most:
        raise ConfigError(f"engine.threads: {wanted} threads per stage on {cores()} cores; expected at most {most}")


def _precision(config: RunConfig, *devices: str) -> Precision:
    """The one asked for, or what is fast on all of the devices, those that are taken or may be."""
    wanted = config.train.precision
    return fastest_precision(*devices) if wanted == "auto" else wanted


def _tried(
    experiment: Experiment,
    config: RunConfig,
    form: Form,
    batches: EpochBatches,
    precision: Precision,
    threads: int | None,
    say: Say,
) -> Placement:
    """What measurement finds best."""
    if config.engine.sizes is not None:
        raise ConfigError("engine.sizes: found sizes, but devices is auto, which chooses them; name the devices")
    say(f"choosing devices for {form.upper()}")
    trials: list[Placement] = []
    taken = place(
        experiment.package(form, config.train.seed),
        sample_batches(batches, WARM_UP + TRIAL_BATCHES),
        config.engine.schedule,
        threads=threads,
        queue_depth=config.engine.queue_depth,
        precision=precision,
        compile=config.engine.compile,
        on_oom=config.engine.on_oom,
        on_one_gpu=STAGES_MOST if config.engine.cuda_graphs else None,
        on_left_out=lambda trial, error: say(f"  {trial}: left out, {first_line(error)}"),
        on_trial=trials.append,
    )
    if trials:
        say(_table(trials, taken, form))
    return taken


def _table(trials: Sequence[Placement], taken: Placement, form: Form) -> str:
    """What was tried, what it took, and what each stage took alone."""
    rows = [
        [
            _briefly(trial.devices),
            " + ".join(map(str, trial.sizes)),
            trial.threads,
            "-" if trial.stage_s is None else " + ".join(f"{1e3 * seconds:.1f}" for seconds in trial.stage_s),
            None if trial.seconds_per_batch is None else 1e3 * trial.seconds_per_batch,
            "taken" if trial == taken else "",
        ]
        for trial in trials
    ]
    text = StringIO()
    columns = ["devices", "layers of each", "threads each", "alone, ms/batch", "together, ms/batch", ""]
    print_table(f"placements of {form.upper()}, tried", columns, rows, console=Console(file=text))
    return text.getvalue().rstrip()


def _briefly(devices: Sequence[str]) -> str:
    """As ``--devices`` takes them.

    >>> _briefly(["cpu", "cpu", "cuda:1"])
    'cpu*2,cuda:1'
    """
    runs = [(name, len(list(same))) for name, same in groupby(devices)]
    return ",".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def _asked_for(config: RunConfig, form: Form, layers: int) -> Placement:
    """What the user named, checked."""
    engine = config.engine
    devices = device_names(engine.devices) if isinstance(engine.devices, str) else list(engine.devices)
    for device in devices:
        parse_device(device)
    if form == "bp" and config.train.mode == "compare":
        devices = devices[:1]
    if len(devices) > layers:
        raise PlacementError(
            f"engine.devices: {len(devices)} devices for {layers} layer{'s' if layers > 1 else ''} of the "
            f"{form.upper()} form; expected at most {layers}"
        )
    sizes = balance([1.0] * layers, len(devices)) if engine.sizes is None else list(engine.sizes)
    threads = threads_each(devices, schedule_named(engine.schedule))
    return Placement(devices, check_sizes(sizes, layers, len(devices)), threads)


def sample_batches(batches: EpochBatches, count: int) -> list[object]:
    """The first batches of an epoch, over again where it has fewer."""
    batches.set_epoch(0)
    first: list[object] = list(islice(iter(batches), count))
    return (first * -(-count // len(first)))[:count]
