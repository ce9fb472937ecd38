"""What a run came to: the summary that is kept, the table that is shown, the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeal.config import RunConfig
from pipeal.core.artifacts import BATCHES, CURVES, EXITS_PICTURE, SUMMARY, TIMELINE
from pipeal.core.methods import BASELINE, METHODS
from pipeal.engine.trace import Span
from pipeal.reporting.attempts import Attempts
from pipeal.reporting.batches import Batches
from pipeal.reporting.environment import environment, peak_memory_bytes
from pipeal.reporting.exits import print_exits
from pipeal.reporting.plots import draw_curves
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import Cell, print_table
from pipeal.run.build import Experiment
from pipeal.run.form_costs import FormCosts
from pipeal.run.forms import Form
from pipeal.run.opening import seed_of
from pipeal.training.exits import ExitTable
from pipeal.training.metric import MeanSd, Measure, best_rows, held_rows, last_rows, measure_of
from pipeal.training.position import Position, Totals
from pipeal.training.row import EpochRow


@dataclass
class Outcome:
    """What training one form came to.

    Attributes:
        form: Which, with every choice made: devices, sizes, threads, precision.
        experiment: With the configuration of this form.
        folder: Where its files are.
        position: How far it is, with a row for each epoch and the totals of all turns; moves along.
        parameters: Effective and affiliated parameters: those of an inference, and those that serve training alone.
            None of either before there is a model.
        exits: What each exit is worth after the last turn; None where that is not measured.
        unsaved: What kept checkpoints from being written; None if all were.
        afterword: What else there is to show, in lines.
        costs: FLOPs and bytes; None of a training that has not come to its end.
        spans: What was traced of it in this process, if anything was.
    """

    form: Form
    experiment: Experiment
    folder: Path
    position: Position
    parameters: tuple[int, int] = (0, 0)
    exits: ExitTable | None = None
    unsaved: str | None = None
    afterword: Sequence[str] = ()
    costs: FormCosts | None = None
    spans: Sequence[Span] = ()

    @cached_property
    def batches(self) -> Batches:
        """What was trained on, when it has come to its end."""
        return Batches(self.totals.shapes, self.experiment.lengths)

    @property
    def config(self) -> RunConfig:
        """Of this form."""
        return self.form.config

    @property
    def last_seed(self) -> int:
        """That of the last turn, whose weights are left in the end."""
        return seed_of(self.config, self.config.train.repeat)

    @property
    def rows(self) -> list[EpochRow]:
        """One per epoch and turn."""
        return self.position.rows

    @property
    def totals(self) -> Totals:
        """Of all turns together."""
        return self.position.totals

    @property
    def measure(self) -> Measure:
        """How its epochs are measured."""
        return measure_of(self.rows)

    @property
    def epoch_s(self) -> MeanSd:
        """Seconds of training of each epoch."""
        return MeanSd.of(row.epoch_time for row in self.rows)

    def summary(self) -> dict[str, object]:
        """Every figure with its circumstances, for ``summary.json``."""
        totals, engine = self.totals, self.config.engine
        return {
            "dataset": self.config.dataset,
            "model": self.config.model.name,
            "form": self.form.label,
            **self._chosen(),
            "seconds_per_epoch": self.epoch_s.mean,
            "seconds_per_epoch_sd": self.epoch_s.sd,
            "seconds_per_epoch_least": min(self.epoch_s.values),
            "seconds_per_epoch_most": max(self.epoch_s.values),
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
                    **({} if kernels is None else {"kernel_busy_share_at_least": kernels}),
                    "busy_s": {str(action): seconds for action, seconds in stage.busy.items()},
                    "waiting_s": stage.waiting,
                }
                for share, kernels, stage in zip(totals.busy_share, totals.kernel_share, totals.stages, strict=True)
            ],
            "training_parameters": sum(self.parameters),
            "inference_parameters": self.parameters[0],
            **({} if self.costs is None else self.costs.summary()),
            "compile": engine.compile,
            "peak_memory_bytes": peak_memory_bytes(engine.devices),
            "data": self.experiment.facts,
            "environment": environment(),
        }

    def _chosen(self) -> dict[str, object]:
        """What the epochs came to: of the split that is named, over turns, and of each turn with its seed."""
        measure = self.measure
        at_best, last = measure.at_best(self.rows), measure.last(self.rows)
        best = {row.turn: row for row in best_rows(self.rows)}
        ends = {row.turn: row for row in last_rows(self.rows)}
        turns = []
        for turn in sorted({row.turn for row in self.rows}):
            told: dict[str, object] = {"turn": turn, "seed": seed_of(self.config, turn)}
            for which, row in (("best", best.get(turn)), ("last", ends.get(turn))):
                told[f"{which}_epoch"] = None if row is None else row.epoch
                told[f"{measure.held_key}_of_{which}"] = None if row is None else measure.held(row)
                told[f"{measure.key}_of_{which}"] = None if row is None else measure.test(row)
            turns.append(told)
        return {
            "best_chosen_by": measure.held_name if best else None,
            f"{measure.key}_at_best_held_out": None if at_best is None else at_best.mean,
            f"{measure.key}_at_best_held_out_sd": None if at_best is None else at_best.sd,
            "best_epochs": [told["best_epoch"] for told in turns] if best else [],
            f"last_{measure.key}": last.mean,
            f"last_{measure.key}_sd": last.sd,
            "turns": turns,
        }

    def write(self, attempts: Attempts) -> None:
        """Writes ``summary.json``, ``curves.png`` and, for samples with lengths, ``batches.png``, if there are rows."""
        if not self.rows or not any(self.parameters):
            return
        write_outcomes([self], self.folder, attempts)
        if self.experiment.lengths is not None:
            title = f"{self.config.dataset} {self.config.model.name} {self.form.label}: batches"
            path = BATCHES.at(self.folder)
            attempts.make(path, lambda: self.batches.draw(path, title, self.totals.padding_share))


def write_outcomes(outcomes: Sequence[Outcome], folder: Path, attempts: Attempts) -> None:
    """Writes ``summary.json``, and draws the curves: of one form, or of several for comparison."""
    first, kept, drawn = outcomes[0], SUMMARY.at(folder), CURVES.at(folder)
    rows = {outcome.form.label: outcome.rows for outcome in outcomes}
    losses = {outcome.form.label: METHODS[outcome.config.train.mode].loss_titles for outcome in outcomes}
    title = f"{first.config.dataset} {first.config.model.name}"

    def summary() -> dict[str, object]:
        if len(outcomes) == 1:
            return first.summary()
        return {outcome.form.label: outcome.summary() for outcome in outcomes}

    attempts.make(kept, lambda: write_json(kept, summary()))
    attempts.make(drawn, lambda: draw_curves(rows, drawn, title, losses))


def show(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Prints the tables, what they are of, and where the files are."""
    first, config = outcomes[0], outcomes[0].config
    epochs = f"{config.train.epochs} epoch{'s' * (config.train.epochs > 1)}"
    title = f"{config.dataset} {config.model.name}, {epochs}{_seeds(config)}"
    rival = _rival(outcomes) if len(outcomes) > 1 else None
    _print(title, [_result(outcome) for outcome in outcomes])
    _tell_choice(outcomes)
    over = "" if rival is None else f", speed-up over {rival.form.label}"
    _print(f"costs{over}", [_cost(outcome, rival) for outcome in outcomes])
    if any(outcome.costs is not None for outcome in outcomes):
        print("counted:  MFLOPs per sample of products, convolutions, attention and recurrences; MiB of weights")
        print("          and optimizer states, of the gradients that are there at once, and of what graphs keep of the")
        print("          largest batch")
    for outcome in outcomes:
        _tell_losses(outcome)
        if outcome.exits is not None:
            where = f"{outcome.form.label} exits {_at_the_end(outcome)}"
            print_exits(outcome.exits, f"{where}, on {outcome.exits.samples:,} test samples")
            _show_picture("exits", EXITS_PICTURE.at(outcome.folder))
    print(f"files:    {folder}")
    _show_picture("curves", CURVES.at(folder))
    _show_picture("timeline", TIMELINE.at(first.folder))
    if first.experiment.lengths is not None:
        _show_picture("batches", BATCHES.at(first.folder))
        print(
            f"padding:  {first.totals.padding_share:.1%} of the tokens trained on; "
            f"{first.batches.padding_of_random:.1%} in random batches of as many samples"
        )
    for outcome in outcomes:
        if outcome.afterword:
            print(f"{outcome.form.label} {_at_the_end(outcome)}:")
        for line in outcome.afterword:
            print(line)


