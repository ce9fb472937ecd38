"""One form of a model, trained turn by turn, from wherever its newest checkpoint stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeal.al import ALPackage
from pipeal.cli.build import Experiment
from pipeal.cli.outcome import Outcome
from pipeal.cli.run_folder import RunFolder
from pipeal.cli.stopping import StopRequest
from pipeal.config import RunConfig
from pipeal.data.atomic import replacing
from pipeal.engine import Pipeline, Window
from pipeal.engine.blame import add_note
from pipeal.errors import DataError, NonFiniteError, PipealError, first_line
from pipeal.train.calibration import calibrate
from pipeal.train.checkpoint import CheckpointStore
from pipeal.train.chrome_trace import write_chrome_trace
from pipeal.train.exit_plot import draw_exits
from pipeal.train.exits import ExitTable, exit_table
from pipeal.train.keeper import CheckpointKeeper, TakenUp
from pipeal.train.position import Position
from pipeal.train.progress import Progress
from pipeal.train.recorders import CsvRecorder, EpochRow, JsonLinesRecorder, Recorder, write_json
from pipeal.train.saver import Saver
from pipeal.train.tensorboard import TensorBoardRecorder
from pipeal.train.timeline import draw_timeline
from pipeal.train.trainer import Course, EpochBatches, Leave, Scores, accuracy, accuracy_and_loss, fit

TRACE_FROM = 10
"""The batch from which the timeline is recorded: the pipeline is full by then."""

Say = Callable[[str], None]


def train_form(experiment: Experiment, config: RunConfig, folder: Path, run: RunFolder, say: Say) -> Outcome:
    """All turns of one form. What there is by then is written even if the last epoch does not come.

    Args:
        experiment: What is to be run.
        config: Of this form, with every choice made.
        folder: Its own.
        run: The run's folder, told how the run stands.
        say: Told what is being done.

    Raises:
        DataError: What was saved of the run does not fit it.
        Interrupted: The run was asked to end, and saved.
    """
    train, form = config.train, config.train.mode
    with CheckpointStore(folder / "checkpoints", keep=train.checkpoint.keep) as store:
        saved = store.newest(say) if run.resumed else None
        taken_up = None if saved is None else TakenUp.of(saved)
        position = Position() if taken_up is None else taken_up.position
        if taken_up is not None:
            _check_same(experiment.facts, taken_up.facts)
            say(f"{form.upper()} goes on after batch {position.part.batches} of epoch {position.epoch + 1}")
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
                training = _Training(experiment, config, folder, run, say, saver, recorders, progress)
                for row in position.rows:
                    training.record(row)
                if taken_up is not None:
                    taken_up.load_into(package)
                    taken_up = None  # its copy of all states is no longer needed
                training.turn(package, position)
                while position.turn < train.repeat:
                    position.next_turn()
                    training.turn(experiment.package(form, _seed(config, position.turn)), position)
            outcome.exits, outcome.unsaved = training.exits, saver.last_failure
            outcome.afterword = training.afterword
        except BaseException as error:
            try:
                outcome.write()
            except (OSError, PipealError) as second:
                add_note(error, str(second))
            raise
        outcome.write()
    return outcome


@dataclass
class _Training:
    """The turns of one form."""

    experiment: Experiment
    config: RunConfig
    folder: Path
    run: RunFolder
    say: Say
    saver: Saver
    recorders: Sequence[Recorder]
    progress: Progress
    exits: ExitTable | None = None
    afterword: Sequence[str] = ()

    def turn(self, package: ALPackage, position: Position) -> None:
        """What is still to come of one turn, and after the last one the exits."""
        seed = _seed(self.config, position.turn)
        with ExitStack() as open_now:
            batches = open_now.enter_context(closing(self.experiment.train_batches(seed)))
            drawn = (self.folder / "timeline.png").exists()
            traced = None if drawn else _window(self.config.engine.trace_batches, batches)
            pipe = open_now.enter_context(
                open_pipeline(package, self.config, seed, position.batches, traced, self.folder)
            )
            with StopRequest() as stop:
                every = self.config.train.checkpoint.every
                keeper = CheckpointKeeper(self.saver, every, stop.code, self.experiment.facts)
                evaluate = self._evaluate(stop)
                try:
                    for row in fit(pipe, batches, evaluate, course_of(self.config), self.progress, position, keeper):
                        self.record(row)
                        self.run.tell("running", epoch=row.epoch)
                        if not drawn:
                            self._draw(pipe)
                            drawn = True
                except NonFiniteError as error:
                    self._keep(error, batches, position)
                    raise
                if stop.signal is not None:  # it came when the last epoch was behind
                    keeper.leave(pipe, position)
            if position.turn == self.config.train.repeat:
                self.exits = measure_exits(self.experiment, self.config, pipe, self.folder, self.say)
                self.afterword = self.experiment.afterword(pipe)

    def record(self, row: EpochRow) -> None:
        """Writes an epoch in every format."""
        for recorder in self.recorders:
            recorder.write(row)

    def _keep(self, error: NonFiniteError, batches: EpochBatches, position: Position) -> None:
        """Leaves the batch that a layer could not learn from, and says where, and which samples it held."""
        batches.set_epoch(position.epoch, error.batch - (position.batches - position.part.batches))
        batch = next(iter(batches))
        few = ", ".join(map(str, batch.indices[:10])) + (", …" if len(batch.indices) > 10 else "")
        path = self.folder / f"non-finite-batch-{error.batch:09d}.pt"
        kept = {"x": batch.x, "y": batch.y, "indices": batch.indices, "layer": error.layer, "losses": error.losses}
        try:
            with replacing(path) as aside:
                torch.save(kept, aside)
        except (PipealError, RuntimeError) as second:  # PyTorch says of a full disk that it is a RuntimeError
            add_note(error, f"the batch (training samples {few}) could not be kept: {first_line(second)}")
            return
        add_note(
            error,
            f"the batch is kept in {path} (training samples {few}); look at it, or let such "
            f"updates be left out: --resume {self.run.path} --set train.on_non_finite=skip",
        )

    def _evaluate(self, stop: StopRequest) -> Callable[[Pipeline], Scores]:
        parts = self.experiment.train_evaluation(), self.experiment.test_evaluation()
        criterion = self.experiment.criterion

        def evaluate(pipe: Pipeline) -> Scores:
            if criterion is None:
                train_acc, test_acc = (accuracy(pipe, _unless(stop, part)) for part in parts)
                return Scores(train_acc, test_acc)
            train, test = (accuracy_and_loss(pipe, _unless(stop, part), criterion) for part in parts)
            return Scores(train[0], test[0], train[1], test[1])

        return evaluate

    def _draw(self, pipe: Pipeline) -> None:
        config, spans, devices = self.config, pipe.spans(), [str(stage.device) for stage in pipe.stages]
        title = f"{config.dataset} {config.model.name} {config.train.mode.upper()}, {pipe.schedule.name}"
        draw_timeline(spans, self.folder / "timeline.png", title=title, devices=devices)
        write_chrome_trace(spans, self.folder / "trace.json", devices)


def _recorders(config: RunConfig, folder: Path) -> Iterator[Recorder]:
    yield CsvRecorder(folder / "epochs.csv")
    yield JsonLinesRecorder(folder / "epochs.jsonl")
    if config.train.tensorboard:
        yield TensorBoardRecorder(folder / "tensorboard")


def _unless(stop: StopRequest, batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        if stop.signal is not None:
            raise Leave
        yield batch


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
) -> Pipeline:
    """The pipeline that a configuration with every choice made describes."""
    engine = config.engine
    assert config.train.precision != "auto"  # chosen by now
    return Pipeline(
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
        on_non_finite=config.train.on_non_finite,
        on_oom=engine.on_oom,
        dump_folder=dump_folder,
        trace=traced,
    )


def measure_exits(
    experiment: Experiment, config: RunConfig, pipe: Pipeline, folder: Path, say: Say
) -> ExitTable | None:
    """Accuracy and cost of every exit and of the calibrated early exit, kept as ``exits.json`` and ``exits.png``.

    None for a model with a single exit, and where the configuration holds out no samples to calibrate on.
    """
    held_out = experiment.held_out()
    if held_out is None or config.train.mode == "bp":
        return None
    say("calibrating the early exit on held-out samples")
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
