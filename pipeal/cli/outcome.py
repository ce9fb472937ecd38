"""What a run came to: the summary that is kept, the table that is shown, the pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeal.config import RunConfig
from pipeal.train.attempts import Attempts
from pipeal.train.batches import Batches
from pipeal.train.environment import environment
from pipeal.train.exits import ExitTable
from pipeal.train.measure import Measure, measure_of
from pipeal.train.peak_memory import peak_memory_bytes
from pipeal.train.plots import draw_curves
from pipeal.train.position import Totals
from pipeal.train.recorders import EpochRow, write_json
from pipeal.train.tables import print_table

TRACED = ("timeline.png", "trace.json")
"""What is written of batches that are trained on, and cannot be made when all of them are behind."""


@dataclass
class Outcome:
    """What training one form came to.

    Attributes:
        config: What was asked for, with every choice made: devices, sizes, threads, precision.
        rows: One per epoch and turn; at least one.
        totals: Of all turns together.
        facts: What the data turned out to be.
        lengths: ``(N,)`` of the training samples; None where they have no length.
        parameters: Effective and affiliated parameters.
        folder: Where its files are.
        exits: What each exit is worth after the last turn; None where that is not measured.
        unsaved: What kept checkpoints from being written; None if all were.
        ended_unsaved: Whether the last checkpoint is one of them.
        afterword: What else there is to show, in lines.
    """

    config: RunConfig
    rows: list[EpochRow]
    totals: Totals
    facts: dict[str, int | float | str]
    lengths: npt.NDArray[np.int64] | None
    parameters: tuple[int, int]
    folder: Path
    exits: ExitTable | None = None
    unsaved: str | None = None
    ended_unsaved: bool = False
    afterword: Sequence[str] = ()

    @cached_property
    def batches(self) -> Batches:
        """What was trained on, when it has come to its end."""
        return Batches(self.totals.shapes, self.lengths)

    @property
    def form(self) -> str:
        """``AL`` or ``BP``."""
        return self.config.train.mode.upper()

    @property
    def best(self) -> float:
        """The best test accuracy, or validation loss, averaged over turns."""
        return self.measure.best(self.rows)

    @property
    def last(self) -> float:
        """The test accuracy, or validation loss, after the last epoch, averaged over turns."""
        return self.measure.last(self.rows)

    @property
    def measure(self) -> Measure:
        """How its epochs are measured."""
        return measure_of(self.rows)

    @property
    def epoch_s(self) -> float:
        """Seconds of training per epoch."""
        return mean(row.epoch_time for row in self.rows)

    def summary(self) -> dict[str, object]:
        """Every figure with its circumstances, for ``summary.json``."""
        totals, engine = self.totals, self.config.engine
        return {
            "dataset": self.config.dataset,
            "model": self.config.model.name,
            "form": self.form,
            f"best_{self.measure.key}": self.best,
            f"last_{self.measure.key}": self.last,
            "seconds_per_epoch": self.epoch_s,
            "samples_per_s": totals.samples / totals.seconds,
            "tokens_per_s": totals.tokens / totals.seconds,
            "padding_share": totals.padding_share,
            "samples_per_batch": totals.samples / totals.shapes.total(),  # of those that were not left out
            "non_finite_updates_skipped": totals.non_finite,
            "overflowed_updates_skipped": sum(totals.overflows.values()),
            "batches_left_out": len(totals.left_out),
            "updates_in_parts": totals.splits,
            "batches_per_epoch": totals.batches / len(self.rows),
            "batches": self.batches.summary(),
            "schedule": engine.schedule,
            "devices": list(engine.devices),
            "sizes": list(engine.sizes or ()),
            "threads": engine.threads,
            "precision": self.config.train.precision,
            "stages": [
                {
                    "busy_share": share,
                    "busy_s": {str(action): seconds for action, seconds in stage.busy.items()},
                    "waiting_s": stage.waiting,
                }
                for share, stage in zip(totals.busy_share, totals.stages, strict=True)
            ],
            "effective_parameters": self.parameters[0],
            "affiliated_parameters": self.parameters[1],
            "compile": engine.compile,
            "peak_memory_bytes": peak_memory_bytes(engine.devices),
            "data": self.facts,
            "environment": environment(),
        }

    def write(self, attempts: Attempts) -> None:
        """Writes ``summary.json``, ``curves.png`` and, for samples with lengths, ``batches.png``, if there are rows."""
        if not self.rows:
            return
        write_summary(self.folder, self.summary, attempts)
        write_curves([self], self.folder, attempts)
        if self.lengths is not None:
            title = f"{self.config.dataset} {self.config.model.name} {self.form}: batches"
            path = self.folder / "batches.png"
            attempts.make(path, lambda: self.batches.draw(path, title, self.totals.padding_share))


def write_summary(folder: Path, summary: Callable[[], Mapping[str, Any]], attempts: Attempts) -> None:
    """Writes ``summary.json``."""
    path = folder / "summary.json"
    attempts.make(path, lambda: write_json(path, summary()))


def write_curves(outcomes: Sequence[Outcome], folder: Path, attempts: Attempts) -> None:
    """Draws the curves of one form, or of several for comparison."""
    config = outcomes[0].config
    rows = {outcome.form: outcome.rows for outcome in outcomes}
    path, title = folder / "curves.png", f"{config.dataset} {config.model.name}"
    attempts.make(path, lambda: draw_curves(rows, path, title=title))


def show(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Prints the table and where the files are."""
    compared = len(outcomes) > 1
    tokens = outcomes[0].totals.tokens > 0
    measure = outcomes[0].measure
    columns = ["form", "stages", f"best {measure.short}", f"last {measure.short}", "s/epoch", "samples/s"]
    columns += ["tokens/s", "busy"] if tokens else ["busy"]
    rows = []
    for outcome in outcomes:
        totals = outcome.totals
        cells = [
            outcome.form,
            f"{len(outcome.config.engine.devices)}",
            f"{outcome.best:.4f}",
            f"{outcome.last:.4f}",
            f"{outcome.epoch_s:.2f}",
            f"{totals.samples / totals.seconds:,.0f}",
            *([f"{totals.tokens / totals.seconds:,.0f}"] if tokens else []),
            " ".join(f"{share:.0%}" for share in totals.busy_share),
        ]
        rows.append([*cells, f"{outcomes[-1].epoch_s / outcome.epoch_s:.2f}×"] if compared else cells)
    config = outcomes[0].config
    if compared:
        columns.append(f"speed-up over {outcomes[-1].form}")
    print_table(f"{config.dataset} {config.model.name}, {config.train.epochs} epochs", columns, rows)
    for outcome in outcomes:
        if outcome.totals.non_finite:
            print(f"skipped:  {outcome.totals.non_finite:,} updates of {outcome.form} layers, for a non-finite loss")
        if overflows := sum(outcome.totals.overflows.values()):
            print(f"overflow: {overflows:,} updates of {outcome.form} layers were left out, for gradients beyond fp16")
        if outcome.totals.left_out:
            print(f"left out: {len(outcome.totals.left_out):,} batches of {outcome.form}, for which it went back")
        if outcome.totals.splits:
            print(f"in parts: {outcome.totals.splits:,} updates of {outcome.form} layers, for want of memory")
        if outcome.exits is not None:
            outcome.exits.show(f"{outcome.form} exits on {outcome.exits.samples:,} test samples")
            _show_picture("exits", outcome.folder / "exits.png")
    first = outcomes[0]
    print(f"files:    {folder}")
    _show_picture("curves", folder / "curves.png")
    _show_picture("timeline", first.folder / "timeline.png")
    if first.lengths is not None:
        _show_picture("batches", first.folder / "batches.png")
        print(
            f"padding:  {first.totals.padding_share:.1%} of the tokens trained on; "
            f"{first.batches.padding_of_random:.1%} in random batches of as many samples"
        )
    for outcome in outcomes:
        if compared and outcome.afterword:
            print(f"{outcome.form}:")
        for line in outcome.afterword:
            print(line)


def _show_picture(kind: str, path: Path) -> None:
    """One that could not be drawn is named elsewhere."""
    if path.exists():
        print(f"{kind + ':':<9} {path}")
