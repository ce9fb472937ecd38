"""Tries settings before a run: every form the same ones, each chosen by held-out samples alone."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from pydantic import TypeAdapter

from pipeal.config import RunConfig, TuneConfig
from pipeal.config.effects import check_effects
from pipeal.core.artifacts import TRIALS
from pipeal.core.checked import checked
from pipeal.core.errors import ConfigError, DataError, Interrupted, NonFiniteError, first_line
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.engine import Pipeline
from pipeal.reporting.progress import Progress
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import Cell, table_text
from pipeal.run.build import Experiment
from pipeal.run.duration import at_its_length
from pipeal.run.forms import Form, Run
from pipeal.run.grid import Grid, Setting, Value, is_inner, parse_grid, settings_of, widen, with_setting
from pipeal.run.opening import course_of, new_layers
from pipeal.run.stopping import Stoppable, worker_failures
from pipeal.run.turns import measured
from pipeal.training.metric import best_rows
from pipeal.training.position import Position
from pipeal.training.row import EpochRow
from pipeal.training.trainer import Leave, Scores, fit

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


def check_grid(experiment: Experiment, forms: Sequence[Form], grid: Grid | None = None) -> None:
    """Asks whether every form can be made, and trained, with every setting of a grid; that of ``tune.grid`` if None.

    Raises:
        ConfigError: One cannot; no trial need be run to know.
    """
    for setting in settings_of(parse_grid(experiment.config) if grid is None else grid):
        for form in forms:
            try:
                for config in (_trial_config(form, setting), tuned(form.config, setting)):
                    check_effects(config, setting)
                    at_its_length(experiment, config, quiet=True)
                if any(key.startswith(("model.", "methods.")) for key in setting):
                    for _ in experiment.under(config).layers(form.mode, config.train.seed):
                        pass  # each goes before the next is made
            except ConfigError as error:
                raise ConfigError(f"--tune {_shown(setting)}: {error}") from error


def tune(run: Run, forms: Sequence[Form]) -> list[Form]:
    """Trains every form with every setting of ``tune.grid``, one seed each, and gives the forms with their best.

    Where the best of any form is at the edge of a range of numbers, the range grows for all of them. What has been
    tried is kept in ``tune.json``, and not tried again. The test set is not looked at.

    Args:
        run: What the forms are of.
        forms: With every choice made but for what the length of the run decides.

    Returns:
        The forms with every choice made.

    Raises:
        ConfigError: A form diverged with all of them.
        DataError: The file of trials is not as it was written.
        Interrupted: The run was asked to end.
    """
    asked = run.experiment.config
    # A form whose choice was written before the others' were has left what there is to try behind it.
    forms = [
        replace(form, config=replace(form.config, tune=asked.tune, train=replace(form.config.train, lr=asked.train.lr)))
        for form in forms
    ]
    search = _Search(run, forms, parse_grid(asked), _read(TRIALS.at(run.folder.path)))
    widened: Counter[tuple[str, bool]] = Counter()
    while True:
        search.try_missing()
        equals = {form.name: search.equals(form) for form in forms}
        settings = [[trial.setting for trial in found] for found in equals.values()]
        wider, notes = widen(search.grid, settings, search.fits, widened)
        if wider == search.grid:
            break
        for key, values in search.grid.items():
            if new := [value for value in wider[key] if value not in values]:
                _log.info(
                    f"the best {key} is at the edge of what was tried: {', '.join(map(str, new))} as well, for all"
                )
        search.grid = wider
    best = {form: found[0] for form, found in equals.items()}
    search.write({form: trial.setting for form, trial in best.items()}, notes)
    for text in (search.table(best), *notes):
        _log.info(text)
    return [
        replace(form, config=at_its_length(run.experiment, tuned(form.config, best[form.name].setting)))
        for form in forms
    ]


@dataclass
class _Search:
    """What is tried, and what came of it.

    Attributes:
        run: What the trials are of.
        forms: All are tried with the same settings.
        grid: The settings; may grow.
        trials: In the order in which they were run.
    """

    run: Run
    forms: Sequence[Form]
    grid: Grid
    trials: list[Trial]

    @property
    def figure(self) -> str:
        """What settings are chosen by."""
        return "held-out accuracy" if self.run.experiment.criterion is None else "held-out loss"

    def find(self, form: Form, setting: Setting) -> Trial | None:
        """The trial of a form with a setting, as long as trials are now."""
        train = _trial_config(form, setting).train
        known = (form.name, setting, train.seed, train.epochs)
        return next((one for one in self.trials if (one.form, one.setting, one.seed, one.epochs) == known), None)

    def try_missing(self) -> None:
        """Runs every trial of the grid that has not been run, and keeps each as it ends."""
        wanted = [(setting, form) for setting in settings_of(self.grid) for form in self.forms]
        for number, (setting, form) in enumerate(wanted, 1):
            if self.find(form, setting) is None:
                label = f"trial {number}/{len(wanted)}  {form.label} {_shown(setting)}"
                self.trials.append(_tried(self.run, form, setting, label))
                self.write({}, [])

    def equals(self, form: Form) -> list[Trial]:
        """The best trials of a form, all as good; first the one at the fewest edges, and of these tried first."""
        found = [self.find(form, setting) for setting in settings_of(self.grid)]
        own = [trial for trial in self.trials if trial in found]
        sign = 1 if self.run.experiment.criterion is None else -1
        scores = [(trial, sign * trial.held_out) for trial in own if trial.held_out is not None]
        if not scores:
            raise ConfigError(
                f"--tune: {form.label} came to no figure with any of the {len(own)} settings tried; expected smaller "
                "learning rates, or other settings"
            )
        best = max(score for _, score in scores)
        equals = [trial for trial, score in scores if score == best]
        return sorted(equals, key=lambda trial: -sum(is_inner(trial.setting[key], self.grid[key]) for key in self.grid))

    def fits(self, grid: Grid) -> bool:
        """Whether every form can be trained with every setting of another grid."""
        try:
            check_grid(self.run.experiment, self.forms, grid)
        except ConfigError:
            return False
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def write(self, chosen: Mapping[str, Setting], notes: Sequence[str]) -> None:
        """Keeps all of it in the run's folder."""
        found = {
            "chosen_by": self.figure,
            "tried": {key: list(values) for key, values in self.grid.items()},
            "trials": [asdict(trial) for trial in self.trials],
            "chosen": chosen,
            "notes": notes,
        }
        write_json(TRIALS.at(self.run.folder.path), found)

    def table(self, best: Mapping[str, Trial]) -> str:
        """Every trial, form by form."""
        rows: list[list[Cell]] = []
        for form, setting in product(self.forms, settings_of(self.grid)):
            if (trial := self.find(form, setting)) is not None:
                figure = "failed" if trial.held_out is None else f"{trial.held_out:.4f}"
                taken = "chosen" if trial == best[form.name] else ""
                rows.append([form.label, *(str(setting[key]) for key in self.grid), trial.best_epoch, figure, taken])
        first = next(iter(best.values()))  # of a run that was taken up, others may be of another length
        title = f"settings tried, each with seed {first.seed} and of so many epochs: {first.epochs}"
        return table_text(title, ["form", *self.grid, "best epoch", self.figure, ""], rows)


