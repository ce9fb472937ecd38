"""A run from end to end: build, choose, train each form for each turn, and leave what there is to look at."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path

from pipeal.al import ALPackage
from pipeal.cli.build import Experiment
from pipeal.cli.choices import Form, choose
from pipeal.cli.outcome import Outcome, show, write_curves
from pipeal.config import RunConfig, dump_config
from pipeal.engine import Pipeline, Window
from pipeal.engine.allocator import keep_freed_memory
from pipeal.errors import ConfigError
from pipeal.train.calibration import calibrate
from pipeal.train.exit_plot import draw_exits
from pipeal.train.exits import ExitTable, exit_table
from pipeal.train.progress import Progress
from pipeal.train.recorders import CsvRecorder, write_json
from pipeal.train.timeline import draw_timeline
from pipeal.train.trainer import Course, EpochBatches, Totals, accuracy, fit

TRACE_FROM = 10
"""The batch from which the timeline is recorded: the pipeline is full by then."""


def run_experiment(make: Callable[[Callable[[str], None]], Experiment]) -> Path:
    """Carries out an experiment and shows what came of it.

    Args:
        make: Builds the experiment; it is given a function to say what it is doing.

    Returns:
        The run's folder.

    Raises:
        PipealError: A user's mistake, in one line; by then nothing has been written.
    """
    keep_freed_memory()
    experiment = make(_say)
    config = experiment.config
    forms: tuple[Form, ...] = ("al", "bp") if config.train.mode == "compare" else (config.train.mode,)
    chosen = [choose(experiment, form, _say) for form in forms]
    folder = new_folder(Path(config.out), f"{config.dataset}-{config.model.name}-{config.train.mode}")
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    experiment.save(folder)
    outcomes = []
    for choice in chosen:
        own = folder / choice.train.mode if len(forms) > 1 else folder
        own.mkdir(exist_ok=True, parents=True)
        (own / "config.yaml").write_text(dump_config(choice), encoding="utf-8")
        outcomes.append(_train(experiment, choice, own))
    if len(forms) > 1:
        write_curves(outcomes, folder)
        write_json(folder / "summary.json", {outcome.form: outcome.summary() for outcome in outcomes})
    show(outcomes, folder)
    return folder


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def new_folder(root: Path, name: str) -> Path:
    """Makes the first folder of ``name-001``, ``name-002``, … that is not there yet."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            folder = root / f"{name}-{number:03d}"
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise ConfigError(f"out: cannot use {root}: {error.strerror or error}; choose another --out") from error
    raise AssertionError("unreachable: counting does not end")


def _train(experiment: Experiment, config: RunConfig, folder: Path) -> Outcome:
    """All turns of one form. What there is by then is written even if the last epoch does not come."""
    form, rate = config.train.mode, config.train.lr
    train_part, test_part = experiment.train_evaluation(), experiment.test_evaluation()
    course = Course(
        epochs=config.train.epochs,
        decay=rate.decay,
        per=rate.per,
        end_over_base=(rate.end or 0.0) / rate.base,
        warmup=rate.warmup,
    )
    package = experiment.package(form, config.train.seed)
    parameters = package.effective_parameters(), package.affiliated_parameters()
    outcome = Outcome(config, [], Totals(), experiment.facts, experiment.lengths, parameters, folder)
    try:
        with (
            CsvRecorder(folder / "epochs.csv") as recorder,
            Progress(epochs=course.epochs, turns=config.train.repeat, label=outcome.form) as progress,
        ):
            for turn in range(1, config.train.repeat + 1):
                seed = (config.train.seed + turn - 1) % 2**63
                package = package if turn == 1 else experiment.package(form, seed)
                with ExitStack() as open_now:
                    batches = open_now.enter_context(closing(experiment.train_batches(seed)))
                    traced = _window(config.engine.trace_batches, batches) if turn == 1 else None
                    pipe = open_now.enter_context(_pipeline(package, config, seed, traced))
                    for row in fit(
                        pipe,
                        batches,
                        lambda pipe: (accuracy(pipe, train_part), accuracy(pipe, test_part)),
                        course,
                        progress,
                        outcome.totals,
                        turn=turn,
                    ):
                        recorder.write(row)
                        outcome.rows.append(row)
                        if len(outcome.rows) == 1:
                            title = f"{config.dataset} {config.model.name} {outcome.form}, {pipe.schedule.name}"
                            devices = [str(stage.device) for stage in pipe.stages]
                            draw_timeline(pipe.spans(), folder / "timeline.png", title=title, devices=devices)
                    if turn == config.train.repeat:
                        outcome.exits = measure_exits(experiment, config, pipe, folder)
    finally:
        if outcome.rows:
            outcome.write()
    return outcome


def _pipeline(package: ALPackage, config: RunConfig, seed: int, traced: Window | None) -> Pipeline:
    engine = config.engine
    assert config.train.precision != "auto"  # chosen by now
    return Pipeline(
        package,
        engine.devices,
        engine.schedule,
        sizes=engine.sizes,
        queue_depth=engine.queue_depth,
        seed=seed,
        threads=engine.threads,
        precision=config.train.precision,
        compile=engine.compile,
        stall_timeout_s=engine.stall_timeout_s,
        trace=traced,
    )


def measure_exits(experiment: Experiment, config: RunConfig, pipe: Pipeline, folder: Path) -> ExitTable | None:
    """Accuracy and cost of every exit and of the calibrated early exit, kept as ``exits.json`` and ``exits.png``.

    None for a model with a single exit, and where the configuration holds out no samples to calibrate on.
    """
    held_out = experiment.held_out()
    if held_out is None or config.train.mode == "bp":
        return None
    _say("calibrating the early exit on held-out samples")
    table = exit_table(
        pipe, experiment.test_evaluation(), calibrate(pipe, held_out, tolerance=config.train.exit_tolerance)
    )
    write_json(folder / "exits.json", table.summary())
    draw_exits(table, folder / "exits.png", title=f"{config.dataset} {config.model.name}: exits")
    return table


def _window(count: int, batches: EpochBatches) -> Window:
    """Steady state, if the first epoch is long enough to reach it."""
    batches.set_epoch(0)
    count = min(count, len(batches))
    return Window(min(TRACE_FROM, len(batches) - count), count)
