"""The choices that a configuration leaves open, made: devices, sizes, threads, precision."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import cycle, groupby, islice

from pipeal.config import RunConfig
from pipeal.core.errors import ConfigError, PlacementError, first_line
from pipeal.core.methods import COMPARE, METHODS
from pipeal.core.modules import module_of
from pipeal.core.names import Mode
from pipeal.core.options import DEFAULTS, EngineOptions, Precision
from pipeal.core.protocols import TrainableLayer
from pipeal.core.spread import blocks_of
from pipeal.data import EpochBatches
from pipeal.engine import parse_device
from pipeal.engine.devices import all_devices, device_names, fastest_precision
from pipeal.engine.devices.cpus import cores
from pipeal.engine.runner.compiling import check_compile
from pipeal.engine.runner.precision import check_precision
from pipeal.engine.sizes import check_sizes
from pipeal.engine.state.mapped_file import check_folder
from pipeal.methods.al import ALPackage
from pipeal.methods.bp_parts import bp_parts
from pipeal.planning.placement import Placement
from pipeal.planning.planner import TRIAL_BATCHES, fit, place
from pipeal.planning.pure.trials import TimeLimit
from pipeal.reporting import bars
from pipeal.reporting.tables import table_text
from pipeal.run.build import Experiment
from pipeal.run.opening import as_it_runs, engine_options, schedule_of
from pipeal.run.remembered import PlacementCache, key_of

_log = logging.getLogger(__name__)


_NOT_TRIED = "by the weights of layers: those that are offloaded are not tried, which would take copies of all"


def choose(
    experiment: Experiment,
    form: Mode,
    config: RunConfig | None = None,
    *,
    cache: PlacementCache | None = None,
) -> RunConfig:
    """The configuration of one form with nothing left open: the same file, given again, repeats the run.

    Devices, sizes and threads that are left open are those of a choice that was made here before, or else they are
    tried, all forms alike and each within the same bound (:mod:`pipeal.planning.pure.trials`).

    Args:
        experiment: What is to be run.
        form: Which form of it.
        config: What to complete, with threads that stay if there are any; the experiment's configuration if None. Where
            its ``train.mode`` is ``compare``, a method of one layer takes the first of the devices that it names; else
            all. Such a method is never offloaded.
        cache: Where choices are remembered; None for the user's cache folder.

    Raises:
        PipealError: Devices, sizes or batches do not fit; nothing has been written by then.
    """
    config = config or experiment.config
    _check_threads(config.engine.threads)
    method = METHODS[form]
    engine = as_it_runs(config.engine, form)
    if method.is_whole and config.train.mode != form:
        engine = replace(engine, sizes=None)
    config = replace(config, engine=engine)
    auto = config.engine.devices == "auto"
    devices = all_devices() if auto else _named_devices(config, form)
    wanted = config.train.precision
    precision: Precision = fastest_precision(*devices) if wanted == "auto" else wanted
    options = engine_options(config, precision)
    if auto and config.engine.sizes is not None:
        raise ConfigError("engine.sizes: found sizes, but devices is auto, which chooses them; name the devices")
    if method.is_whole and not auto and len(devices) > 1:
        options.check_layout(row=True)
    with closing(experiment.train_batches(config.train.seed)) as batches:  # batching that does not fit is told here
        # The first optimizer imports PyTorch's compiler: seconds.
        with bars.Steps(f"building the {method.label} form"):
            # Offloaded layers may be larger together than memory: they are not tried, and so need no weights here.
            here = None if options.offload == "none" else ()
            package = ALPackage(experiment.layers(form, config.train.seed, here))
        source, placement = _placed(package, config, form, None if auto else devices, options, batches, cache)
    found = [parse_device(device) for device in placement.devices]
    if options.offload == "disk" and options.offload_folder is not None:
        check_folder(options.offload_folder)
    options.check_layout(by_layer=schedule_of(config).by_layer, kinds={device.type for device in found})
    check_precision(precision, found)
    check_compile(config.engine.compile, found)
    engine = replace(
        config.engine,
        devices=tuple(placement.devices),
        sizes=tuple(placement.sizes),
        threads=placement.threads,
    )
    _log.info(f"{method.label} on {placement}, {engine.schedule}, {precision} ({source})")
    if engine.compile != "none":
        _log.info("its first batches are compiled for, which may take minutes")
    return replace(config, engine=engine, train=replace(config.train, mode=form, precision=precision))


def _check_threads(wanted: int | None) -> None:
    """So many as the system would refuse end the process where nothing can be said any more: OpenMP exits by itself."""
    most = max(64, 4 * cores())
    if wanted is not None and wanted > most:
        raise ConfigError(f"engine.threads: {wanted} threads per stage on {cores()} cores; expected at most {most}")


def _placed(
    package: ALPackage,
    config: RunConfig,
    form: Mode,
    devices: list[str] | None,
    options: EngineOptions,
    batches: EpochBatches,
    cache: PlacementCache | None,
) -> tuple[str, Placement]:
    """What was measured to be best, on any devices (None) or those named; and whether that was now or before."""
    label, engine = METHODS[form].label, config.engine
    cache, sample = cache or PlacementCache(), sample_batches(batches, TRIAL_BATCHES)
    layers, units, sizes = list(package), len(package), engine.sizes
    parts: Sequence[TrainableLayer] | None = None
    asked: tuple[object, ...] = ()
    if devices is not None:
        parts = _parts(layers, form) if len(devices) > 1 else None
        units = len(parts or layers)
        sizes = _check_layout(sizes, layers, units, len(devices), form)
        asked = devices, sizes
    if options.offload != "none":
        shown = "as named" if sizes is not None or len(devices or ()) == 1 else _NOT_TRIED
        if devices is None:
            return shown, place(package, sample, engine.schedule, options)
        return shown, fit(package, sample, engine.schedule, devices, options, sizes=sizes, parts=parts)
    key = key_of(package, sample, form, *asked, *_settings(config, options))
    known = cache.recall(key)
    if known is not None and devices in (None, known.placement.devices) and _is_here(known.placement, units):
        return f"{known}; --retry {'tries' if devices is None else 'measures'} again", known.placement
    steps: list[str] = []
    trials: list[Placement] = []
    with bars.trials(f"choosing devices for {label}" if devices is None else f"fitting {label} to its devices") as bar:

        def step(doing: str, spent_s: float, bound_s: float) -> None:
            steps.append(doing)
            bar(doing, spent_s, bound_s)

        # All turns train on what is chosen, once.
        limit = TimeLimit(config.train.epochs * config.train.repeat * len(batches))
        if devices is None:
            _log.info(f"choosing devices for {label}")
            taken = place(
                package,
                sample,
                engine.schedule,
                options,
                limit=limit,
                on_step=step,
                on_left_out=lambda trial, error: _log.info(f"  {trial}: left out, {first_line(error)}"),
                on_trial=trials.append,
            )
            if not trials:
                return "the only choice", taken
            _log.info(_table(trials, taken, form))
        else:
            taken = fit(
                package, sample, engine.schedule, devices, options, sizes=sizes, parts=parts, limit=limit, on_step=step
            )
            if not steps:
                return "as named", taken
    cache.keep(key, taken)
    return f"{'tried' if devices is None else 'measured'} now", taken


def _check_layout(
    sizes: tuple[int, ...] | None, layers: Sequence[TrainableLayer], units: int, devices: int, form: Mode
) -> tuple[int, ...] | None:
    """Asks that layers, or the blocks of a single one, go onto so many devices; gives the sizes to cut them into."""
    method = METHODS[form]
    if devices > units:
        what = ("block" if method.is_whole else "layer") + ("s" if units > 1 else "")
        raise PlacementError(
            f"engine.devices: {devices} devices for {units} {what} of the {method.label} form; expected at most {units}"
        )
    if method.is_whole and devices == 1:  # one layer there, into how many blocks it may be cut or not
        if sizes not in (None, (1,), (blocks_of(layers[0]),)):
            raise ConfigError(
                f"engine.sizes: found {list(sizes or ())} for the {method.label} form on one device; expected [1], "
                "as it is one layer there, or a device for each size"
            )
        return None
    if sizes is not None:
        check_sizes(sizes, units, devices)
    return sizes


def _parts(layers: Sequence[TrainableLayer], form: Mode) -> Sequence[TrainableLayer] | None:
    """What of a form is one layer may be divided into, on several devices."""
    if not METHODS[form].is_whole:
        return None
    try:
        return bp_parts([module_of(layer) for layer in layers])
    except ConfigError:  # no row of blocks: it stays one
        return None


def _settings(config: RunConfig, options: EngineOptions) -> tuple[object, ...]:
    """What else decides how fast a placement is: all options but those that trials do without."""
    tried = replace(options, on_non_finite="ignore", stall_timeout_s=DEFAULTS.stall_timeout_s, dump_folder=None)
    # The model as of layouts, which no weight shows.
    return config.engine.schedule, tried, config.train.accumulate, config.model


def _is_here(placement: Placement, layers: int) -> bool:
    """Whether a remembered choice can be taken: its file may have been changed since, or the machine."""
    try:
        for device in placement.devices:
            parse_device(device)
        _check_threads(placement.threads)
    except (PlacementError, ConfigError):
        return False
    return sum(placement.sizes) == layers


def _table(trials: Sequence[Placement], taken: Placement, form: Mode) -> str:
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
    columns = ["devices", "layers of each", "threads each", "its layers, ms/batch", "together, ms/batch", ""]
    return table_text(f"placements of {METHODS[form].label}, tried", columns, rows)


def _briefly(devices: Sequence[str]) -> str:
    """As ``--devices`` takes them.

    >>> _briefly(["cpu", "cpu", "cuda:1"])
    'cpu*2,cuda:1'
    """
    runs = [(name, len(list(same))) for name, same in groupby(devices)]
    return ",".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def _named_devices(config: RunConfig, form: Mode) -> list[str]:
    """What the user named, as far as it is for this form."""
    engine = config.engine
    devices = device_names(engine.devices)
    for device in devices:
        parse_device(device)
    return devices[:1] if METHODS[form].is_whole and config.train.mode == COMPARE else devices


def sample_batches(batches: EpochBatches, count: int) -> list[object]:
    """The first batches of an epoch, over again where it has fewer."""
    batches.set_epoch(0)
    first: list[object] = list(islice(iter(batches), count))
    return list(islice(cycle(first), count))
