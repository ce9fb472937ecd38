"""The loop over epochs: train, evaluate, record, save. The same for AL and BP: both are layers in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, NoReturn, Protocol

from pipeal.core.errors import DataError
from pipeal.data import Batch, EpochBatches
from pipeal.engine import Pipeline
from pipeal.training.learning_rate import Course, epoch_scale
from pipeal.training.position import Position, joined, means_of
from pipeal.training.row import EpochRow


class Scores(NamedTuple):
    """What an evaluation came to; see :class:`pipeal.training.row.EpochRow`."""

    train_acc: float
    test_acc: float
    train_loss: float | None = None
    test_loss: float | None = None
    held_acc: float | None = None
    held_loss: float | None = None


class Watcher(Protocol):
    """Someone who watches the training go; :class:`pipeal.reporting.progress.Progress` is one."""

    def begin_epoch(self, epoch: int, *, batches: int, turn: int) -> None:
        """An epoch begins, or goes on, with so many batches to come; it and the turn count from 1."""
        ...

    def advance(self, *, samples: int, tokens: int) -> None:
        """A batch was submitted."""
        ...

    def end_epoch(self, row: EpochRow) -> None:
        """An epoch was trained and evaluated."""
        ...


class Saves(Protocol):
    """Someone who saves a training as it goes; :class:`pipeal.training.checkpoint.policy.CheckpointPolicy` is one."""

    def after_batch(self, pipe: Pipeline, position: Position) -> bool:
        """Between two batches, after an update; says whether training is to end here."""
        ...

    def before_evaluation(self, pipe: Pipeline, position: Position) -> None:
        """An epoch was trained."""
        ...

    def after_epoch(self, pipe: Pipeline, position: Position) -> None:
        """An epoch was trained, evaluated and counted."""
        ...

    def leave(self, pipe: Pipeline, position: Position) -> NoReturn:
        """Training ends here, because :meth:`after_batch` said so or an evaluation raised :class:`Leave`."""
        ...


class Leave(Exception):  # noqa: N818  the way out of an evaluation
    """The training is to end before the evaluation under way has."""


def fit(
    pipe: Pipeline,
    train: EpochBatches,
    evaluate: Callable[[Pipeline], Scores],
    course: Course,
    watcher: Watcher,
    position: Position,
    saves: Saves | None = None,
) -> Iterator[EpochRow]:
    """Trains one turn epoch by epoch from where it stands, and yields a row after each.

    Args:
        pipe: An open pipeline, whose next batch is ``position.batches``.
        train: The training batches.
        evaluate: Measures the model as it stands.
        course: How long, and with what learning rates.
        watcher: Told of every batch and epoch.
        position: Where the training stands; moved along.
        saves: Saves it now and then; None where it is not kept.

    Raises:
        Leave: It was to end meanwhile, and there are no saves to tell how.
    """
    turn = _Turn(pipe, train, evaluate, course, watcher, position, saves)
    while position.epoch < course.epochs:
        turn.train()
        row = turn.row(turn.evaluate())
        turn.end_epoch(row)
        yield row


@dataclass
class _Turn:
    """The parts of an epoch.

    Attributes:
        updates: Whether layers update after the batch on its way into the pipeline.
        left: Whether the saves ended the training.
    """

    pipe: Pipeline
    batches: EpochBatches
    scores: Callable[[Pipeline], Scores]
    course: Course
    watcher: Watcher
    position: Position
    saves: Saves | None
    updates: bool = True
    left: bool = False

    def train(self) -> None:
        """Trains on what is left of the epoch, and counts it."""
        position, part, done = self.position, self.position.part, self.position.part.batches
        self.batches.set_epoch(position.epoch, done)
        if done > len(self.batches):
            raise DataError(
                f"the training stands behind batch {done} of epoch {position.epoch + 1}, which has "
                f"{len(self.batches)}; go on from another checkpoint, or start over"
            )
        self.watcher.begin_epoch(position.epoch + 1, batches=len(self.batches) - done, turn=position.turn)
        before_s = part.seconds
        report = self.pipe.run(self._passing(), self._scale(), updates=lambda _: self.updates)
        if not part.samples and not self.left:
            raise DataError(f"epoch {position.epoch + 1} has no batches; every sample was left out")
        part.seconds = before_s + report.seconds
        position.losses = joined(position.losses, dict(zip(report.layers, report.losses, strict=True)))
        position.totals.watched(report)
        position.totals.splits += sum(report.splits)
        position.totals.overflows[position.turn] = sum(report.overflows)

    def evaluate(self) -> Scores:
        """Measures the model, unless the training is asked to end."""
        try:
            if self.left:
                raise Leave
            if self.saves is not None:
                self.saves.before_evaluation(self.pipe, self.position)
            return self.scores(self.pipe)
        except Leave:
            if self.saves is None:  # the caller's to tell: nothing is kept of this training
                raise
            self.saves.leave(self.pipe, self.position)

    def row(self, scores: Scores) -> EpochRow:
        """What the epoch came to; counts the losses that were not finite."""
        found = [means_of(layer) for layer in self.position.losses.values()]
        self.position.totals.non_finite += sum(count for _, count in found)
        return self.position.row([means for means, _ in found], scores._asdict())

    def end_epoch(self, row: EpochRow) -> None:
        """Moves the position behind the epoch, and has it saved and told."""
        self.position.end_epoch(row)
        if self.saves is not None:
            self.saves.after_epoch(self.pipe, self.position)
        self.watcher.end_epoch(row)

    def _scale(self) -> Callable[[int], float]:
        first_batch = self.position.batches - self.position.part.batches
        return epoch_scale(self.course, self.position.epoch, len(self.batches), first_batch)

    def _updates(self) -> bool:
        """Whether the batch that the training stands before, or one left out before it, is the last of its update."""
        position = self.position
        to_come = self.course.to_come(position.part.batches, len(self.batches))
        return all((position.turn, position.batches + more) in position.totals.left_out for more in range(1, to_come))

    def _passing(self) -> Iterator[Batch]:
        """Batches on their way into the pipeline, counted; the saves may save between two, and end it."""
        position, part = self.position, self.position.part
        before_s, begin = part.seconds, perf_counter()
        for batch in self.batches:
            samples = tokens = 0
            self.updates = self._updates()
            if (position.turn, position.batches) in position.totals.left_out:
                self.pipe.skip()
            else:
                yield batch
                # Here again, it has been submitted.
                samples, tokens = len(batch), batch.tokens
                part.count(batch)
            position.batches += 1
            part.batches += 1
            part.seconds = before_s + perf_counter() - begin
            self.watcher.advance(samples=samples, tokens=tokens)
            if self.saves is not None and self.updates and self.saves.after_batch(self.pipe, position):
                self.left = True
                return
