"""Where a training stands between two batches: everything that is not in its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeal.engine import RunReport
from pipeal.engine.schedule import Action
from pipeal.engine.trace import StageTimes
from pipeal.train.recorders import EpochRow


@dataclass
class Part:
    """What was trained on of an epoch; ``shapes`` counts batches by their samples and padded length."""

    seconds: float = 0.0
    batches: int = 0
    samples: int = 0
    tokens: int = 0
    padded: int = 0
    shapes: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, other: Part) -> None:
        """Counts another part as well."""
        self.seconds += other.seconds
        self.batches += other.batches
        self.samples += other.samples
        self.tokens += other.tokens
        self.padded += other.padded
        self.shapes += other.shapes


@dataclass
class Totals(Part):
    """What all epochs amounted to; seconds are of training alone, without evaluation.

    Attributes:
        non_finite: Layers' updates that met a non-finite loss, and were left out.
        splits: Layers' updates that were made in parts for want of memory.
        stages: How each stage spent its time.
        stage_s: The seconds that ``stages`` accounts for: fewer than all where a training was taken up again.
    """

    non_finite: int = 0
    splits: int = 0
    stages: list[StageTimes] = field(default_factory=list)
    stage_s: float = 0.0

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


@dataclass
class Position:
    """Where a training stands.

    Attributes:
        turn: Of the trainings of a run, from 1.
        epoch: The epochs of this turn that are behind it, their evaluation included.
        batches: The batches of this turn that are behind it: the number of the next one.
        trained_s: Seconds of training in the epochs of this turn.
        part: What was done of the epoch under way.
        losses: By layer ``(batches, losses)``: those of ``part`` that the pipeline no longer holds.
        rows: One for each epoch of all turns.
        totals: Of all turns, without ``part``.
    """

    turn: int = 1
    epoch: int = 0
    batches: int = 0
    trained_s: float = 0.0
    part: Part = field(default_factory=Part)
    losses: list[Tensor] = field(default_factory=list)
    rows: list[EpochRow] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    @property
    def step(self) -> int:
        """The batches of all turns: rises from checkpoint to checkpoint."""
        return self.totals.batches + self.part.batches

    def next_turn(self) -> None:
        """Goes to the beginning of the next turn."""
        self.turn += 1
        self.epoch = self.batches = 0
        self.trained_s = 0.0

    def state(self) -> dict[str, Any]:
        """As JSON, without :attr:`losses`, which are tensors."""
        return {
            "turn": self.turn,
            "epoch": self.epoch,
            "batches": self.batches,
            "trained_s": self.trained_s,
            "part": _counts(self.part),
            "rows": [asdict(row) for row in self.rows],
            "totals": {
                **_counts(self.totals),
                "non_finite": self.totals.non_finite,
                "splits": self.totals.splits,
                "stage_s": self.totals.stage_s,
                "stages": [
                    {"busy": {str(action): s for action, s in stage.busy.items()}, "waiting": stage.waiting}
                    for stage in self.totals.stages
                ],
            },
        }

    @classmethod
    def of(cls, state: Mapping[str, Any], losses: list[Tensor]) -> Position:
        """What :meth:`state` gave.

        Raises:
            KeyError, TypeError, ValueError: It did not.
        """
        totals = dict(state["totals"])
        stages = [
            StageTimes({Action(name): s for name, s in stage["busy"].items()}, dict(stage["waiting"]))
            for stage in totals.pop("stages")
        ]
        rows = [EpochRow(**{**row, "losses": tuple(map(tuple, row["losses"]))}) for row in state["rows"]]
        numbers = {name: state[name] for name in ("turn", "epoch", "batches", "trained_s")}
        return cls(
            **numbers,
            part=Part(**_counted(state["part"])),
            losses=losses,
            rows=rows,
            totals=Totals(**_counted(totals), stages=stages),
        )


def joined(first: list[Tensor], then: list[Tensor]) -> list[Tensor]:
    """The losses of an epoch's two parts, layer by layer; either part may be empty."""
    return [torch.cat(pair) for pair in zip(first, then, strict=True)] if first and then else first or then


def _counts(part: Part) -> dict[str, Any]:
    return {
        "seconds": part.seconds,
        "batches": part.batches,
        "samples": part.samples,
        "tokens": part.tokens,
        "padded": part.padded,
        "shapes": [[*shape, times] for shape, times in sorted(part.shapes.items())],
    }


def _counted(state: Mapping[str, Any]) -> dict[str, Any]:
    shapes = Counter({(samples, length): times for samples, length, times in state["shapes"]})
    return {**state, "shapes": shapes}
