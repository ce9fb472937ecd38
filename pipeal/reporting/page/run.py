"""A run as its folder tells it: configuration, rows, summary, status, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pipeal.core.artifacts import ASKED, CONFIG, ROWS, STATUS, SUMMARY
from pipeal.core.methods import DEFAULT, METHODS
from pipeal.training.metric import ACCURACY, LOSS, MeanSd, Measure, measure_of
from pipeal.training.row import EpochRow

MARKS = tuple(mark.name for mark in (CONFIG, ASKED, STATUS, SUMMARY, ROWS))
"""A folder with any of these is a run."""

State = Literal["running", "finished", "interrupted", "failed", "died", "unknown"]


@dataclass(frozen=True)
class Status:
    """How a run stands.

    Attributes:
        state: ``died`` is a run that says it is running, but whose process is gone. ``unknown`` is one that says
            nothing and has not come to its end.
        message: What the run said last; empty if nothing.
        started: When it began, in ISO 8601; empty where it did not say.
        updated: When it spoke last, in ISO 8601.
    """

    state: State
    message: str = ""
    started: str = ""
    updated: str = ""


@dataclass(frozen=True)
class Run:
    """What one form of one run left. Nothing in it is certain to be there: a run may have died at any moment.

    Attributes:
        folder: Where its files are.
        name: What people call it: the folder's name, and of a comparison also the form's.
        status: How it stands.
        config: The nested configuration; empty if missing.
        summary: What ``summary.json`` holds; empty if missing.
        rows: One per epoch and turn.
        exits: What ``exits.json`` holds; empty if missing.
        missing: One line for each file that is not there or cannot be read.
    """

    folder: Path
    name: str
    status: Status
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Sequence[EpochRow]
    exits: Mapping[str, Any]
    missing: tuple[str, ...]

    @property
    def dataset(self) -> str:
        """The data set's name."""
        return _text(self.config.get("dataset") or self.summary.get("dataset"))

    @property
    def model(self) -> str:
        """The model's name."""
        return _text(value_at(self.config, "model.name") or self.summary.get("model"))

    @property
    def form(self) -> str:
        """What tables and pictures call it: ``AL``, ``BP``, ``BP over 2``."""
        mode = _text(value_at(self.config, "train.mode"))
        return _text(self.summary.get("form") or (METHODS[mode].label if mode in METHODS else mode.upper()))

    @property
    def loss_titles(self) -> tuple[str, ...]:
        """Of charts, one for each of a layer's losses."""
        return METHODS.get(_text(value_at(self.config, "train.mode")), DEFAULT).loss_titles

    @property
    def epochs(self) -> tuple[int, int | None]:
        """Epochs done and asked for, of all turns together; None where that is not known."""
        return len(self.rows), epochs_asked(self.config)

    @property
    def at_best(self) -> MeanSd | None:
        """The test accuracy, or validation loss, of each turn's best epoch by its held-out samples."""
        measure = self.measure
        return measure.at_best(self.rows) if self.rows else self._summarised(f"{measure.key}_at_best_held_out")

    @property
    def last(self) -> MeanSd | None:
        """The test accuracy, or validation loss, after each turn's last epoch."""
        return self.measure.last(self.rows) if self.rows else self._summarised(f"last_{self.measure.key}")

    @property
    def epoch_s(self) -> MeanSd | None:
        """Seconds of training of each epoch."""
        if self.rows:
            return MeanSd.of(row.epoch_time for row in self.rows)
        return self._summarised("seconds_per_epoch")

    @property
    def parameters(self) -> tuple[float | None, float | None]:
        """How many are trained, and how many an inference takes."""
        trained, inference, effective, affiliated = (
            number_at(self.summary, f"{kind}_parameters")
            for kind in ("training", "inference", "effective", "affiliated")
        )
        if effective is not None and affiliated is not None:  # as runs of earlier versions tell it
            return effective + affiliated, effective
        return trained, inference

    def _summarised(self, key: str) -> MeanSd | None:
        """A mean of the summary, whose turns are not known."""
        found = number_at(self.summary, key)
        return None if found is None else MeanSd((found,))

    @property
    def measure(self) -> Measure:
        """How its epochs are measured."""
        if self.rows:
            return measure_of(self.rows)
        return LOSS if f"last_{LOSS.key}" in self.summary else ACCURACY

    @property
    def when(self) -> datetime:
        """When it began, or else when its oldest file was written last; as clocks here show it."""
        try:
            return datetime.fromisoformat(self.status.started.replace("Z", "+00:00")).astimezone()
        except (ValueError, OverflowError):
            seconds = [file.stat().st_mtime for file in map(self.folder.joinpath, MARKS) if file.is_file()]
            return datetime.fromtimestamp(min(seconds, default=self.folder.stat().st_mtime), timezone.utc).astimezone()

    @property
    def size_bytes(self) -> int:
        """What its files take that may be looked at, links not followed."""
        found = 0
        for folder, _, files in os.walk(self.folder):
            for name in files:
                try:
                    found += os.lstat(os.path.join(folder, name)).st_size
                except (
                    FileNotFoundError,
                    PermissionError,
                ):  # a live run renames files; a folder may hide all but names
                    continue
        return found


def value_at(mapping: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none.

    >>> value_at({"train": {"lr": {"base": 0.1}}}, "train.lr.base")
    0.1
    """
    for key in path.split("."):
        if not isinstance(mapping, Mapping):
            return None
        mapping = mapping.get(key)
    return mapping


def number_at(mapping: Any, path: str) -> float | None:
    """The finite number at a dotted path; None where there is none, or something else."""
    value = value_at(mapping, path)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        return None
    return float(value)


def epochs_asked(config: Mapping[str, Any]) -> int | None:
    """The epochs of all turns; None where a configuration does not say."""
    epochs, turns = number_at(config, "train.epochs"), number_at(config, "train.repeat")
    return round(epochs * (turns or 1)) if epochs else None


def _text(value: Any) -> str:
    return str(value) if isinstance(value, (str, int, float)) else "?"
