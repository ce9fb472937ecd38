"""The turns of one form: each trained to its end, going back where it has to, and recorded as it goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from pipeal.config import RunConfig
from pipeal.core.artifacts import EXITS, EXITS_PICTURE, TRACED
from pipeal.core.by_size import BySize
from pipeal.core.errors import CountingError, Interrupted, NonFiniteError, add_note
from pipeal.core.methods import METHODS
from pipeal.core.modules import layers_of
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree
from pipeal.data import EpochBatches
from pipeal.engine import Pipeline
from pipeal.engine.distributed import DistributedPipeline
from pipeal.engine.execution.collector import libraries_left_out
from pipeal.methods.al import ALPackage
from pipeal.reporting.chrome_trace import write_chrome_trace
from pipeal.reporting.exits import draw_exits
from pipeal.reporting.progress import Progress
from pipeal.reporting.recorders import Recorder, write_json
from pipeal.reporting.timeline import draw_timeline
from pipeal.run.backprop import is_pipelined_bp
from pipeal.run.form_costs import few_rows, first_batches
from pipeal.run.forms import Run
from pipeal.run.opening import course_of, new_layers, seed_of, window_of
from pipeal.run.outcome import Outcome
from pipeal.run.stopping import Stoppable, StopRequest, Unless, worker_failures
from pipeal.training.calibration import calibrate
from pipeal.training.checkpoint.policy import CheckpointPolicy
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.checkpoint.writer import PATIENCE_S, CheckpointWriter
from pipeal.training.evaluation import Criterion, accuracy, accuracy_and_loss
from pipeal.training.exits import ExitTable, exit_table
from pipeal.training.kept_batch import keep_batch
from pipeal.training.rewind import Decision, Rewinds, go_back
from pipeal.training.row import EpochRow
from pipeal.training.trainer import Leave, Scores, fit

_log = logging.getLogger(__name__)


@dataclass
class Turns:
    """The turns of one form.

    Attributes:
        run: What they are part of.
        outcome: Of this form, whose position moves along.
        store: Of the checkpoints.
        writer: Writes them.
        recorders: Told of every epoch.
        progress: Shows it.
    """

    run: Run
    outcome: Outcome
    store: CheckpointStore
    writer: CheckpointWriter
    recorders: Sequence[Recorder]
    progress: Progress

    def train(self, resumed: ResumedTraining | None) -> Iterator[int]:
        """All that is still to come of them; yields how many epochs are behind it, first of all and after each.

        Args:
            resumed: The states to go on with; None for a new model.
        """
        outcome, position = self.outcome, self.outcome.position
        package = ALPackage(self._layers(here=()))  # without weights
        outcome.parameters = package.effective_parameters(), package.affiliated_parameters()
        self.record_again()
        self.tell()
        if resumed is not None:
            resumed.check(list(package))
        yield len(position.rows)
        layers = self._layers(states=None if resumed is None else resumed.states)
        while True:
            for _ in self.turn(layers, resumed):
                yield len(position.rows)
            if position.turn >= outcome.config.train.repeat:
                break
            position.next_turn()
            layers, resumed = self._layers(), None
        if any(recorder.path in self.run.attempts.missing for recorder in self.recorders):
            self.record_again()

    def turn(self, layers: Iterable[TrainableLayer], resumed: ResumedTraining | None = None) -> Iterator[None]:
        """What is still to come of one turn, and after the last one the exits; it may take several attempts.

        Yields after each epoch, when it has been recorded and is being saved.

        Args:
            layers: Those that this process holds are what they go on from.
            resumed: What the others go on from; None for their first weights.
        """
        position = self.outcome.position
        begun, rewinds = deepcopy(position), Rewinds(self.outcome.config.train.accumulate)
        while (broken := (yield from self._attempt(layers, rewinds, resumed))) is not None:
            error, why, layers = broken
            rows = len(position.rows)
            written = self.writer.flush(PATIENCE_S)  # what was asked for before may be the newest
            if not written:
                add_note(error, f"the checkpoint to go back to was not written within {PATIENCE_S:g} s")
                raise error
            saved = self.store.newest(_log.warning)
            if not go_back(layers, position, saved, begun, self._layers):
                add_note(error, f"there is no good checkpoint in {self.store.folder} to go back to")
                raise error
            if len(position.rows) < rows:
                self.record_again()
            self.tell()
            _log.warning(f"{why}; going back to where it stood after {position.where}")
            tell_of_graphs(self.outcome.config)
            del broken, error  # and the frames they came through, which hold the last batches

    def _attempt(
        self, layers: Iterable[TrainableLayer], rewinds: Rewinds, resumed: ResumedTraining | None
    ) -> Generator[None, None, tuple[NonFiniteError, str, Sequence[TrainableLayer]] | None]:
        """Trains to the end of the turn; or gives what to go back for, why, and the layers as they are."""
        run, outcome, config, position = self.run, self.outcome, self.outcome.config, self.outcome.position
        run.require_wanted("from the last checkpoint")
        way_back, seed = run.folder.way_back, seed_of(config, position.turn)
        saves = CheckpointPolicy(
            self.writer,
            config.train.checkpoint.every,
            run.stop.code,
            outcome.experiment.facts,
            ends_on_broken=config.train.on_non_finite != "skip",
            look_until=rewinds.look_until,
            way_back=way_back,
            begun=position.batches,
            config=asdict(config),
        )
        with worker_failures(run.stop, way_back), closing(outcome.experiment.train_batches(seed)) as batches:
            drawn = all(picture.at(outcome.folder).exists() for picture in TRACED)
            traced = None if drawn else window_of(config, batches, position)
            pipe = run.site.open_pipeline(layers, config, seed, position.batches, traced, outcome.folder, resumed)
            try:
                with pipe, libraries_left_out():
                    yield from self._train(pipe, batches, saves, drawn)
            except NonFiniteError as error:
                decision = self._decide(error, rewinds, pipe)
                if not decision.goes_back:
                    keep_batch(error, batches, position, outcome.folder)
                    if decision.why:
                        add_note(error, decision.why)
                    raise
                if (code := saves.asked_to_end()) is not None:
                    raise Interrupted(f"interrupted: {decision.why}; {way_back} goes back", code) from error
                return error, decision.why, layers_of(pipe.model)
        return None

    def _train(self, pipe: Pipeline, batches: EpochBatches, saves: CheckpointPolicy, drawn: bool) -> Iterator[None]:
        """The epochs, and after the last turn the exits; ends where it is asked to."""
        stop, outcome, position = self.run.stop, self.outcome, self.outcome.position
        evaluate, course = self._evaluate(), course_of(outcome.config)
        try:
            for row in fit(pipe, Stoppable(batches, stop), evaluate, course, self.progress, position, saves):
                self.record(row)
                drawn = drawn or self._draw(pipe)
                self.tell()
                yield
            if stop.signal is not None:  # it came when the last epoch was behind
                raise Leave
            if position.turn == outcome.config.train.repeat:
                outcome.exits = self._measure_exits(pipe)
                outcome.afterword = outcome.experiment.afterword(pipe, stop)
        except Leave:  # or the batches failed when the end had been asked for
            saves.leave(pipe, position)

    def _decide(self, error: NonFiniteError, rewinds: Rewinds, pipe: Pipeline) -> Decision:
        policy = self.outcome.config.train.on_non_finite
        if policy == "skip":
            return Decision(False, "")  # what was learnt is broken, as the error says
        if policy == "raise":
            over_ranks = isinstance(pipe, DistributedPipeline) or is_pipelined_bp(self.outcome.config.engine)
            where = ", in one process" if over_ranks else ""
            return Decision(
                False,
                f"or leave such batches out{where}: --resume {self.run.folder.path} "
                "--set train.on_non_finite=stop-and-rewind",
            )
        if pipe.left_behind:
            return Decision(
                False,
                "a stage stands still, and may change the model yet, so that this process does not go back; "
                f"{self.run.folder.way_back} does",
            )
        return rewinds.plan(error, self.outcome.position)

    def record(self, row: EpochRow) -> None:
        """Writes an epoch in every format."""
        for recorder in self.recorders:
            self.run.attempts.make(recorder.path, partial(recorder.write, row))

    def record_again(self) -> None:
        """Writes the epochs behind it and no others: what was recorded of epochs that are to come again is dropped."""
        for recorder in self.recorders:
            self.run.attempts.make(recorder.path, partial(recorder.rewrite, self.outcome.position.rows))

    def tell(self) -> None:
        """Tells status.json how the run stands, and the user what could not be written."""
        folder, attempts, epoch = self.run.folder, self.run.attempts, self.outcome.position.epoch
        attempts.make(folder.status_path, partial(folder.tell, "running", epoch=epoch))
        attempts.tell()

    def _layers(self, **options: Any) -> Iterator[TrainableLayer]:
        """Those that the turn begins with; the options are those of :func:`pipeal.run.opening.new_layers`."""
        outcome, config = self.outcome, self.outcome.config
        here = {"here": self.run.site.here(config)}
        return new_layers(outcome.experiment, config, outcome.position.turn, **{**here, **options})

    def _evaluate(self) -> Callable[[Pipeline], Scores]:
        experiment, stop = self.outcome.experiment, self.run.stop
        train, held, test = experiment.train_evaluation(), experiment.held_out(), experiment.test_evaluation()

        def evaluate(pipe: Pipeline) -> Scores:
            train_acc, train_loss = measured(pipe, train, experiment.criterion, stop)
            held_acc, held_loss = (None, None) if held is None else measured(pipe, held, experiment.criterion, stop)
            test_acc, test_loss = measured(pipe, test, experiment.criterion, stop)
            return Scores(train_acc, test_acc, train_loss, test_loss, held_acc, held_loss)

        return evaluate

    def _draw(self, pipe: Pipeline) -> bool:
        """Draws the batches that were traced; whether it is done: they may be those of the next epoch."""
        config, attempts, spans, devices = self.outcome.config, self.run.attempts, pipe.spans(), pipe.device_names
        copies = pipe.copies()
        if not spans:
            return False
        self.outcome.spans = spans
        title = f"{config.dataset} {config.model.name} {METHODS[config.train.mode].label}, {config.engine.schedule}"
        numbers = "micro-batches" if is_pipelined_bp(config.engine) else "batches"
        timeline, trace = (picture.at(self.outcome.folder) for picture in TRACED)
        written = (
            attempts.make(
                timeline,
                lambda: draw_timeline(spans, timeline, title=title, devices=devices, copies=copies, numbers=numbers),
            ),
            attempts.make(trace, lambda: write_chrome_trace(spans, trace, devices, copies)),
        )
        return all(written)

    def _measure_exits(self, pipe: Pipeline) -> ExitTable | None:
        """Accuracy and cost of every exit and of the calibrated early exit, as ``exits.json`` and ``exits.png``.

        None for a model with a single exit, where the configuration holds out no samples to calibrate on or costs
        cannot be counted, and for a language model: the early exit is for whole answers, and there each place of a text
        would leave elsewhere.
        """
        experiment, config, stop = self.outcome.experiment, self.outcome.config, self.run.stop
        held_out, form = experiment.held_out(), METHODS[config.train.mode]
        if held_out is None or not form.has_exits or experiment.criterion is not None:
            return None
        _log.info(f"calibrating the early exit of {form.label} on held-out samples")
        layers = self._layers(here=None) if isinstance(pipe, DistributedPipeline) else None
        inputs = BySize[Tree]()
        for batch in first_batches(experiment, config.train.seed):  # as padded as in the run's other costs
            inputs.add(few_rows(batch, experiment)[0], batch.x)
        tolerance = config.train.exit_tolerance
        try:
            calibration = calibrate(pipe, Unless(stop, held_out), tolerance=tolerance, layers=layers, inputs=inputs)
        except CountingError as error:
            _log.warning(f"exits are not measured: {error}")
            return None
        table = exit_table(pipe, Unless(stop, experiment.test_evaluation()), calibration)
        kept, drawn = EXITS.at(self.outcome.folder), EXITS_PICTURE.at(self.outcome.folder)
        facts = {"seed": self.outcome.last_seed, "epoch": config.train.epochs}
        title = (
            f"{config.dataset} {config.model.name}: {form.label} exits, seed {facts['seed']}, epoch {facts['epoch']}"
        )
        self.run.attempts.make(kept, lambda: write_json(kept, facts | table.summary()))
        self.run.attempts.make(drawn, lambda: draw_exits(table, drawn, title=title))
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
