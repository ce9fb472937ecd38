"""What tells a good epoch from a bad one: the share of right answers or, of a language model, the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from pipeal.train.recorders import EpochRow


@dataclass(frozen=True)
class Measure:
    """How epochs are measured.

    Attributes:
        name: ``accuracy`` or ``loss``.
        test_name: What it is called on samples that were not trained on.
        unseen: What those samples are called alone.
        short: The same for the head of a column.
        key: The same in ``summary.json``.
        is_share: Whether it is one, which people like to read in percent.
        test: Its value on samples that were not trained on.
        train: Its value on samples that were.
        pick: Of several values, the best.
    """

    name: str
    test_name: str
    unseen: str
    short: str
    key: str
    is_share: bool
    test: Callable[[EpochRow], float]
    train: Callable[[EpochRow], float]
    pick: Callable[[Iterable[float]], float]

    def best(self, rows: Sequence[EpochRow]) -> float:
        """The best value of each turn, averaged over turns."""
        turns = sorted({row.turn for row in rows})
        return mean(self.pick([self.test(row) for row in rows if row.turn == turn]) for turn in turns)

    def last(self, rows: Sequence[EpochRow]) -> float:
        """The value after the last epoch, averaged over turns."""
        epochs = max(row.epoch for row in rows)
        return mean(self.test(row) for row in rows if row.epoch == epochs)


def _test_loss(row: EpochRow) -> float:
    assert row.test_loss is not None
    return row.test_loss


def _train_loss(row: EpochRow) -> float:
    assert row.train_loss is not None
    return row.train_loss


ACCURACY = Measure(
    "accuracy",
    "test accuracy",
    "test",
    "test acc",
    "test_accuracy",
    is_share=True,
    test=lambda row: row.test_acc,
    train=lambda row: row.train_acc,
    pick=max,
)
LOSS = Measure(
    "loss",
    "validation loss",
    "validation",
    "val loss",
    "validation_loss",
    is_share=False,
    test=_test_loss,
    train=_train_loss,
    pick=min,
)


def measure_of(rows: Sequence[EpochRow]) -> Measure:
    """The loss where every row has one, else the accuracy."""
    lossy = bool(rows) and all(row.train_loss is not None and row.test_loss is not None for row in rows)
    return LOSS if lossy else ACCURACY
