"""The turns of one form: each trained to its end, going back where it has to, and recorded as it goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from pipeal.config import RunConfig
from pipeal.core.artifacts import EXITS, EXITS_PICTURE, TIMELINE, TRACE
from pipeal.core.errors import Interrupted, NonFiniteError
from pipeal.core.methods import METHODS
from pipeal.data import EpochBatches
from pipeal.engine import Pipeline
from pipeal.engine.distributed import DistributedPipeline
from pipeal.engine.runner.error_context import add_note
from pipeal.methods.al import ALPackage
from pipeal.reporting.attempts import Attempts
from pipeal.reporting.chrome_trace import write_chrome_trace
from pipeal.reporting.exits import draw_exits
from pipeal.reporting.progress import Progress
from pipeal.reporting.recorders import Recorder, write_json
from pipeal.reporting.timeline import draw_timeline
from pipeal.run.build import Experiment
from pipeal.run.opening import course_of, new_package, seed_of, window_of
from pipeal.run.run_folder import RunFolder
from pipeal.run.stopping import Stoppable, StopRequest, Unless, worker_failures
from pipeal.training.calibration import calibrate
from pipeal.training.checkpoint.policy import CheckpointPolicy
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.checkpoint.writer import PATIENCE_S, CheckpointWriter
from pipeal.training.evaluation import Criterion, accuracy, accuracy_and_loss
from pipeal.training.exits import ExitTable, exit_table
from pipeal.training.kept_batch import keep_batch
from pipeal.training.position import Position
from pipeal.training.rewind import Decision, Rewinds, go_back
from pipeal.training.row import EpochRow
from pipeal.training.trainer import Leave, Scores, fit

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Turns:
    """The turns of one form.

    Attributes:
        experiment: What is to be run.
        config: Of this form, with every choice made.
        folder: Where the form's files go.
        run: The run's folder, told how the run stands.
        attempts: What is written beside the checkpoints goes through it.
        store: Of the checkpoints.
        writer: Writes them.
        recorders: Told of every epoch.
        progress: Shows it.
        open_pipe: Opens the pipeline of a turn, as :func:`pipeal.run.opening.open_pipeline` does.
        exits: Of the last turn, once it has ended: its early exits, measured.
        afterword: Likewise: what else there is to show, in lines.
    """

    experiment: Experiment
    config: RunConfig
    folder: Path
    run: RunFolder
    attempts: Attempts
    store: CheckpointStore
    writer: CheckpointWriter
    recorders: Sequence[Recorder]
    progress: Progress
    open_pipe: Callable[..., Pipeline]
    exits: ExitTable | None = None
    afterword: Sequence[str] = ()

    def turn(self, package: ALPackage, position: Position, stop: StopRequest) -> Iterator[None]:
        """What is still to come of one turn, and after the last one the exits; it may take several attempts.

        Yields after each epoch, when it has been recorded and is being saved.
        """
        begun, rewinds = deepcopy(position), Rewinds(self.config.train.accumulate)
        while (broken := (yield from self._attempt(package, position, rewinds, stop))) is not None:
            error, why = broken
            rows = len(position.rows)
            written = self.writer.flush(PATIENCE_S)  # what was asked for before may be the newest
            if not written:
                add_note(error, f"the checkpoint to go back to was not written within {PATIENCE_S:g} s")
                raise error
            saved = self.store.newest(_log.warning)
            if not go_back(package, position, saved, begun, partial(self._package, position.turn)):
                add_note(error, f"there is no good checkpoint in {self.store.folder} to go back to")
                raise error
            if len(position.rows) < rows:
                self.record_again(position.rows)
            self.tell(position.epoch)
            _log.warning(f"{why}; going back to where it stood after {position.where}")
            tell_of_graphs(self.config)
            del broken, error  # and the frames they came through, which hold the last batches

    def _attempt(
        self, package: ALPackage, position: Position, rewinds: Rewinds, stop: StopRequest
    ) -> Generator[None, None, tuple[NonFiniteError, str] | None]:
        """Trains to the end of the turn; or gives what to go back for, and why."""
        if (code := stop.code()) is not None:
            raise Interrupted(f"interrupted; {self.run.way_back} goes on from the last checkpoint", code)
        seed = seed_of(self.config, position.turn)
        saves = CheckpointPolicy(
            self.writer,
            self.config.train.checkpoint.every,
            stop.code,
            self.experiment.facts,
            ends_on_broken=self.config.train.on_non_finite != "skip",
            look_until=rewinds.look_until,
            way_back=self.run.way_back,
            begun=position.batches,
            config=asdict(self.config),
        )
        with worker_failures(stop, self.run.way_back), closing(self.experiment.train_batches(seed)) as batches:
            drawn = all(path.exists() for path in self._pictures)
            traced = None if drawn else window_of(self.config, batches, position)
            pipe = self.open_pipe(package, self.config, seed, position.batches, traced, self.folder)
            try:
                with pipe:
                    yield from self._train(pipe, batches, position, saves, stop, drawn)
            except NonFiniteError as error:
                decision = self._decide(error, rewinds, position, pipe)
                if not decision.goes_back:
                    keep_batch(error, batches, position, self.folder)
                    if decision.why:
                        add_note(error, decision.why)
                    raise
                if (code := saves.asked_to_end()) is not None:
                    raise Interrupted(f"interrupted: {decision.why}; {self.run.way_back} goes back", code) from error
                return error, decision.why
        return None

    def _train(
        self,
        pipe: Pipeline,
        batches: EpochBatches,
        position: Position,
        saves: CheckpointPolicy,
        stop: StopRequest,
        drawn: bool,
    ) -> Iterator[None]:
        """The epochs, and after the last turn the exits; ends where it is asked to."""
        evaluate, course = self._evaluate(stop), course_of(self.config)
        try:
            for row in fit(pipe, Stoppable(batches, stop), evaluate, course, self.progress, position, saves):
                self.record(row)
                drawn = drawn or self._draw(pipe)
                self.tell(row.epoch)
                yield
            if stop.signal is not None:  # it came when the last epoch was behind
                raise Leave
            if position.turn == self.config.train.repeat:
                self.exits = self._measure_exits(pipe, stop)
                self.afterword = self.experiment.afterword(pipe, stop)
        except Leave:  # or the batches failed when the end had been asked for
            saves.leave(pipe, position)

    def _decide(self, error: NonFiniteError, rewinds: Rewinds, position: Position, pipe: Pipeline) -> Decision:
        policy = self.config.train.on_non_finite
        if policy == "skip":
            return Decision(False, "")  # what was learnt is broken, as the error says
        if policy == "raise":
            where = ", in one process" if isinstance(pipe, DistributedPipeline) else ""
            return Decision(
                False,
                f"or leave such batches out{where}: --resume {self.run.path} --set train.on_non_finite=stop-and-rewind",
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
        return new_package(self.experiment, self.config, turn)

    def _evaluate(self, stop: StopRequest) -> Callable[[Pipeline], Scores]:
        experiment = self.experiment
        train, held, test = experiment.train_evaluation(), experiment.held_out(), experiment.test_evaluation()

        def evaluate(pipe: Pipeline) -> Scores:
            train_acc, train_loss = measured(pipe, train, experiment.criterion, stop)
            held_acc, held_loss = (None, None) if held is None else measured(pipe, held, experiment.criterion, stop)
            test_acc, test_loss = measured(pipe, test, experiment.criterion, stop)
            return Scores(train_acc, test_acc, train_loss, test_loss, held_acc, held_loss)

        return evaluate

    @property
    def _pictures(self) -> tuple[Path, Path]:
        return TIMELINE.at(self.folder), TRACE.at(self.folder)

    def _draw(self, pipe: Pipeline) -> bool:
        """Draws the batches that were traced; whether it is done: they may be those of the next epoch."""
        config, spans, devices = self.config, pipe.spans(), pipe.device_names
        if not spans:
            return False
        title = f"{config.dataset} {config.model.name} {METHODS[config.train.mode].label}, {pipe.schedule.name}"
        timeline, trace = self._pictures
        written = (
            self.attempts.make(timeline, lambda: draw_timeline(spans, timeline, title=title, devices=devices)),
            self.attempts.make(trace, lambda: write_chrome_trace(spans, trace, devices)),
        )
        return all(written)

    def _measure_exits(self, pipe: Pipeline, stop: StopRequest) -> ExitTable | None:
        """Accuracy and cost of every exit and of the calibrated early exit, as ``exits.json`` and ``exits.png``.

        None for a model with a single exit, where the configuration holds out no samples to calibrate on, and for a
        language model: the early exit is for whole answers, and there each place of a text would leave elsewhere.
        """
        experiment, config = self.experiment, self.config
        held_out = experiment.held_out()
        if held_out is None or not METHODS[config.train.mode].has_exits or experiment.criterion is not None:
            return None
        _log.info("calibrating the early exit on held-out samples")
        calibration = calibrate(pipe, Unless(stop, held_out), tolerance=config.train.exit_tolerance)
        table = exit_table(pipe, Unless(stop, experiment.test_evaluation()), calibration)
        kept, drawn = EXITS.at(self.folder), EXITS_PICTURE.at(self.folder)
        title = f"{config.dataset} {config.model.name}: exits"
        self.attempts.make(kept, lambda: write_json(kept, table.summary()))
        self.attempts.make(drawn, lambda: draw_exits(table, drawn, title=title))
        return table


def measured(
    pipe: Pipeline, batches: EpochBatches, criterion: Criterion | None, stop: StopRequest
) -> tuple[float, float | None]:
    """The accuracy on some samples, and the loss where epochs are measured by one.

    Raises:
        Leave: The run is to end meanwhile.
    """
    if criterion is None:
        return accuracy(pipe, Unless(stop, batches)), None
    return accuracy_and_loss(pipe, Unless(stop, batches), criterion)


def tell_of_graphs(config: RunConfig) -> None:
    """Says, where a run goes on from a checkpoint, what may then be other than without one."""
    if config.engine.compile == "dynamic":
        _log.info("graphs for all sizes are compiled with the first batch after it: it may round otherwise from here")
