"""What tells a good epoch from a bad one: the share of right answers or, of a language model, the loss.

Epochs are chosen by their held-out samples (:attr:`pipeal.training.row.EpochRow.score`); what is reported of them is
the test set's, of the chosen epoch and of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import attrgetter
from statistics import fmean, stdev

from pipeal.training.row import EpochRow


@dataclass(frozen=True)
class MeanSd:
    """One figure measured several times: one value of each turn, or of each epoch.

    >>> str(MeanSd((0.90, 0.92, 0.91)))
    '0.9100 ± 0.0100'
    >>> str(MeanSd((0.9,)))
    '0.9000'

    Attributes:
        values: At least one.
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> MeanSd:
        """That of some values."""
        return cls(tuple(values))

    @property
    def mean(self) -> float:
        """Their mean."""
        return fmean(self.values)

    @property
    def sd(self) -> float | None:
        """Their sample standard deviation; None of one value, and where one is not finite."""
        return stdev(self.values) if len(self.values) > 1 and all(map(isfinite, self.values)) else None

    def __str__(self) -> str:
        """``0.9100 ± 0.0100``; of one turn without the deviation."""
        return self.shown("{:.4f}".format)

    def shown(self, form: Callable[[float], str]) -> str:
        """Mean and deviation, each written by ``form``."""
        return form(self.mean) if self.sd is None else f"{form(self.mean)} ± {form(self.sd)}"


@dataclass(frozen=True)
class Measure:
    """How epochs are measured.

    Attributes:
        name: ``accuracy`` or ``loss``.
        unseen: What samples are called that were not trained on, nor chosen by.
        short: Its name on these, for the head of a column.
        is_share: Whether it is one, which people like to read in percent.
        test: Its value on samples that were not trained on, nor chosen by.
        train: Its value on samples that were trained on.
        held: Its value on the samples to choose by; None where there are none.
    """

    name: str
    unseen: str
    short: str
    is_share: bool
    test: Callable[[EpochRow], float]
    train: Callable[[EpochRow], float]
    held: Callable[[EpochRow], float | None]  # see :func:`held_rows`

    @property
    def test_name(self) -> str:
        """What it is called on the unseen samples."""
        return f"{self.unseen} {self.name}"

    @property
    def held_name(self) -> str:
        """What it is called on the samples held out to choose by."""
        return f"held-out {self.name}"

    @property
    def key(self) -> str:
        """:attr:`test_name` in ``summary.json``."""
        return f"{self.unseen}_{self.name}"

    @property
    def held_key(self) -> str:
        """:attr:`held_name` there."""
        return f"held_out_{self.name}"

    def at_best(self, rows: Sequence[EpochRow]) -> MeanSd | None:
        """The test figure of each turn's best epoch by its held-out samples; None where a turn has none."""
        best = best_rows(rows)
        return MeanSd.of(map(self.test, best)) if best and len(best) == len({row.turn for row in rows}) else None

    def last(self, rows: Sequence[EpochRow]) -> MeanSd:
        """The test figure of each turn's last epoch; turns that have not come that far are left out."""
        return MeanSd.of(map(self.test, last_rows(rows)))


def best_rows(rows: Sequence[EpochRow]) -> list[EpochRow]:
    """The best epoch of each turn, the first of equals; none of a turn without held-out samples, or that diverged."""
    chosen: dict[int, tuple[float, EpochRow]] = {}
    for row in rows:
        score = row.score
        if score is not None and (row.turn not in chosen or score > chosen[row.turn][0]):
            chosen[row.turn] = score, row
    return [chosen[turn][1] for turn in sorted(chosen)]


def held_rows(rows: Sequence[EpochRow], measure: Measure) -> list[EpochRow]:
    """Those that were measured on held-out samples."""
    return [row for row in rows if measure.held(row) is not None]


def last_rows(rows: Sequence[EpochRow]) -> list[EpochRow]:
    """The last epoch of each turn that has come to it."""
    epochs = max(row.epoch for row in rows)
    return sorted((row for row in rows if row.epoch == epochs), key=lambda row: row.turn)


ACCURACY = Measure(
    *("accuracy", "test", "test acc"),
    is_share=True,
    test=attrgetter("test_acc"),
    train=attrgetter("train_acc"),
    held=attrgetter("held_acc"),
)
LOSS = Measure(
    *("loss", "validation", "val loss"),
    is_share=False,
    test=attrgetter("test_loss"),
    train=attrgetter("train_loss"),
    held=attrgetter("held_loss"),
)


def measure_of(rows: Sequence[EpochRow]) -> Measure:
    """The loss where every row has one, else the accuracy."""
    lossy = bool(rows) and all(row.train_loss is not None and row.test_loss is not None for row in rows)
    return LOSS if lossy else ACCURACY
