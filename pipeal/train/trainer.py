"""The loop over epochs: train, evaluate, record. The same for AL and BP: both are layers in a pipeline."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeal.data import Batch
from pipeal.engine import Pipeline, RunReport
from pipeal.engine.trace import StageTimes
from pipeal.packet import Tree, pair_of
from pipeal.train.learning_rate import Decay, Per, epoch_scale
from pipeal.train.recorders import EpochRow


class EpochBatches(Protocol):
    """What is trained and evaluated on: batches that know which epoch they are for."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the chosen epoch."""
        ...

    def __len__(self) -> int:
        """How many they are."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch."""
        ...

    def close(self) -> None:
        """Ends what prepares batches, if anything does."""
        ...


class Watcher(Protocol):
    """Someone who watches the training go; :class:`pipeal.train.progress.Progress` is one."""

    def begin_epoch(self, epoch: int, *, batches: int, turn: int) -> None:
        """An epoch begins; both it and the turn count from 1."""
        ...

    def advance(self, *, samples: int, tokens: int) -> None:
        """A batch was submitted."""
        ...

    def end_epoch(self, row: EpochRow) -> None:
        """An epoch was trained and evaluated."""
        ...


@dataclass(frozen=True)
class Course:
    """How long to train, and with what learning rates.

    Attributes:
        epochs: Passes over the training batches.
        decay: The course of the learning rate.
        per: When it changes.
        end_over_base: The last learning rate over the first.
        warmup: Batches over which the learning rate rises from nothing.
    """

    epochs: int
    decay: Decay = "none"
    per: Per = "batch"
    end_over_base: float = 0.0
    warmup: int = 0


@dataclass
class Totals:
    """What a training amounted to; seconds are of training alone, without evaluation.

    ``shapes`` counts batches by their samples and padded length.
    """

    seconds: float = 0.0
    batches: int = 0
    samples: int = 0
    tokens: int = 0
    padded: int = 0
    shapes: Counter[tuple[int, int]] = field(default_factory=Counter)
    stages: list[StageTimes] = field(default_factory=list)

    def add(self, report: RunReport, batches: _Counted) -> None:
        """Adds one epoch."""
        self.seconds += report.seconds
        self.batches += report.batches
        self.samples += report.samples
        self.tokens += batches.tokens
        self.padded += batches.padded
        self.shapes += batches.shapes
        self.stages = [a + b for a, b in zip(self.stages, report.stages, strict=True)] if self.stages else report.stages

    @property
    def padding_share(self) -> float:
        """The share of padding among all tokens trained on."""
        return 1 - self.tokens / self.padded if self.padded else 0.0

    @property
    def busy_share(self) -> list[float]:
        """For each stage, the share of the training time in which it worked."""
        return [stage.busy_s / self.seconds if self.seconds else 0.0 for stage in self.stages]


def fit(
    pipe: Pipeline,
    train: EpochBatches,
    evaluate: Callable[[Pipeline], tuple[float, float]],
    course: Course,
    watcher: Watcher,
    totals: Totals,
    *,
    turn: int = 1,
) -> Iterator[EpochRow]:
    """Trains epoch by epoch and yields a row after each.

    Args:
        pipe: An open pipeline.
        train: The training batches.
        evaluate: Gives the training and the test accuracy of the model as it stands.
        course: How long, and with what learning rates.
        watcher: Told of every batch and epoch.
        totals: Added to.
        turn: The number of this training among repeats, from 1, for the rows.
    """
    trained_s = 0.0
    for epoch in range(course.epochs):
        train.set_epoch(epoch)
        watcher.begin_epoch(epoch + 1, batches=len(train), turn=turn)
        counted = _Counted(train, watcher)
        scale = epoch_scale(
            course.decay,
            course.per,
            end_over_base=course.end_over_base,
            warmup=course.warmup,
            epoch=epoch,
            epochs=course.epochs,
            batches=len(train),
            first_batch=pipe.next_batch,
        )
        report = pipe.run(counted, lr_scale=scale)
        totals.add(report, counted)
        trained_s += report.seconds
        train_acc, test_acc = evaluate(pipe)
        row = EpochRow(
            turn=turn,
            epoch=epoch + 1,
            train_acc=train_acc,
            test_acc=test_acc,
            train_time=trained_s,
            epoch_time=report.seconds,
            samples_per_s=report.samples / report.seconds,
            tokens_per_s=counted.tokens / report.seconds,
            losses=tuple(tuple(layer.mean(0).tolist()) for layer in report.losses),
        )
        watcher.end_epoch(row)
        yield row


def accuracy(pipe: Pipeline, batches: Iterable[Any], exit_at: int | None = None) -> float:
    """The share of samples whose most likely class is the right one.

    Args:
        pipe: The pipeline; it is drained first.
        batches: What to predict, as :meth:`pipeal.Pipeline.run` takes it, with class numbers as targets.
        exit_at: The exit to take; None for the full path.
    """
    targets: deque[Tensor] = deque()
    right = []
    for logits in pipe.predict_each(inputs_of(batches, targets), exit_at):
        predicted = logits.argmax(-1)
        right.append(predicted == targets.popleft().to(predicted.device, non_blocking=True))
    return float(torch.cat(right).double().mean()) if right else 0.0


def inputs_of(batches: Iterable[Any], targets: MutableSequence[Tensor]) -> Iterator[Tree]:
    """Yields the inputs of batches, and adds their targets to ``targets`` as they pass by."""
    for batch in batches:
        x, y = pair_of(batch)
        targets.append(y)
        yield x


class _Counted:
    """Batches that pass by, counted."""

    def __init__(self, batches: EpochBatches, watcher: Watcher) -> None:
        self.batches = batches
        self.watcher = watcher
        self.tokens = 0
        self.padded = 0
        self.shapes: Counter[tuple[int, int]] = Counter()

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield batch
            self.tokens += batch.tokens
            self.padded += batch.padded
            self.shapes[len(batch), batch.padded // len(batch)] += 1
            self.watcher.advance(samples=len(batch), tokens=batch.tokens)