def _at_the_end(outcome: Outcome) -> str:
    """Of which epoch and seed is what the weights that are there say."""
    return f"after epoch {outcome.config.train.epochs} of seed {outcome.last_seed}"


def _print(title: str, rows: Sequence[Mapping[str, Cell]]) -> None:
    """A table of rows that have the same heads."""
    print_table(title, [*rows[0]], [[*row.values()] for row in rows])


def _result(outcome: Outcome) -> dict[str, Cell]:
    """What a form has learnt, and with how much."""
    engine, measure, at_best = outcome.config.engine, outcome.measure, outcome.measure.at_best(outcome.rows)
    return {
        "form": outcome.form.label,
        "stages": f"{len(engine.devices)}",
        "threads": engine.threads,
        f"{measure.short} at best held-out": None if at_best is None else str(at_best),
        f"last {measure.short}": str(measure.last(outcome.rows)),
        "parameters": f"{sum(outcome.parameters):,}",
        "at inference": f"{outcome.parameters[0]:,}",
    }


def _cost(outcome: Outcome, rival: Outcome | None) -> dict[str, Cell]:
    """What a form took, and its speed-up over a rival."""
    totals, costs = outcome.totals, outcome.costs
    cells: dict[str, Cell] = {
        "form": outcome.form.label,
        "train MFLOPs": None if costs is None else costs.training_flops / 1e6,
        "infer MFLOPs": None if costs is None else costs.inference_flops / 1e6,
        "MiB": None if costs is None else costs.memory_bytes / 2**20,
        "s/epoch": outcome.epoch_s.shown("{:.2f}".format),
        "samples/s": f"{totals.samples / totals.seconds:,.0f}",
    }
    if totals.tokens:  # images have none
        cells["tokens/s"] = f"{totals.tokens / totals.seconds:,.0f}"
    kernels = [share for share in totals.kernel_share if share is not None]
    cells["host-open" if kernels else "busy"] = _shares(totals.busy_share)
    if kernels:
        cells["kernel-busy, at least"] = _shares(kernels)
    if rival is not None:
        cells["speed-up"] = f"{rival.epoch_s.mean / outcome.epoch_s.mean:.2f}×"
    return cells


