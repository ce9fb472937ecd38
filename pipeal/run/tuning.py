"""Tries settings before a run: every form the same ones, each chosen by held-out samples alone."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from pydantic import TypeAdapter

from pipeal.config import RunConfig, TuneConfig
from pipeal.config.effects import check_effects
from pipeal.core.artifacts import TRIALS
from pipeal.core.errors import ConfigError, DataError, Interrupted, NonFiniteError, first_line
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.engine import Pipeline
from pipeal.reporting.progress import Progress
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import Cell, table_text
from pipeal.run.build import Experiment
from pipeal.run.duration import at_its_length
from pipeal.run.forms import Form
from pipeal.run.grid import (
    MOST_WIDENINGS,
    Grid,
    Setting,
    Value,
    beyond,
    is_inner,
    numbers,
    parse_grid,
    settings_of,
    with_setting,
)
from pipeal.run.opening import course_of, new_package
from pipeal.run.run_folder import RunFolder
from pipeal.run.stopping import Stoppable, StopRequest, worker_failures
from pipeal.run.turns import measured
from pipeal.training.checkpoint.checked import checked
from pipeal.training.metric import best_rows
from pipeal.training.position import Position
from pipeal.training.row import EpochRow
from pipeal.training.trainer import Scores, fit

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """A training with one setting.

    Attributes:
        form: The name of the form.
        setting: What was tried.
        seed: It was trained with.
        epochs: It was trained for.
        best_epoch: The best of them by held-out samples; None where the training diverged, or its memory ran out.
        held_out: The accuracy, or loss, of that epoch on them; likewise.
    """

    form: str
    setting: dict[str, Value]
    seed: int
    epochs: int
    best_epoch: int | None
    held_out: float | None


_TRIALS = TypeAdapter(list[Trial])


def check_grid(experiment: Experiment, forms: Sequence[Form]) -> None:
    """Asks whether every form can be made, and trained, with every setting of ``tune.grid``.

    Raises:
        ConfigError: One cannot; no trial need be run to know.
    """
    for setting in settings_of(parse_grid(experiment.config)):
        for form in forms:
            try:
                _check_setting(experiment, form, setting)
            except ConfigError as error:
                raise ConfigError(f"--tune {_shown(setting)}: {error}") from error


def tune(
    experiment: Experiment,
    forms: Sequence[Form],
    run: RunFolder,
    stop: StopRequest,
    open_pipe: Callable[..., Pipeline],
) -> list[Form]:
    """Trains every form with every setting of ``tune.grid``, one seed each, and gives the forms with their best.

    Where the best of any form is at the edge of a range of numbers, the range grows for all of them. What has been
    tried is kept in ``tune.json``, and not tried again. The test set is not looked at.

    Args:
        experiment: What is to be run.
        forms: With every choice made but for what the length of the run decides.
        run: The run's folder.
        stop: Whether the run is to end.
        open_pipe: As :func:`pipeal.run.opening.open_pipeline`.

    Returns:
        The forms with every choice made.

    Raises:
        ConfigError: A form diverged with all of them.
        DataError: The file of trials is not as it was written.
        Interrupted: The run was asked to end.
    """
    grid = parse_grid(experiment.config)
    # A form whose choice was written before the others' were has left what there is to try behind it.
    forms = [
        replace(
            form,
            config=replace(
                form.config,
                tune=experiment.config.tune,
                train=replace(form.config.train, lr=experiment.config.train.lr),
            ),
        )
        for form in forms
    ]
    name = "held-out accuracy" if experiment.criterion is None else "held-out loss"
    trials = _read(TRIALS.at(run.path))
    widened: Counter[tuple[str, bool]] = Counter()
    while True:
        wanted = [(setting, form) for setting in settings_of(grid) for form in forms]
        for number, (setting, form) in enumerate(wanted, 1):
            if _find(trials, form, setting) is None:
                label = f"trial {number}/{len(wanted)}  {form.label} {_shown(setting)}"
                trials.append(_tried(experiment, form, setting, label, run, stop, open_pipe))
                write_json(TRIALS.at(run.path), _kept(name, grid, trials, {}, []))
        equals = {form.name: _equals(experiment, form, grid, trials) for form in forms}
        best = {form: found[0] for form, found in equals.items()}
        settings = [[trial.setting for trial in found] for found in equals.values()]
        wider, notes = widen(grid, settings, partial(_fits, experiment, forms), widened)
        if wider == grid:
            break
        for key in grid:
            if new := [value for value in wider[key] if value not in grid[key]]:
                _log.info(
                    f"the best {key} is at the edge of what was tried: {', '.join(map(str, new))} as well, for all"
                )
        grid = wider
    write_json(TRIALS.at(run.path), _kept(name, grid, trials, {form: best[form].setting for form in best}, notes))
    _log.info(_table(name, forms, grid, trials, best))
    for note in notes:
        _log.info(note)
    return [
        replace(form, config=at_its_length(experiment, tuned(form.config, best[form.name].setting))) for form in forms
    ]


def tuned(config: RunConfig, setting: Setting) -> RunConfig:
    """The configuration of a form with what was chosen for it, and nothing left to try."""
    return replace(with_setting(config, setting), tune=TuneConfig())


def widen(
    grid: Grid, best: Sequence[Sequence[Setting]], fits: Callable[[Grid], bool], widened: Counter[tuple[str, bool]]
) -> tuple[Grid, list[str]]:
    """The grid with a further value at every edge where one of the best is, and why it has none where it has not.

    Args:
        grid: What was tried.
        best: For each form the best setting, and those that are as good: a range grows where all of them are at its
            edge.
        fits: Whether all settings of a grid can be trained with.
        widened: How often, by key and whether below; counted up.
    """
    wider, notes = dict(grid), list[str]()
    for key, values in grid.items():
        ordered = numbers(values)
        if ordered is None or len(ordered) < 2:
            continue
        for below in (True, False):
            edge = ordered[0] if below else ordered[-1]
            if not any(all(setting[key] == edge for setting in equals) for equals in best):
                continue
            if widened[key, below] == MOST_WIDENINGS:
                notes.append(f"the best {key} is still at the edge of what was tried, {edge:g}: widened twice, no more")
                continue
            new = beyond(values, below=below)
            if new is None or not fits({**wider, key: (new,)}):
                notes.append(f"the best {key} is at the edge of what was tried, {edge:g}: there is no further value")
                continue
            widened[key, below] += 1
            wider[key] = (new, *wider[key]) if below else (*wider[key], new)
    return wider, notes


def _fits(experiment: Experiment, forms: Sequence[Form], grid: Grid) -> bool:
    try:
        for setting in settings_of(grid):
            for form in forms:
                _check_setting(experiment, form, setting)
    except ConfigError:
        return False
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _check_setting(experiment: Experiment, form: Form, setting: Setting) -> None:
    """Asks for what a training would refuse before its first batch, of a trial and of the run.

    Raises:
        ConfigError: It would.
    """
    for config in (_trial_config(form, setting), tuned(form.config, setting)):
        check_effects(config, setting)
        at_its_length(experiment, config, quiet=True)
    if any(key.startswith("model.") for key in setting):
        experiment.under(config).package(form.mode, config.train.seed)


class _TrialProgress(Progress):
    """Shows the held-out figure alone: no other is taken."""

    def figures(self, row: EpochRow) -> tuple[str, str]:
        found = row.held_acc if row.held_loss is None else row.held_loss
        told = f"held-out {'accuracy' if row.held_loss is None else 'loss'} {found:.4f}"
        return told, told


class _Unsaved:
    """Ends a trial where the run is asked to end; trials have no checkpoints."""

    def __init__(self, stop: StopRequest, way_back: str) -> None:
        self._stop = stop
        self._way_back = way_back

    def after_batch(self, pipe: Pipeline, position: Position) -> bool:  # noqa: ARG002
        return self._stop.signal is not None

    def before_evaluation(self, pipe: Pipeline, position: Position) -> None:
        pass

    def after_epoch(self, pipe: Pipeline, position: Position) -> None:
        pass

    def leave(self, pipe: Pipeline, position: Position) -> NoReturn:  # noqa: ARG002
        raise Interrupted(
            f"interrupted in a trial of --tune; {self._way_back} goes on with it, the trials before it are kept",
            self._stop.code() or 1,
        )


def _tried(
    experiment: Experiment,
    form: Form,
    setting: dict[str, Value],
    label: str,
    run: RunFolder,
    stop: StopRequest,
    open_pipe: Callable[..., Pipeline],
) -> Trial:
    """Trains a form with a setting."""
    config = at_its_length(experiment, _trial_config(form, setting), quiet=True)
    seed, epochs = config.train.seed, config.train.epochs
    tried = experiment.under(config)
    held, position, saves = tried.held_out(), Position(), _Unsaved(stop, run.way_back)
    assert held is not None  # else the grid would have been refused

    def evaluate(pipe: Pipeline) -> Scores:
        held_acc, held_loss = measured(pipe, held, tried.criterion, stop)
        return Scores(math.nan, math.nan, held_acc=held_acc, held_loss=held_loss)

    if stop.signal is not None:
        raise Interrupted(f"interrupted; {run.way_back} goes on with the trials", stop.code() or 1)
    failed: str | None = None
    with (
        worker_failures(stop, run.way_back),
        closing(tried.train_batches(seed)) as batches,
        _TrialProgress(epochs=epochs, label=label) as progress,
    ):
        try:
            package = new_package(tried, config, 1)
            with open_pipe(package, config, seed, 0, None, run.path) as pipe:
                for _ in fit(pipe, Stoppable(batches, stop), evaluate, course_of(config), progress, position, saves):
                    pass
        except NonFiniteError as error:
            failed = f"diverged, {first_line(error)}"
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            failed = first_line(error)
    best = best_rows(position.rows)
    if failed is not None or not best or best[0].score == -math.inf:
        _log.warning(f"{label}: {failed or 'diverged'}")
        return Trial(form.name, setting, seed, epochs, None, None)
    (row,) = best
    return Trial(form.name, setting, seed, epochs, row.epoch, row.held_acc if row.held_loss is None else row.held_loss)


def _trial_config(form: Form, setting: Setting) -> RunConfig:
    """Of one turn, and as long as was asked for."""
    config = with_setting(form.config, setting)
    train = replace(config.train, repeat=1, epochs=config.tune.epochs or config.train.epochs)
    return replace(config, train=train, tune=TuneConfig())


def _find(trials: Sequence[Trial], form: Form, setting: Setting) -> Trial | None:
    train = _trial_config(form, setting).train
    known = (form.name, setting, train.seed, train.epochs)
    return next((one for one in trials if (one.form, one.setting, one.seed, one.epochs) == known), None)


def _equals(experiment: Experiment, form: Form, grid: Grid, trials: Sequence[Trial]) -> list[Trial]:
    """The best trials of a form, all as good; first the one that is at the fewest edges, and of these tried first."""
    found = [_find(trials, form, setting) for setting in settings_of(grid)]
    own = [trial for trial in trials if trial in found]
    sign = 1 if experiment.criterion is None else -1
    ended = [trial for trial in own if trial.held_out is not None]
    if not ended:
        raise ConfigError(
            f"--tune: {form.label} came to no figure with any of the {len(own)} settings tried; expected smaller "
            "learning rates, or other settings"
        )
    best = max(sign * (trial.held_out or 0.0) for trial in ended)
    equals = [trial for trial in ended if sign * (trial.held_out or 0.0) == best]
    return sorted(equals, key=lambda trial: -sum(is_inner(trial.setting[key], grid[key]) for key in grid))


def _kept(
    name: str, grid: Grid, trials: Sequence[Trial], chosen: dict[str, dict[str, Value]], notes: Sequence[str]
) -> dict[str, object]:
    return {
        "chosen_by": name,
        "tried": {key: list(values) for key, values in grid.items()},
        "trials": [asdict(trial) for trial in trials],
        "chosen": chosen,
        "notes": list(notes),
    }


def _read(path: Path) -> list[Trial]:
    """What was tried before the run was ended."""
    try:
        return checked(_TRIALS, json.loads(path.read_text(encoding="utf-8"))["trials"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not as the run wrote it ({first_line(error)}); put it back, or remove it"
        ) from error


def _table(name: str, forms: Sequence[Form], grid: Grid, trials: Sequence[Trial], best: dict[str, Trial]) -> str:
    """Every trial, form by form."""
    rows: list[list[Cell]] = []
    for form in forms:
        for setting in settings_of(grid):
            trial = _find(trials, form, setting)
            if trial is None:
                continue
            figure = "failed" if trial.held_out is None else f"{trial.held_out:.4f}"
            taken = "chosen" if trial == best[form.name] else ""
            rows.append([form.label, *(str(setting[key]) for key in grid), trial.best_epoch, figure, taken])
    seed = trials[0].seed
    title = f"settings tried, each with seed {seed} and of so many epochs: {trials[0].epochs}"
    return table_text(title, ["form", *grid, "best epoch", name, ""], rows)


def _shown(setting: Setting) -> str:
    return " ".join(f"{key}={value}" for key, value in setting.items())
