"""Does it matter to training how samples are joined into batches? Accuracy, time and padding of several ways.

    python scripts/bench/training.py agnews transformer --data-root DIR [--kinds plan fixed] [--seeds 3]

Trains the AL form with the shipped configuration, once for each kind and seed. Kinds that count samples get as many in
a batch as the plan has on average, so that all make about as many updates. The kinds take turns epoch by epoch, in one
process, and the order changes from seed to seed; accuracy is that after the last epoch.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import get_args, get_type_hints

from pipeal.cli.build_text import TextExperiment, text_experiment
from pipeal.cli.choices import choose
from pipeal.config import BatchingConfig, TextConfig, find_config, load_config
from pipeal.engine import Pipeline
from pipeal.engine.allocator import keep_freed_memory
from pipeal.train.environment import environment
from pipeal.train.progress import Progress
from pipeal.train.recorders import EpochRow
from pipeal.train.tables import print_table
from pipeal.train.trainer import Course, Totals, accuracy, fit

COUNTING = ("fixed", "bucket")
"""The kinds that count samples."""


def of_kind(experiment: TextExperiment, kind: str, batch_size: int) -> TextExperiment:
    """The experiment with its batches joined in that way; ``batch_size`` is for those that count samples."""
    config = experiment.config
    batching = replace(config.data.batching, kind=kind)  # type: ignore[arg-type]
    if kind in COUNTING:
        batching = replace(batching, batch_size=batch_size)
    return replace(experiment, config=replace(config, data=replace(config.data, batching=batching)))


def train_in_turns(
    experiments: dict[str, TextExperiment], chosen: TextConfig, seed: int, totals: dict[str, Totals]
) -> dict[str, list[EpochRow]]:
    """One training of each kind, epoch by epoch side by side."""
    rate, engine = chosen.train.lr, chosen.engine
    course = Course(chosen.train.epochs, rate.decay, rate.per, (rate.end or 0.0) / rate.base, rate.warmup)
    rows: dict[str, list[EpochRow]] = {kind: [] for kind in experiments}
    kinds = list(experiments)[:: -1 if seed % 2 else 1]
    with ExitStack() as open_now:
        trainings = {}
        for kind in kinds:
            watcher = Progress(epochs=course.epochs, label=f"{kind}, seed {seed}")
            pipe = open_now.enter_context(
                Pipeline(
                    experiments[kind].package("al", seed),
                    engine.devices,
                    engine.schedule,
                    sizes=engine.sizes,
                    queue_depth=engine.queue_depth,
                    seed=seed,
                    threads=engine.threads,
                    precision=chosen.train.precision,  # type: ignore[arg-type]
                    compile=engine.compile,
                )
            )
            test = experiments[kind].test_evaluation()
            trainings[kind] = fit(
                pipe,
                experiments[kind].train_batches(seed),
                lambda pipe, test=test: (0.0, accuracy(pipe, test)),
                course,
                watcher,
                totals[kind],
            )
        for _ in range(course.epochs):
            for kind, training in trainings.items():
                rows[kind].append(next(training))
    return rows


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("model")
    parser.add_argument("--data-root", default="data")
    kinds = get_args(get_type_hints(BatchingConfig)["kind"])
    parser.add_argument("--kinds", nargs="+", default=["plan", "fixed"], choices=kinds)
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
    whole = text_experiment(config, lambda text: print(text, file=sys.stderr))
    planned = len(of_kind(whole, "plan", 1).train_batches(0))
    experiments = {kind: of_kind(whole, kind, -(-len(whole.train) // planned)) for kind in options.kinds}
    chosen = choose(of_kind(whole, "plan", 1), "al", lambda text: print(text, file=sys.stderr))
    totals = {kind: Totals() for kind in experiments}
    rows: dict[str, list[list[EpochRow]]] = {kind: [] for kind in experiments}
    for seed in range(options.seeds):
        for kind, found in train_in_turns(experiments, chosen, seed, totals).items():
            rows[kind].append(found)

    facts = environment()
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    figures = {}
    for kind, turns in rows.items():
        figures[kind] = {
            "accuracy": [turn[-1].test_acc for turn in turns],
            "seconds_per_epoch": median(row.epoch_time for turn in turns for row in turn),
            "batches_per_epoch": totals[kind].batches / sum(map(len, turns)),
            "padding": totals[kind].padding_share,
            "epochs": [[row.test_acc for row in turn] for turn in turns],
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
