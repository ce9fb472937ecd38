"""A run from end to end: build, place, train each form for each turn, and leave tables, figures and pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean

import torch

from pipeal.cli.build import Experiment
from pipeal.config import EngineConfig, RunConfig, dump_config
from pipeal.engine import Pipeline, Window, parse_device
from pipeal.engine.allocator import keep_freed_memory
from pipeal.engine.costs import WARM_UP, Placement, place
from pipeal.engine.device import Precision, fastest_precision
from pipeal.engine.pipeline import cores
from pipeal.engine.placement import balance, check_sizes
from pipeal.errors import ConfigError, PlacementError
from pipeal.train.environment import environment
from pipeal.train.plots import draw_curves
from pipeal.train.progress import Progress
from pipeal.train.recorders import CsvRecorder, EpochRow, write_json
from pipeal.train.tables import print_table
from pipeal.train.timeline import draw_timeline
from pipeal.train.trainer import Course, EpochBatches, Totals, accuracy, fit

TRIAL_BATCHES = 10
"""Batches a placement is tried with, beside those for warming up."""

TRACE_FROM = 10
"""The batch from which the timeline is recorded: the pipeline is full by then."""


@dataclass(frozen=True)
class Outcome:
    """What training one form came to.

    Attributes:
        form: ``al`` or ``bp``.
        rows: One per epoch and turn.
        totals: Of all turns together.
        placement: Where the layers were.
        parameters: Effective and affiliated parameters.
        folder: Where its files are.
    """

    form: str
    rows: list[EpochRow]
    totals: Totals
    placement: Placement
    parameters: tuple[int, int]
    folder: Path

    @property
    def best(self) -> float:
        """The best test accuracy, averaged over turns."""
        turns = sorted({row.turn for row in self.rows})
        return mean(max(row.test_acc for row in self.rows if row.turn == turn) for turn in turns)

    @property
    def last(self) -> float:
        """The test accuracy after the last epoch, averaged over turns."""
        epochs = max(row.epoch for row in self.rows)
        return mean(row.test_acc for row in self.rows if row.epoch == epochs)

    @property
    def epoch_s(self) -> float:
        """Seconds of training per epoch."""
        return mean(row.epoch_time for row in self.rows)


def run_experiment(make: Callable[[Callable[[str], None]], Experiment]) -> Path:
    """Carries out an experiment and shows what came of it.

    Args:
        make: Builds the experiment; it is given a function to say what it is doing.

    Returns:
        The run's folder.

    Raises:
        PipealError: A user's mistake, in one line.
    """
    keep_freed_memory()
    experiment = make(_say)
    config = experiment.config
    forms = ["al", "bp"] if config.train.mode == "compare" else [config.train.mode]
    placements = {form: _placement(experiment, form) for form in forms}
    folder = new_folder(Path(config.out), f"{config.dataset}-{config.model.name}-{config.train.mode}")
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    outcomes = []
    for form, placement in placements.items():
        own = folder / form if len(forms) > 1 else folder
        outcomes.append(_train(experiment, form, placement, own))
    if len(forms) > 1:
        _write_curves(outcomes, config, folder)
        write_json(folder / "summary.json", {outcome.form: _summary(experiment, outcome) for outcome in outcomes})
    _show(config, outcomes, folder)
    return folder


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def new_folder(root: Path, name: str) -> Path:
    """Makes the first folder of ``name-001``, ``name-002``, … that is not there yet."""
    number = 1
    while True:
        folder = root / f"{name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise ConfigError(f"out: cannot make {folder}: {error.strerror or error}; choose another --out") from error
        return folder


def _train(experiment: Experiment, form: str, placement: Placement, folder: Path) -> Outcome:
    config = experiment.config
    train_part, test_part = experiment.train_evaluation(), experiment.test_evaluation()
    course = Course(
        epochs=config.train.epochs,
        decay=config.train.lr.decay,
        per=config.train.lr.per,
        end_over_base=(config.train.lr.end or 0.0) / config.train.lr.base,
        warmup=config.train.lr.warmup,
    )
    rows: list[EpochRow] = []
    totals = Totals()
    parameters = (0, 0)
    with (
        CsvRecorder(folder / "epochs.csv") as recorder,
        Progress(epochs=course.epochs, turns=config.train.repeat, label=form.upper()) as progress,
    ):
        progress.note(f"{form.upper()} on {placement}")
        for turn in range(1, config.train.repeat + 1):
            seed = config.train.seed + turn - 1
            package = experiment.package(form, seed)
            batches = experiment.train_batches(seed)
            parameters = package.effective_parameters(), package.affiliated_parameters()
            with Pipeline(
                package,
                placement.devices,
                _schedule(config, form),
                sizes=placement.sizes,
                queue_depth=config.engine.queue_depth,
                seed=seed,
                threads=placement.threads,
                precision=_precision(config, placement.devices[0]),
                stall_timeout_s=config.engine.stall_timeout_s,
                trace=_window(config.engine, batches) if turn == 1 else None,
            ) as pipe:
                for row in fit(
                    pipe,
                    batches,
                    lambda pipe: (accuracy(pipe, train_part), accuracy(pipe, test_part)),
                    course,
                    progress,
                    totals,
                    turn=turn,
                ):
                    recorder.write(row)
                    rows.append(row)
                if turn == 1:
                    title = f"{config.dataset} {config.model.name} {form.upper()}, {pipe.schedule.name}"
                    draw_timeline(pipe.spans(), folder / "timeline.png", title=title, devices=placement.devices)
    outcome = Outcome(form, rows, totals, placement, parameters, folder)
    _write_curves([outcome], config, folder)
    write_json(folder / "summary.json", _summary(experiment, outcome))
    return outcome


def _schedule(config: RunConfig, form: str) -> str:
    """Backpropagation is one layer: there is nothing to overlap, and nothing to hand to a thread."""
    return "sequential" if form == "bp" else config.engine.schedule


def _precision(config: RunConfig, device: str) -> Precision:
    wanted = config.train.precision
    return fastest_precision(device) if wanted == "auto" else wanted


def _placement(experiment: Experiment, form: str) -> Placement:
    """The devices that were asked for, checked, or those that measurement finds best."""
    config, engine = experiment.config, experiment.config.engine
    package = experiment.package(form, config.train.seed)
    layers = len(package)
    if engine.devices == "auto":
        if engine.sizes is not None:
            raise ConfigError("engine.sizes: found sizes, but devices is auto, which chooses them; name the devices")
        _say(f"choosing devices for {form.upper()}")
        chosen = place(
            package,
            _sample(experiment.train_batches(config.train.seed), WARM_UP + TRIAL_BATCHES),
            _schedule(config, form),
            precision=_precision(config, "cuda:0" if torch.cuda.is_available() else "cpu"),
            on_trial=lambda trial: _say(f"  {trial}: {1e3 * (trial.seconds_per_batch or 0):.1f} ms/batch"),
        )
        return chosen if engine.threads is None else replace(chosen, threads=engine.threads)
    devices = [engine.devices] if isinstance(engine.devices, str) else list(engine.devices)
    for device in devices:
        parse_device(device)
    if form == "bp" and config.train.mode == "compare":
        devices = devices[:1]
    if len(devices) > layers:
        raise PlacementError(
            f"engine.devices: {len(devices)} devices for {layers} layer{'s' if layers > 1 else ''} of the "
            f"{form.upper()} form; expected at most {layers}"
        )
    sizes = balance([1.0] * layers, len(devices)) if engine.sizes is None or form == "bp" else engine.sizes
    serial = _schedule(config, form) == "sequential"
    threads = engine.threads or (cores() if serial else max(1, cores() // len(devices)))
    return Placement(devices, check_sizes(sizes, layers, len(devices)), threads)


def _sample(batches: EpochBatches, count: int) -> list[object]:
    """The first batches of an epoch, over again where it has fewer."""
    batches.set_epoch(0)
    first: list[object] = list(islice(iter(batches), count))
    return (first * -(-count // len(first)))[:count]


def _window(engine: EngineConfig, batches: EpochBatches) -> Window:
    """Steady state, if the first epoch is long enough to reach it."""
    batches.set_epoch(0)
    count = min(engine.trace_batches, len(batches))
    return Window(min(TRACE_FROM, len(batches) - count), count)


def _write_curves(outcomes: Iterable[Outcome], config: RunConfig, folder: Path) -> None:
    rows = {outcome.form.upper(): outcome.rows for outcome in outcomes}
    draw_curves(rows, folder / "curves.png", title=f"{config.dataset} {config.model.name}")


def _summary(experiment: Experiment, outcome: Outcome) -> dict[str, object]:
    totals, config = outcome.totals, experiment.config
    return {
        "dataset": config.dataset,
        "model": config.model.name,
        "form": outcome.form,
        "best_test_accuracy": outcome.best,
        "last_test_accuracy": outcome.last,
        "seconds_per_epoch": outcome.epoch_s,
        "samples_per_s": totals.samples / totals.seconds,
        "tokens_per_s": totals.tokens / totals.seconds,
        "padding_share": totals.padding_share,
        "samples_per_batch": totals.samples / totals.batches,
        "schedule": _schedule(config, outcome.form),
        "precision": _precision(config, outcome.placement.devices[0]),
        "placement": asdict(outcome.placement),
        "stages": [
            {
                "busy_share": share,
                "busy_s": {str(action): seconds for action, seconds in stage.busy.items()},
                "waiting_s": stage.waiting,
            }
            for share, stage in zip(totals.busy_share, totals.stages, strict=True)
        ],
        "effective_parameters": outcome.parameters[0],
        "affiliated_parameters": outcome.parameters[1],
        "data": experiment.facts,
        "environment": environment(),
    }


def _show(config: RunConfig, outcomes: list[Outcome], folder: Path) -> None:
    slowest = max(outcome.epoch_s for outcome in outcomes)
    columns = ["form", "stages", "best test acc", "last test acc", "s/epoch", "samples/s", "tokens/s", "busy"]
    if len(outcomes) > 1:
        columns.append("speed-up")
    rows = []
    for outcome in outcomes:
        totals = outcome.totals
        cells = [
            outcome.form.upper(),
            f"{len(outcome.placement.devices)}",
            f"{outcome.best:.4f}",
            f"{outcome.last:.4f}",
            f"{outcome.epoch_s:.2f}",
            f"{totals.samples / totals.seconds:,.0f}",
            f"{totals.tokens / totals.seconds:,.0f}",
            " ".join(f"{share:.0%}" for share in totals.busy_share),
        ]
        rows.append([*cells, f"{slowest / outcome.epoch_s:.2f}×"] if len(outcomes) > 1 else cells)
    print_table(f"{config.dataset} {config.model.name}, {config.train.epochs} epochs", columns, rows)
    padding = outcomes[0].totals.padding_share
    print(f"padding: {padding:.1%} of the tokens trained on")
    print(f"files:   {folder}")
    pictures = [folder / "curves.png", *(outcome.folder / "timeline.png" for outcome in outcomes[:1])]
    for name, picture in zip(("curves", "timeline"), pictures, strict=True):
        print(f"{name + ':':<9}{picture}")
