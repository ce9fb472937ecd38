"""One form of a model, trained turn by turn, from wherever its newest checkpoint stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeal.al import ALPackage
from pipeal.cli.build import Experiment
from pipeal.cli.outcome import Outcome
from pipeal.cli.run_folder import RunFolder
from pipeal.cli.stopping import Stoppable, StopRequest, Unless, worker_failures
from pipeal.config import RunConfig
from pipeal.engine import Pipeline, Window
from pipeal.engine.blame import add_note
from pipeal.errors import DataError, Interrupted, NonFiniteError
from pipeal.train.attempts import Attempts
from pipeal.train.calibration import calibrate
from pipeal.train.checkpoint import Checkpoint, CheckpointStore
from pipeal.train.chrome_trace import write_chrome_trace
from pipeal.train.exit_plot import draw_exits
from pipeal.train.exits import ExitTable, exit_table
from pipeal.train.keeper import CheckpointKeeper
from pipeal.train.kept_batch import keep_batch
from pipeal.train.position import Position
from pipeal.train.progress import Progress
from pipeal.train.recorders import CsvRecorder, EpochRow, JsonLinesRecorder, Recorder, write_json
from pipeal.train.rewind import Decision, Rewinds, go_back
from pipeal.train.saver import PATIENCE_S, Saver
from pipeal.train.taken_up import TakenUp
from pipeal.train.tensorboard import TensorBoardRecorder
from pipeal.train.timeline import draw_timeline
from pipeal.train.trainer import Course, EpochBatches, Leave, Scores, accuracy, accuracy_and_loss, fit

TRACE_FROM = 10
"""The batch from which the timeline is recorded: the pipeline is full by then."""

Say = Callable[[str], None]
Opened = TypeVar("Opened")


def train_form(
    experiment: Experiment,
    config: RunConfig,
    folder: Path,
    run: RunFolder,
    attempts: Attempts,
    say: Say,
    open_pipe: Callable[..., Pipeline] | None = None,
) -> Outcome:
    """All turns of one form. What there is by then is written even if the last epoch does not come.

    Args:
        experiment: What is to be run.
        config: Of this form, with every choice made.
        folder: Its own.
        run: The run's folder, told how the run stands.
        attempts: What is written beside the checkpoints goes through it.
        say: Told what is being done.
        open_pipe: Opens the pipeline of a turn, as :func:`open_pipeline` does.

    Raises:
        DataError: What was saved of the run does not fit it.
        Interrupted: The run was asked to end, and saved.
    """
    train, form = config.train, config.train.mode
    # One request for all of it: what waits to be written, is drawn or calibrated is given up at a second signal.
    with StopRequest() as stop, CheckpointStore(folder / "checkpoints", keep=train.checkpoint.keep) as store:
        saved = _saved(store, run, form, say) if run.resumed else None
        taken_up = None if saved is None else TakenUp.of(saved)
        position = Position() if taken_up is None else taken_up.position
        if saved is not None and taken_up is not None:
            _check_same(experiment.facts, taken_up.facts)
            if position.turn > train.repeat:
                raise DataError(f"the checkpoint {saved.path} is of turn {position.turn}, the run has {train.repeat}")
            say(f"{form.upper()} goes on after {position.where}")
        package = experiment.package(form, _seed(config, position.turn))
        parameters = package.effective_parameters(), package.affiliated_parameters()
        facts, lengths = experiment.facts, experiment.lengths
        outcome = Outcome(config, position.rows, position.totals, facts, lengths, parameters, folder)
        try:
            with (
                Saver(store, say) as saver,
                ExitStack() as open_now,
                Progress(epochs=train.epochs, turns=train.repeat, label=outcome.form) as progress,
            ):
                recorders = [open_now.enter_context(closing(recorder)) for recorder in _recorders(config, folder)]
                training = _Training(
                    experiment,
                    config,
                    folder,
                    run,
                    attempts,
                    say,
                    store,
                    saver,
                    recorders,
                    progress,
                    open_pipe or open_pipeline,
                )
                training.record_again(position.rows)
                training.tell(position.epoch)
                if saved is not None and taken_up is not None:
                    taken_up.load_into(package)
                    store.make_newest(saved)
                    taken_up = None  # its copy of all states is no longer needed
                training.turn(package, position, stop)
                while position.turn < train.repeat:
                    position.next_turn()
                    training.turn(experiment.package(form, _seed(config, position.turn)), position, stop)
            outcome.exits, outcome.unsaved = training.exits, saver.last_failure
            outcome.ended_unsaved = saver.failing
            outcome.afterword = training.afterword
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


def _saved(store: CheckpointStore, run: RunFolder, form: str, say: Say) -> Checkpoint | None:
    """The checkpoint to go on from: the one that was named, if it is of this form, or the newest."""
    named = run.checkpoint
    if named is not None and named.resolve().parent == store.folder.resolve():
        return Checkpoint.open(named)
    return _newest(store, form, say)


def _newest(store: CheckpointStore, form: str, say: Say) -> Checkpoint | None:
    """The checkpoint to go on from; where there is none, that is said."""
    bad = []

    def tell(text: str) -> None:
        bad.append(text)
        say(text)

    found = store.newest(tell)
    if found is None and bad:
        say(f"no checkpoint in {store.folder} is as it was written: {form.upper()} begins anew in the same folder")
    elif found is None:
        say(f"there is no checkpoint in {store.folder} yet: {form.upper()} begins at its first batch")
    return found


@dataclass
class _Training:
    """The turns of one form."""

    experiment: Experiment
    config: RunConfig
    folder: Path
    run: RunFolder
    attempts: Attempts
    say: Say
    store: CheckpointStore
    saver: Saver
    recorders: Sequence[Recorder]
    progress: Progress
    open_pipe: Callable[..., Pipeline]
    exits: ExitTable | None = None
    afterword: Sequence[str] = ()

    def turn(self, package: ALPackage, position: Position, stop: StopRequest) -> None:
        """What is still to come of one turn, and after the last one the exits; it may take several attempts."""
        begun, rewinds = deepcopy(position), Rewinds()
        while (broken := self._attempt(package, position, rewinds, stop)) is not None:
            error, why = broken
            rows = len(position.rows)
            written = self.saver.flush(PATIENCE_S)  # what was asked for before may be the newest
            if not written:
                add_note(error, f"the checkpoint to go back to was not written within {PATIENCE_S:g} s")
                raise error
            saved = self.store.newest(self.say)
            if not go_back(package, position, saved, begun, partial(self._package, position.turn)):
                add_note(error, f"there is no good checkpoint in {self.store.folder} to go back to")
                raise error
            if len(position.rows) < rows:
                self.record_again(position.rows)
            self.tell(position.epoch)
            self.say(f"{why}; going back to where it stood after {position.where}")
            del broken, error  # and the frames they came through, which hold the last batches

    def _attempt(
        self, package: ALPackage, position: Position, rewinds: Rewinds, stop: StopRequest
    ) -> tuple[NonFiniteError, str] | None:
        """Trains to the end of the turn; or gives what to go back for, and why."""
        if (code := stop.code()) is not None:
            raise Interrupted(f"interrupted; {self.run.way_back} goes on from the last checkpoint", code)
        seed = _seed(self.config, position.turn)
        keeper = CheckpointKeeper(
            self.saver,
            self.config.train.checkpoint.every,
            stop.code,
            self.experiment.facts,
            ends_on_broken=self.config.train.on_non_finite != "skip",
            look_until=rewinds.look_until,
            way_back=self.run.way_back,
        )
        with worker_failures(stop, self.run.way_back), closing(self.experiment.train_batches(seed)) as batches:
            drawn = all(path.exists() for path in self._pictures)
            traced = None if drawn else _window(self.config, batches, position)
            pipe = self.open_pipe(package, self.config, seed, position.batches, traced, self.folder)
            try:
                with pipe:
                    self._train(pipe, batches, position, keeper, stop, drawn)
            except NonFiniteError as error:
                decision = self._decide(error, rewinds, position, pipe)
                if not decision.goes_back:
                    keep_batch(error, batches, position, self.folder)
                    if decision.why:
                        add_note(error, decision.why)
                    raise
                if (code := keeper.asked_to_end()) is not None:
                    raise Interrupted(f"interrupted: {decision.why}; {self.run.way_back} goes back", code) from error
                return error, decision.why
        return None

    def _train(
        self,
        pipe: Pipeline,
        batches: EpochBatches,
        position: Position,
        keeper: CheckpointKeeper,
        stop: StopRequest,
        drawn: bool,
    ) -> None:
        """The epochs, and after the last turn the exits; ends where it is asked to."""
        evaluate, course = self._evaluate(stop), course_of(self.config)
        try:
            for row in fit(pipe, Stoppable(batches, stop), evaluate, course, self.progress, position, keeper):
                self.record(row)
                drawn = drawn or self._draw(pipe)
                self.tell(row.epoch)
            if stop.signal is not None:  # it came when the last epoch was behind
                raise Leave
            if position.turn == self.config.train.repeat:
                self.exits = self._measure_exits(pipe, stop)
                self.afterword = self.experiment.afterword(pipe)
        except Leave:  # or the batches failed when the end had been asked for
            keeper.leave(pipe, position)

    def _decide(self, error: NonFiniteError, rewinds: Rewinds, position: Position, pipe: Pipeline) -> Decision:
        policy = self.config.train.on_non_finite
        if policy == "skip":
            return Decision(False, "")  # what was learnt is broken, as the error says
        if policy == "raise":
            return Decision(
                False, f"or leave such batches out: --resume {self.run.path} --set train.on_non_finite=stop-and-rewind"
            )
        if pipe.left_behind:
            return Decision(
                False,
                "a stage stands still, and may change the model yet, so that this process does not go back; "
                f"{self.run.way_back} does",
            )
        return rewinds.plan(error, position)

    def record(self, row: EpochRow) -> None:
        """Writes an epoch in every format."""
        for recorder in self.recorders:
            self.attempts.make(recorder.path, partial(recorder.write, row))

    def record_again(self, rows: Sequence[EpochRow]) -> None:
        """Writes these epochs and no others: what was recorded of epochs that are to come again is dropped."""
        for recorder in self.recorders:
            self.attempts.make(recorder.path, partial(recorder.rewrite, rows))

    def tell(self, epoch: int) -> None:
        """Tells whoever looks how the run stands, and the user what could not be written."""
        self.attempts.make(self.run.status_path, partial(self.run.tell, "running", epoch=epoch))
        self.attempts.tell()

    def _package(self, turn: int) -> ALPackage:
        return self.experiment.package(self.config.train.mode, _seed(self.config, turn))

    def _evaluate(self, stop: StopRequest) -> Callable[[Pipeline], Scores]:
        parts = self.experiment.train_evaluation(), self.experiment.test_evaluation()
        criterion = self.experiment.criterion

        def evaluate(pipe: Pipeline) -> Scores:
            if criterion is None:
                train_acc, test_acc = (accuracy(pipe, Unless(stop, part)) for part in parts)
                return Scores(train_acc, test_acc)
            train, test = (accuracy_and_loss(pipe, Unless(stop, part), criterion) for part in parts)
            return Scores(train[0], test[0], train[1], test[1])

        return evaluate

    @property
    def _pictures(self) -> tuple[Path, Path]:
        return self.folder / "timeline.png", self.folder / "trace.json"

    def _draw(self, pipe: Pipeline) -> bool:
        """Draws the batches that were traced; whether it is done: they may be those of the next epoch."""
        config, spans, devices = self.config, pipe.spans(), [str(stage.device) for stage in pipe.stages]
        if not spans:
            return False
        title = f"{config.dataset} {config.model.name} {config.train.mode.upper()}, {pipe.schedule.name}"
        timeline, trace = self._pictures
        written = (
            self.attempts.make(timeline, lambda: draw_timeline(spans, timeline, title=title, devices=devices)),
            self.attempts.make(trace, lambda: write_chrome_trace(spans, trace, devices)),
        )
        return all(written)

    def _measure_exits(self, pipe: Pipeline, stop: StopRequest) -> ExitTable | None:
        """Accuracy and cost of every exit and of the calibrated early exit, as ``exits.json`` and ``exits.png``.

        None for a model with a single exit, and where the configuration holds out no samples to calibrate on.
        """
        experiment, config = self.experiment, self.config
        held_out = experiment.held_out()
        if held_out is None or config.train.mode == "bp":
            return None
        self.say("calibrating the early exit on held-out samples")
        calibration = calibrate(pipe, Unless(stop, held_out), tolerance=config.train.exit_tolerance)
        table = exit_table(pipe, Unless(stop, experiment.test_evaluation()), calibration)
        kept, drawn = self.folder / "exits.json", self.folder / "exits.png"
        title = f"{config.dataset} {config.model.name}: exits"
        self.attempts.make(kept, lambda: write_json(kept, table.summary()))
        self.attempts.make(drawn, lambda: draw_exits(table, drawn, title=title))
        return table


def _recorders(config: RunConfig, folder: Path) -> Iterator[Recorder]:
    yield CsvRecorder(folder / "epochs.csv")
    yield JsonLinesRecorder(folder / "epochs.jsonl")
    if config.train.tensorboard:
        yield TensorBoardRecorder(folder / "tensorboard")


def course_of(config: RunConfig) -> Course:
    """How long a run trains, and with what learning rates."""
    rate = config.train.lr
    return Course(config.train.epochs, rate.decay, rate.per, (rate.end or 0.0) / rate.base, rate.warmup)


def _seed(config: RunConfig, turn: int) -> int:
    return (config.train.seed + turn - 1) % 2**63


def _check_same(facts: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """A run goes on with the data it began with.

    Raises:
        DataError: The data is not that of the checkpoint.
    """
    for name, found in facts.items():
        if saved.get(name, found) != found:
            raise DataError(
                f"the data has {name} {found}, but had {saved[name]} when the checkpoint was taken; "
                "put the data back, or begin anew with --resume never"
            )


def open_pipeline(
    package: ALPackage,
    config: RunConfig,
    seed: int,
    first_batch: int = 0,
    traced: Window | None = None,
    dump_folder: Path | None = None,
    opener: Callable[..., Opened] = Pipeline,  # type: ignore[assignment]
) -> Opened:
    """The pipeline that a configuration with every choice made describes, or what ``opener`` makes of its settings."""
    engine = config.engine
    assert config.train.precision != "auto"  # chosen by now
    return opener(
        package,
        engine.devices,
        engine.schedule,
        sizes=engine.sizes,
        queue_depth=engine.queue_depth,
        seed=seed,
        first_batch=first_batch,
        threads=engine.threads,
        precision=config.train.precision,
        compile=engine.compile,
        stall_timeout_s=engine.stall_timeout_s,
        # To go back is not the pipeline's to do: it ends.
        on_non_finite="skip" if config.train.on_non_finite == "skip" else "raise",
        on_oom=engine.on_oom,
        dump_folder=dump_folder,
        trace=traced,
    )


def _window(config: RunConfig, batches: EpochBatches, position: Position) -> Window | None:
    """Steady state, if an epoch is long enough to reach it; None where no batch is still to come.

    Counted from where the training goes on: in the rest of the epoch under way if that is long enough, or else in the
    next one if there is one.
    """
    epochs, count = config.train.epochs - position.epoch, config.engine.trace_batches
    if epochs < 1:
        return None
    done = position.part.batches
    batches.set_epoch(position.epoch)
    left = first = len(batches) - done
    if left >= count + TRACE_FROM or not done or epochs == 1:
        first = 0
    else:
        batches.set_epoch(position.epoch + 1)
        left = len(batches)
    count = min(count, left)
    return Window(first + min(TRACE_FROM, left - count), count) if count else None
