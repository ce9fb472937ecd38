"""One form of a model, trained turn by turn and epoch by epoch, from wherever its newest checkpoint stands."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pipeal.config import RunConfig
from pipeal.core.artifacts import CHECKPOINTS, TENSORBOARD, artifacts
from pipeal.core.errors import ConfigError, CountingError, DataError, Interrupted, UntidyError, add_note, first_line
from pipeal.core.methods import METHODS
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.reporting.progress import Progress
from pipeal.reporting.recorders import Recorder
from pipeal.run.build import Experiment
from pipeal.run.form_costs import FormCosts, form_costs
from pipeal.run.forms import Form, Run
from pipeal.run.outcome import Outcome
from pipeal.run.run_folder import RunFolder
from pipeal.run.turns import Turns, tell_of_graphs
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import Checkpoint, CheckpointStore
from pipeal.training.checkpoint.writer import CheckpointWriter
from pipeal.training.position import Position

_log = logging.getLogger(__name__)


def train_form(run: Run, form: Form) -> Generator[int, None, Outcome]:
    """All turns of one form. What there is by then is written even if the last epoch does not come.

    Yields:
        How many epochs of all turns are behind it: before the first one that is still to come, and after each.

    Raises:
        DataError: What was saved of the run does not fit it.
        Interrupted: The run was asked to end, and saved.
    """
    experiment, train = run.experiment.under(form.config), form.config.train
    folder = form.folder(run.folder.path)
    with CheckpointStore(CHECKPOINTS.at(folder), keep=train.checkpoint.keep) as store:
        resumed = _resumed(run.folder, form, experiment, store)
        outcome = Outcome(form, experiment, folder, Position() if resumed is None else resumed.position)
        try:
            with (
                CheckpointWriter(store) as writer,
                ExitStack() as open_now,
                Progress(epochs=train.epochs, turns=train.repeat, label=form.label) as progress,
            ):
                recorders = [
                    open_now.enter_context(closing(recorder)) for recorder in recorders_of(form.config, folder)
                ]
                turns = Turns(run, outcome, store, writer, recorders, progress)
                yield from turns.train(resumed)
            outcome.unsaved = writer.last_failure
            if run.stop.signal is None:
                outcome.costs = _costs(experiment, form)
        except BaseException as error:
            outcome.write(run.attempts)
            if run.attempts.missing:
                add_note(error, f"cannot write {run.attempts}")
            raise
        outcome.write(run.attempts)
        if (code := run.stop.code()) is not None:  # it came while the last checkpoint was waited for, or this was drawn
            saved_it = f"and saved; {run.folder.way_back} goes on from there"
            how = f"which could not be saved: {outcome.unsaved}" if writer.failing else saved_it
            raise Interrupted(f"interrupted after the last epoch, {how}", code)
    return outcome


def _resumed(folder: RunFolder, form: Form, experiment: Experiment, store: CheckpointStore) -> ResumedTraining | None:
    """The training to go on with, whose checkpoint is then the newest; None to begin with the first batch.

    Raises:
        DataError: It does not fit the data, or the length of the run.
    """
    saved = _saved(store, folder, form.label) if folder.resumed else None
    if saved is None:
        return None
    resumed, train = ResumedTraining.of(saved), form.config.train
    position = resumed.position
    _check_same(experiment.facts, resumed.facts)
    if position.turn > train.repeat:
        raise DataError(f"the checkpoint {saved.path} is of turn {position.turn}, the run has {train.repeat}")
    if (position.epoch, position.part.batches) > (train.epochs, 0):
        raise DataError(
            f"the checkpoint {saved.path} was taken after {position.where}, the run has {train.epochs}; "
            "raise train.epochs, or start over with --resume never"
        )
    _log.info(f"{form.label} goes on after {position.where}")
    tell_of_graphs(form.config)
    try:
        store.make_newest(saved)
    except UntidyError as error:
        _log.warning(str(error))
    return resumed


def _costs(experiment: Experiment, form: Form) -> FormCosts | None:
    """None where they cannot be counted, also for want of memory: no run fails for a column."""
    try:
        return form_costs(experiment, form.config)
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, CountingError) or is_out_of_memory(error)):
            raise
        _log.warning(f"the costs of {form.label} are not counted: {first_line(error)}")
        return None


def _saved(store: CheckpointStore, run: RunFolder, label: str) -> Checkpoint | None:
    """The checkpoint to go on from: the one that was named, if it is of this form, or the newest."""
    return _named(store, run) or _newest(store, label)


def _named(store: CheckpointStore, run: RunFolder) -> Checkpoint | None:
    """None where no checkpoint was named, or that of another form."""
    named = run.checkpoint
    if named is None or named.resolve().parent != store.folder.resolve():
        return None
    return Checkpoint.open(named)


def _newest(store: CheckpointStore, label: str) -> Checkpoint | None:
    """The checkpoint to go on from; where there is none, that is logged."""
    bad = list[str]()
    found = store.newest(bad.append)
    for text in bad:
        _log.warning(text)
    if found is None and bad:
        _log.warning(f"no checkpoint in {store.folder} is as it was written: {label} starts over in the same folder")
    elif found is None:
        _log.warning(f"there is no checkpoint in {store.folder} yet: {label} begins at its first batch")
    return found


def recorders_of(config: RunConfig, folder: Path) -> Iterator[Recorder]:
    """Those that a run keeps its epochs with, in a folder."""
    for artifact in artifacts():
        if artifact.recorder and (artifact is not TENSORBOARD or config.train.tensorboard):
            # By its name: the table of files lies below the recorders.
            recorder: type[Recorder] = resolve_name(f"pipeal.{artifact.writer}:{artifact.recorder}")
            yield recorder(artifact.at(folder), METHODS[config.train.mode].losses)


def require_same_data(experiment: Experiment, folder: Path) -> None:
    """Asks, before anything is done or written, whether a run would go on with the data that it began with.

    Args:
        experiment: Has read the data.
        folder: Of one form of the run.

    Raises:
        DataError: The data is not that of the newest checkpoint.
    """
    saved = newest_of(folder)
    known = None if saved is None else saved.state.get("data")
    if isinstance(known, Mapping):
        _check_same(experiment.facts, known)


def require_same_length(found: RunFolder, form: Form) -> None:
    """Asks, before anything is done or written, whether all turns of a form would have the same epochs.

    Raises:
        ConfigError: Other epochs are asked for than the turns that are done had.
    """
    train, folder = form.config.train, form.folder(found.path)
    if train.repeat == 1:
        return
    saved = _named(CheckpointStore(CHECKPOINTS.at(folder)), found) or newest_of(folder)
    if saved is None:
        return
    # What the run was asked for last need not be what they had: it may have ended before its next checkpoint.
    position = ResumedTraining.of(saved).position
    before = max((row.epoch for row in position.rows if row.turn < position.turn), default=train.epochs)
    if before != train.epochs:
        raise ConfigError(
            f"train.epochs: found {train.epochs}, but {folder} is in turn {position.turn} of {train.repeat}, and those "
            f"before had {before}, over which its figures are means; give {before}, or --resume never"
        )


def newest_of(folder: Path) -> Checkpoint | None:
    """The newest checkpoint of a form; what is wrong with another one is told later."""
    return CheckpointStore(CHECKPOINTS.at(folder)).newest(lambda _: None)


def _check_same(facts: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name, found in facts.items():
        if saved.get(name, found) != found:
            raise DataError(
                f"the data has {name} {found}, but had {saved[name]} when the checkpoint was taken; "
                "put the data back, or start over with --resume never"
            )