def _rival(outcomes: Sequence[Outcome]) -> Outcome:
    """What the others are held against: backpropagation on one device, or without it the form that was named first."""
    return next((outcome for outcome in outcomes if outcome.config.train.mode == BASELINE.name), outcomes[0])


def _shares(shares: Sequence[float]) -> str:
    """The share of each stage; of many, the least and the most.

    >>> _shares([0.5, 0.96]), _shares([0.5, 0.25, 0.5, 0.75, 1.0])
    ('50% 96%', '25% to 100%')
    """
    if len(shares) > 4:
        return f"{min(shares):.0%} to {max(shares):.0%}"
    return " ".join(f"{share:.0%}" for share in shares)


def _seeds(config: RunConfig) -> str:
    first, last = seed_of(config, 1), seed_of(config, config.train.repeat)
    return f", seed {first}" if config.train.repeat == 1 else f", mean ± sd of seeds {first} to {last}"


def _tell_choice(outcomes: Sequence[Outcome]) -> None:
    """Which epochs were chosen, and by what; or why none was."""
    if not all(held_rows(outcome.rows, outcome.measure) for outcome in outcomes):
        print("chosen:   no epoch, since nothing is held out to choose by (data.held_out is 0)")
        return
    epochs = ", ".join(f"{outcome.form.label} {_chosen_epochs(outcome.rows)}" for outcome in outcomes)
    turns = "of each turn " if outcomes[0].config.train.repeat > 1 else ""
    diverged = " (none: it diverged)" * any(one.measure.at_best(one.rows) is None for one in outcomes)
    print(f"chosen:   the epoch {turns}with the best {outcomes[0].measure.held_name}: {epochs}{diverged}")


def _chosen_epochs(rows: Sequence[EpochRow]) -> str:
    """That of each turn."""
    best = {row.turn: f"{row.epoch}" for row in best_rows(rows)}
    return " ".join(best.get(turn, "none") for turn in sorted({row.turn for row in rows}))


def _tell_losses(outcome: Outcome) -> None:
    """Which updates and batches a form did not learn from as it was to."""
    totals, label = outcome.totals, outcome.form.label
    for what, count, of_which in (
        ("skipped", totals.non_finite, f"updates of {label} layers, for a non-finite loss"),
        (
            "overflow",
            sum(totals.overflows.values()),
            f"updates of {label} layers were left out, for gradients beyond fp16",
        ),
        ("left out", len(totals.left_out), f"batches of {label}, for which it went back"),
        ("in parts", totals.splits, f"updates of {label} layers, for want of memory"),
    ):
        if count:
            print(f"{what + ':':<9} {count:,} {of_which}")


def _show_picture(kind: str, path: Path) -> None:
    """One that could not be drawn is named elsewhere."""
    if path.exists():
        print(f"{kind + ':':<9} {path}")
