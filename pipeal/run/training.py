"""One form of a model, trained turn by turn and epoch by epoch, from wherever its newest checkpoint stands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from pipeal.config import RunConfig
from pipeal.core.artifacts import CHECKPOINTS, ROWS, ROWS_JSON, TENSORBOARD
from pipeal.core.errors import DataError, Interrupted, UntidyError, first_line
from pipeal.core.methods import METHODS
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.engine import Pipeline
from pipeal.engine.runner.error_context import add_note
from pipeal.reporting.attempts import Attempts
from pipeal.reporting.progress import Progress
from pipeal.reporting.recorders import CsvRecorder, JsonLinesRecorder, Recorder
from pipeal.reporting.tensorboard import TensorBoardRecorder
from pipeal.run.build import Experiment
from pipeal.run.form_costs import FormCosts, form_costs
from pipeal.run.forms import Form
from pipeal.run.opening import new_package, open_pipeline
from pipeal.run.outcome import Outcome
from pipeal.run.run_folder import RunFolder
from pipeal.run.stopping import StopRequest
from pipeal.run.turns import Turns, tell_of_graphs
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import Checkpoint, CheckpointStore
from pipeal.training.checkpoint.writer import CheckpointWriter
from pipeal.training.position import Position

_log = logging.getLogger(__name__)


def train_form(
    experiment: Experiment,
    form: Form,
    folder: Path,
    run: RunFolder,
    stop: StopRequest,
    attempts: Attempts,
    open_pipe: Callable[..., Pipeline] | None = None,
) -> Generator[int, None, Outcome]:
    """All turns of one form. What there is by then is written even if the last epoch does not come.

    Args:
        experiment: What is to be run.
        form: Which form of it.
        folder: Its own.
        run: The run's folder, told how the run stands.
        stop: Whether the run is to end; of all its forms.
        attempts: What is written beside the checkpoints goes through it.
        open_pipe: Opens the pipeline of a turn, as :func:`open_pipeline` does.

    Yields:
        How many epochs of all turns are behind it: before the first one that is still to come, and after each.

    Raises:
        DataError: What was saved of the run does not fit it.
        Interrupted: The run was asked to end, and saved.
    """
    config, train = form.config, form.config.train
    experiment = experiment.under(config)
    with CheckpointStore(CHECKPOINTS.at(folder), keep=train.checkpoint.keep) as store:
        saved = _saved(store, run, form.label) if run.resumed else None
        resumed = None if saved is None else ResumedTraining.of(saved)
        position = Position() if resumed is None else resumed.position
        if saved is not None and resumed is not None:
            _check_same(experiment.facts, resumed.facts)
            if position.turn > train.repeat:
                raise DataError(f"the checkpoint {saved.path} is of turn {position.turn}, the run has {train.repeat}")
            if (position.epoch, position.part.batches) > (train.epochs, 0):
                raise DataError(
                    f"the checkpoint {saved.path} was taken after {position.where}, the run has {train.epochs}; "
                    "raise train.epochs, or start over with --resume never"
                )
            _log.info(f"{form.label} goes on after {position.where}")
            tell_of_graphs(config)
        package = new_package(experiment, config, position.turn)
        parameters = package.effective_parameters(), package.affiliated_parameters()
        facts, lengths = experiment.facts, experiment.lengths
        outcome = Outcome(form, position.rows, position.totals, facts, lengths, parameters, folder)
        try:
            with (
                CheckpointWriter(store) as writer,
                ExitStack() as open_now,
                Progress(epochs=train.epochs, turns=train.repeat, label=form.label) as progress,
            ):
                recorders = [open_now.enter_context(closing(recorder)) for recorder in _recorders(config, folder)]
                training = Turns(
                    experiment=experiment,
                    config=config,
                    folder=folder,
                    run=run,
                    attempts=attempts,
                    store=store,
                    writer=writer,
                    recorders=recorders,
                    progress=progress,
                    open_pipe=open_pipe or open_pipeline,
                )
                training.record_again(position.rows)
                training.tell(position.epoch)
                if saved is not None and resumed is not None:
                    resumed.load_into(package)
                    try:
                        store.make_newest(saved)
                    except UntidyError as error:
                        _log.warning(str(error))
                    resumed = None  # its copy of all states is no longer needed
                yield len(position.rows)
                while True:
                    for _ in training.turn(package, position, stop):
                        yield len(position.rows)
                    if position.turn >= train.repeat:
                        break
                    position.next_turn()
                    package = new_package(experiment, config, position.turn)
            outcome.exits, outcome.unsaved = training.exits, writer.last_failure
            outcome.ended_unsaved = writer.failing
            outcome.afterword = training.afterword
            if stop.signal is None:
                outcome.costs = _costs(experiment, form)
        except BaseException as error:
            outcome.write(attempts)
            if attempts.missing:
                add_note(error, f"cannot write {attempts}")
            raise
        for recorder in recorders:
            if recorder.path in attempts.missing:
                attempts.make(recorder.path, partial(recorder.rewrite, position.rows))
        outcome.write(attempts)
        if (code := stop.code()) is not None:  # it came while the last checkpoint was waited for, or this was drawn
            saved_it = f"and saved; {run.way_back} goes on from there"
            how = f"which could not be saved: {outcome.unsaved}" if outcome.ended_unsaved else saved_it
            raise Interrupted(f"interrupted after the last epoch, {how}", code)
    return outcome


def _costs(experiment: Experiment, form: Form) -> FormCosts | None:
    """None where memory does not suffice for the models that are counted on: no run fails for a column."""
    try:
        return form_costs(experiment, form.config)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _log.warning(f"the costs of {form.label} are not counted: {first_line(error)}")
        return None


def _saved(store: CheckpointStore, run: RunFolder, label: str) -> Checkpoint | None:
    """The checkpoint to go on from: the one that was named, if it is of this form, or the newest."""
    named = run.checkpoint
    if named is not None and named.resolve().parent == store.folder.resolve():
        return Checkpoint.open(named)
    return _newest(store, label)


def _newest(store: CheckpointStore, label: str) -> Checkpoint | None:
    """The checkpoint to go on from; where there is none, that is logged."""
    bad = []

    def tell(text: str) -> None:
        bad.append(text)
        _log.warning(text)

    found = store.newest(tell)
    if found is None and bad:
        _log.warning(f"no checkpoint in {store.folder} is as it was written: {label} starts over in the same folder")
    elif found is None:
        _log.warning(f"there is no checkpoint in {store.folder} yet: {label} begins at its first batch")
    return found


def _recorders(config: RunConfig, folder: Path) -> Iterator[Recorder]:
    losses = METHODS[config.train.mode].losses
    yield CsvRecorder(ROWS.at(folder), losses)
    yield JsonLinesRecorder(ROWS_JSON.at(folder))
    if config.train.tensorboard:
        yield TensorBoardRecorder(TENSORBOARD.at(folder), losses)


def require_same_data(experiment: Experiment, folder: Path) -> None:
    """Asks, before anything is done or written, whether a run would go on with the data that it began with.

    Args:
        experiment: Has read the data.
        folder: Of one form of the run.

    Raises:
        DataError: The data is not that of the newest checkpoint.
    """
    saved = CheckpointStore(CHECKPOINTS.at(folder)).newest(lambda _: None)  # what is wrong with it is told later
    known = None if saved is None else saved.state.get("data")
    if isinstance(known, Mapping):
        _check_same(experiment.facts, known)


def _check_same(facts: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name, found in facts.items():
        if saved.get(name, found) != found:
            raise DataError(
                f"the data has {name} {found}, but had {saved[name]} when the checkpoint was taken; "
                "put the data back, or start over with --resume never"
            )
