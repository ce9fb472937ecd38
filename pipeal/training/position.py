"""Where a training stands between two batches: everything that is not in its layers."""

from __future__ import annotations

import copy
import math
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter
from torch import Tensor

from pipeal.core.checked import checked
from pipeal.core.errors import DataError
from pipeal.data import Batch
from pipeal.engine import RunReport
from pipeal.engine.schedule import Action
from pipeal.engine.trace import StageTimes
from pipeal.training.row import EpochRow


def _counted(shapes: Any) -> Any:
    return {tuple(shape): times for *shape, times in shapes} if isinstance(shapes, list) else shapes


def _listed(shapes: Counter[tuple[int, int]]) -> list[list[int]]:
    return [[*shape, times] for shape, times in sorted(shapes.items())]


Whole: TypeAlias = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Ordinal: TypeAlias = Annotated[int, Field(strict=True, ge=1, lt=2**53)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Shapes: TypeAlias = Annotated[
    Counter[tuple[Whole, Whole]], BeforeValidator(_counted), PlainSerializer(_listed, return_type=list[list[int]])
]

Numbers: TypeAlias = Annotated[
    set[tuple[Ordinal, Whole]], PlainSerializer(sorted, return_type=list[tuple[int, int]], when_used="json")
]


@dataclass
class Part:
    """What was trained on of an epoch; ``shapes`` counts batches by their samples and padded length.

    ``batches`` are those behind it, with those that were left out.
    """

    seconds: Seconds = 0.0
    batches: Whole = 0
    samples: Whole = 0
    tokens: Whole = 0
    padded: Whole = 0
    shapes: Shapes = field(default_factory=Counter)

    def count(self, batch: Batch) -> None:
        """Counts a batch that is learnt from, but not among ``batches``."""
        samples = len(batch)
        self.samples += samples
        self.tokens += batch.tokens
        self.padded += batch.padded
        self.shapes[samples, batch.padded // samples] += 1

    def add(self, other: Part) -> None:
        """Counts another part as well."""
        for each in fields(Part):  # a Totals has more, which do not come with a part
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class Totals(Part):
    """What all epochs amounted to; seconds are of training alone, without evaluation.

    Attributes:
        non_finite: Layers' updates that met a non-finite loss, and were left out.
        splits: Layers' updates that were made in parts for want of memory.
        overflows: By turn, layers' updates that were left out because gradients overflowed in fp16.
        stages: How each stage spent its time.
        stage_s: The seconds that ``stages`` accounts for: fewer than all where a training was taken up again.
        left_out: Batches that no layer learns from, by turn and number, since they made it go back. Some may be ahead.
        blamed: For each time that some were left out, the last of them.
    """

    non_finite: Whole = 0
    splits: Whole = 0
    overflows: dict[int, Whole] = field(default_factory=dict)
    stages: list[StageTimes] = field(default_factory=list)
    stage_s: Seconds = 0.0
    left_out: Numbers = field(default_factory=set)
    blamed: Numbers = field(default_factory=set)

    def watched(self, report: RunReport) -> None:
        """Counts the times of the stages; with another number of stages than before, the earlier ones are forgotten."""
        if len(self.stages) == len(report.stages):
            self.stages = [before + now for before, now in zip(self.stages, report.stages, strict=True)]
            self.stage_s += report.seconds
        else:
            self.stages, self.stage_s = report.stages, report.seconds

    @property
    def padding_share(self) -> float:
        """The share of padding among all tokens trained on."""
        return 1 - self.tokens / self.padded if self.padded else 0.0

    @property
    def busy_share(self) -> list[float]:
        """For each stage, the share of the training time in which it worked."""
        return [stage.busy_s / self.stage_s if self.stage_s else 0.0 for stage in self.stages]

    @property
    def kernel_share(self) -> list[float | None]:
        """For each stage on a GPU, the share of the training time in which it had kernels to run, at least."""
        return [
            None if stage.kernels_s is None else stage.kernels_s / self.stage_s if self.stage_s else 0.0
            for stage in self.stages
        ]


@dataclass
class Position:
    """Where a training stands.

    Attributes:
        turn: Of the trainings of a run, from 1.
        epoch: The epochs of this turn that are behind it, their evaluation included.
        batches: The batches of this turn that are behind it: the number of the next one.
        trained_s: Seconds of training in the epochs of this turn.
        part: What was done of the epoch under way.
        losses: By the number of each layer that has reported some, ``(batches, losses)``: those of ``part`` that the
            pipeline no longer holds.
        rows: One for each epoch of all turns.
        totals: Of all turns, without ``part``.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    turn: Ordinal = 1
    epoch: Whole = 0
    batches: Whole = 0
    trained_s: Seconds = 0.0
    part: Part = field(default_factory=Part)
    losses: dict[int, Tensor] = field(default_factory=dict)
    rows: list[EpochRow] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    @property
    def step(self) -> int:
        """The batches of all turns: rises from checkpoint to checkpoint."""
        return self.totals.batches + self.part.batches

    @property
    def where(self) -> str:
        """For people: ``batch 8 of epoch 2``, or ``epoch 1`` when all of it is behind, its evaluation included."""
        whole = self.epoch and not self.part.batches
        return f"epoch {self.epoch}" if whole else f"batch {self.part.batches} of epoch {self.epoch + 1}"

    def row(self, losses: Sequence[Sequence[float]], scores: Mapping[str, Any]) -> EpochRow:
        """What the epoch under way came to, whose seconds count from here on.

        Args:
            losses: Means by layer, as :func:`means_of` gives them.
            scores: What its evaluation came to, by the names of :class:`EpochRow`.
        """
        part = self.part
        self.trained_s += part.seconds
        return EpochRow(
            turn=self.turn,
            epoch=self.epoch + 1,
            train_time=self.trained_s,
            epoch_time=part.seconds,
            samples_per_s=part.samples / part.seconds if part.seconds else 0.0,
            tokens_per_s=part.tokens / part.seconds if part.seconds else 0.0,
            losses=tuple(map(tuple, losses)),
            **scores,
        )

    def end_epoch(self, row: EpochRow) -> None:
        """Goes to the beginning of the next epoch."""
        self.rows.append(row)
        self.totals.add(self.part)
        self.epoch, self.part, self.losses = self.epoch + 1, Part(), {}

    def next_turn(self) -> None:
        """Goes to the beginning of the next turn."""
        self.turn += 1
        self.epoch = self.batches = 0
        self.trained_s = 0.0
        self.part, self.losses = Part(), {}

    def go_back_to(self, earlier: Position) -> None:
        """Becomes an earlier position of the same training; what is left out stays so.

        ``rows`` and ``totals`` stay the objects they are, for those who look at them.
        """
        earlier, rows, totals = copy.deepcopy(earlier), self.rows, self.totals
        earlier.totals.left_out |= totals.left_out
        earlier.totals.blamed |= totals.blamed
        vars(totals).update(vars(earlier.totals))
        rows[:] = earlier.rows
        vars(self).update(vars(earlier), rows=rows, totals=totals)

    def state(self) -> dict[str, Any]:
        """As JSON, without :attr:`losses`, which are tensors."""
        state: dict[str, Any] = _POSITION.dump_python(self, mode="json", exclude={"losses"})
        return state

    @classmethod
    def of(cls, state: Mapping[str, Any], losses: Any) -> Position:
        """What :meth:`state` gave.

        Args:
            state: What it gave.
            losses: As :func:`numbered` gives them; those of older checkpoints are a list, of all layers.

        Raises:
            ValueError: It did not; in one line.
        """
        by_layer = dict(enumerate(losses)) if isinstance(losses, list) else losses
        position = checked(_POSITION, {**state, "losses": by_layer})
        _require_consistent(position)
        return position


_POSITION = TypeAdapter(Position)


def _require_consistent(position: Position) -> None:
    """Refuses numbers that each are possible, but not together."""
    part, totals = position.part, position.totals
    rows = [row.epoch for row in position.rows if row.turn == position.turn]
    if rows != list(range(1, position.epoch + 1)):
        raise ValueError(f"epoch: {position.epoch} are done of turn {position.turn}, but there are rows of {rows}")
    if not part.batches <= position.batches <= position.step:
        raise ValueError(
            f"batches: {part.batches} of the epoch, {position.batches} of the turn, {position.step} of all"
        )
    for kept in (part, totals):
        if kept.shapes.total() > kept.batches or kept.tokens > kept.padded:
            raise ValueError(
                f"shapes: of {kept.shapes.total()} batches with {kept.tokens} of {kept.padded} tokens, but there were "
                f"{kept.batches} batches"
            )
    shapes = [tuple(losses.shape) for losses in position.losses.values()]
    # A layer may report some batches only.
    if any(len(shape) != 2 or shape[0] > part.batches for shape in shapes):
        raise ValueError(f"losses: {shapes} of {part.batches} batches")
    for stage in totals.stages:
        seconds = (*stage.waiting.values(), stage.kernels_s or 0.0)
        if set(stage.busy) != set(Action) or not all(0 <= s < math.inf for s in seconds):
            raise ValueError(f"totals.stages: found {reprlib.repr(stage)}")


def means_of(losses: Tensor) -> tuple[list[float], int]:
    """The mean of each local loss of a layer, ``(batches, losses)``, over the batches where all are finite, and the
    number of the others."""
    finite = losses.isfinite().all(1)
    return losses[finite].mean(0).tolist(), int((~finite).sum())


def joined(first: Mapping[int, Tensor], then: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The losses of an epoch's two parts, layer by layer; a layer may have reported in one of them alone.

    Raises:
        DataError: One has another number of losses in each.
    """
    found = {}
    for number in sorted({*first, *then}):
        parts = [part[number] for part in (first, then) if number in part]
        counts = [losses.shape[1] for losses in parts]
        if counts[0] != counts[-1]:
            raise DataError(
                f"layer {number} reports {counts[1]} losses, and {counts[0]} up to the checkpoint amid this epoch; "
                "wanted as many all through an epoch"
            )
        found[number] = torch.cat(parts)
    return found


def numbered(losses: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Those of a checkpoint under way, as they are kept."""
    return {str(number): of_layer for number, of_layer in losses.items()}
