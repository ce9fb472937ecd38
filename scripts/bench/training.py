"""Does it matter to training how samples are joined into batches? Accuracy, time and padding of several ways.

    python scripts/bench/training.py agnews transformer --data-root DIR [--kinds plan fixed] [--seeds 3]

Trains the AL form with the shipped configuration, once for each kind and seed. Kinds that count samples get as many in
a batch as the plan has on average, so that all make about as many updates. The kinds take turns epoch by epoch, in one
process, and the order changes from seed to seed; accuracy is that after the last epoch.
"""

from __future__ import annotations

import argparse
import json
import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from pipeal.config import RunConfig, TextConfig, find_config, load_config
from pipeal.config.text import KINDS
from pipeal.data import EpochBatches
from pipeal.engine import Pipeline
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.reporting.environment import environment
from pipeal.reporting.progress import Progress
from pipeal.reporting.tables import print_table
from pipeal.run.build_text import TextExperiment, text_experiment
from pipeal.run.choices import choose
from pipeal.run.duration import at_its_length
from pipeal.run.opening import course_of, open_pipeline
from pipeal.training.evaluation import accuracy
from pipeal.training.position import Position
from pipeal.training.trainer import Scores, fit

COUNTING = ("fixed", "bucket")
"""The kinds that count samples."""


def of_kind(experiment: TextExperiment, kind: str, batch_size: int) -> TextExperiment:
    """The experiment with its batches joined in that way; ``batch_size`` is for those that count samples."""
    config = experiment.config
    batching = replace(config.data.batching, kind=kind)
    if kind in COUNTING:
        batching = replace(batching, batch_size=batch_size)
    return experiment.under(replace(config, data=replace(config.data, batching=batching)))


def train_in_turns(experiments: dict[str, TextExperiment], chosen: RunConfig, seed: int) -> dict[str, Position]:
    """One training of each kind, epoch by epoch side by side; where each of them stands at the end."""
    course = course_of(chosen)
    positions = {kind: Position() for kind in list(experiments)[:: -1 if seed % 2 else 1]}
    with ExitStack() as open_now:
        trainings = []
        for kind, position in positions.items():
            experiment = experiments[kind]
            evaluate = partial(_evaluate, experiment.test_evaluation())
            trainings.append(
                fit(
                    open_now.enter_context(open_pipeline(experiment.package("al", seed), chosen, seed)),
                    experiment.train_batches(seed),
                    evaluate,
                    course,
                    Progress(epochs=course.epochs, label=f"{kind}, seed {seed}"),
                    position,
                )
            )
        for _ in range(course.epochs):
            for training in trainings:
                next(training)
    return positions


def _evaluate(test: EpochBatches, pipe: Pipeline) -> Scores:
    return Scores(0.0, accuracy(pipe, test))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("model")
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--kinds", nargs="+", default=["plan", "fixed"], choices=list(KINDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="by default those of the configuration")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args()

    values = {"dataset": options.dataset, "model": {"name": options.model}, "data": {"root": options.data_root}}
    config = load_config(
        TextConfig, find_config(options.dataset, options.model), overrides=options.overrides, values=values
    )
    if options.epochs:
        config = replace(config, train=replace(config.train, epochs=options.epochs))
    whole = text_experiment(config)
    whole = whole.under(at_its_length(whole, whole.config))
    planned = len(of_kind(whole, "plan", 1).train_batches(0))
    experiments = {kind: of_kind(whole, kind, -(-len(whole.train) // planned)) for kind in options.kinds}
    chosen = choose(of_kind(whole, "plan", 1), "al")
    trained: dict[str, list[Position]] = {kind: [] for kind in experiments}
    for seed in range(options.seeds):
        for kind, position in train_in_turns(experiments, chosen, seed).items():
            trained[kind].append(position)

    facts = environment()
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    figures: dict[str, dict[str, Any]] = {}
    for kind, positions in trained.items():
        figures[kind] = {
            "accuracy": [position.rows[-1].test_acc for position in positions],
            "seconds_per_epoch": median(row.epoch_time for position in positions for row in position.rows),
            "batches_per_epoch": mean(position.totals.batches / len(position.rows) for position in positions),
            "padding": mean(position.totals.padding_share for position in positions),
            "epochs": [[row.test_acc for row in position.rows] for position in positions],
        }
    slowest = max(found["seconds_per_epoch"] for found in figures.values())
    print_table(
        f"{options.dataset} {options.model}, AL, {chosen.train.epochs} epochs, {options.seeds} seeds",
        ["batches", "test acc, mean", "each seed", "s/epoch", "speed-up", "batches/epoch", "padding"],
        [
            [
                kind,
                f"{mean(found['accuracy']):.4f}",
                " ".join(f"{value:.4f}" for value in found["accuracy"]),
                f"{found['seconds_per_epoch']:.1f}",
                f"{slowest / found['seconds_per_epoch']:.2f}×",
                f"{found['batches_per_epoch']:.0f}",
                f"{found['padding']:.1%}",
            ]
            for kind, found in figures.items()
        ],
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": facts, "kinds": figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