def tuned(config: RunConfig, setting: Setting) -> RunConfig:
    """The configuration of a form with what was chosen for it, and nothing left to try."""
    return replace(with_setting(config, setting), tune=TuneConfig())


class _TrialProgress(Progress):
    """Shows the held-out figure alone: no other is taken."""

    def figures(self, row: EpochRow) -> tuple[str, str]:
        told = f"held-out {'accuracy' if row.held_loss is None else 'loss'} {_held(row):.4f}"
        return told, told


def _tried(run: Run, form: Form, setting: dict[str, Value], label: str) -> Trial:
    """Trains a form with a setting."""
    config = at_its_length(run.experiment, _trial_config(form, setting), quiet=True)
    seed, epochs = config.train.seed, config.train.epochs
    tried, stop, way_back = run.experiment.under(config), run.stop, run.folder.way_back
    held, position = tried.held_out(), Position()
    assert held is not None  # else the grid would have been refused

    def evaluate(pipe: Pipeline) -> Scores:
        held_acc, held_loss = measured(pipe, held, tried.criterion, stop)
        return Scores(math.nan, math.nan, held_acc=held_acc, held_loss=held_loss)

    run.require_wanted("with the trials")
    failed: str | None = None
    pipe: Pipeline | None = None
    with (
        worker_failures(stop, way_back),
        closing(tried.train_batches(seed)) as batches,
        _TrialProgress(epochs=epochs, label=label) as progress,
    ):
        try:
            layers = new_layers(tried, config, 1, here=run.site.here(config))
            with run.site.open_pipeline(layers, config, seed, 0, None, run.folder.path) as pipe:
                # A trial has no checkpoint to come to: it ends before the next batch.
                wanted = Stoppable(batches, stop, at_once=True)
                try:
                    for _ in fit(pipe, wanted, evaluate, course_of(config), progress, position):
                        pass
                except Leave as leave:
                    raise Interrupted(
                        f"interrupted in a trial of --tune; {way_back} goes on with it, the trials before it are kept",
                        stop.code() or 1,
                    ) from leave
        except NonFiniteError as error:
            failed = f"diverged, {first_line(error)}"
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or not run.site.can_go_on(pipe):
                raise
            failed = first_line(error)
    best = best_rows(position.rows)
    if failed is not None or not best:
        _log.warning(f"{label}: {failed or 'diverged'}")
        return Trial(form.name, setting, seed, epochs, None, None)
    (row,) = best
    return Trial(form.name, setting, seed, epochs, row.epoch, _held(row))


def _held(row: EpochRow) -> float | None:
    return row.held_acc if row.held_loss is None else row.held_loss


def _trial_config(form: Form, setting: Setting) -> RunConfig:
    """Of one turn, and as long as was asked for."""
    config = with_setting(form.config, setting)
    train = replace(config.train, repeat=1, epochs=config.tune.epochs or config.train.epochs)
    return replace(config, train=train, tune=TuneConfig())


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


def _shown(setting: Setting) -> str:
    return " ".join(f"{key}={value}" for key, value in setting.items())
