"""What each idea brings to layers that predict the next character by themselves, beside backpropagation.

    python scripts/bench/charlm.py --data-root DIR [--ideas codes published] [--seeds 1] [--steps 2000]

Trains the configuration ``shakespeare-charlm-cpu.yaml``, changed by one idea at a time, for equally many steps on the
same blocks, and estimates the validation loss of every exit on 200 batches that are the same for all. What is found
is added to ``--json`` (by default ``results/charlm.json`` beside this file), of which the table is made: ideas can be
tried one by one. Its rows are means over the seeds that backpropagation was trained with, too, so that they can be set
beside each other (of an idea that shares none, over all of its own); what is known of other seeds stands below it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from pipeal.config import LanguageConfig, find_config, load_config
from pipeal.engine import Pipeline
from pipeal.engine.devices import fastest_precision
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.reporting.environment import environment
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import Cell, print_table
from pipeal.run.build_language import LanguageExperiment, language_experiment
from pipeal.run.duration import at_its_length
from pipeal.run.opening import course_of, open_pipeline
from pipeal.training.evaluation import accuracy_and_loss
from pipeal.training.learning_rate import epoch_scale

IDEAS: dict[str, tuple[str, dict[str, Any]]] = {
    "bp": ("backpropagation", {"train.mode": "bp"}),
    "bp-1": ("backpropagation, one block alone", {"train.mode": "bp", "model.layers": 1}),
    "published": ("published: a sigmoid code per place, squared errors", {"model.labels": "published"}),
    "codes": ("which of all codes: cross entropy; codes as wide as the features", {"model.code": 128}),
    "wide": ("… and codes four times as wide as the alphabet: the default", {}),
    "wide-halves": ("… and two blocks a layer", {"model.per_layer": 2}),
    "narrow": ("… and narrow codes", {"model.code": 32}),
    "deep": ("… and a block in each bridge but the last", {"model.bridges": "block"}),
    "deep-halves": ("… and both", {"model.bridges": "block", "model.per_layer": 2}),
    "slow-labels": ("… and the label side a tenth as fast", {"train.lr.ae": 2e-4}),
    "lower": ("… and half the learning rate", {"train.lr.base": 1e-3, "train.lr.end": 1e-4}),
    "bp-lower": ("backpropagation, half the learning rate",
                 {"train.mode": "bp", "train.lr.base": 1e-3, "train.lr.end": 1e-4}),
}  # fmt: skip
"""What it is, and what it changes."""

ESTIMATE_BATCHES = 200


def trained(experiment: LanguageExperiment, seed: int) -> dict[str, Any]:
    """The validation loss of every exit, the training loss of the last, and the seconds."""
    config = experiment.config
    course, package = course_of(config), experiment.package(config.train.mode, seed)
    batches = experiment.train_batches(seed)
    pipe: Pipeline = open_pipeline(package, config, seed)
    with pipe:
        begun, seconds = time.process_time(), 0.0
        for epoch in range(course.epochs):
            batches.set_epoch(epoch)
            scale = epoch_scale(course, epoch, len(batches), epoch * len(batches))
            seconds += pipe.run(batches, lr_scale=scale).seconds
        begun = time.process_time() - begun
        criterion = experiment.criterion
        assert criterion is not None  # of a language model
        estimates = [
            accuracy_and_loss(pipe, experiment.test_evaluation(), criterion, exit_at)[1]
            for exit_at in range(1, len(package) + 1)
        ]
        train = accuracy_and_loss(pipe, experiment.train_evaluation(), criterion)[1]
    return {
        "seed": seed,
        "precision": config.train.precision,
        "threads": config.engine.threads,
        "validation": estimates,
        "train": train,
        "seconds": seconds,
        "processor_seconds": begun,
        "parameters": [package.effective_parameters(), package.affiliated_parameters()],
    }


def show(found: dict[str, Any]) -> None:
    """Prints the table: of the seeds that all ideas have, or else of those that an idea shares with its rival."""
    by_seed: dict[str, dict[int, dict[str, Any]]] = {
        name: {run["seed"]: run for run in made} for name, made in found["ideas"].items()
    }
    rows: list[list[Cell]] = []
    others = []
    common = set.intersection(*map(set, by_seed.values())) if by_seed else set()
    for name, (what, _) in IDEAS.items():
        if name in by_seed:
            rival = by_seed.get("bp-lower" if name == "lower" else "bp", {})
            seeds = sorted(common) or [seed for seed in by_seed[name] if seed in rival] or list(by_seed[name])
            runs = [by_seed[name][seed] for seed in seeds]
            exits = [mean(losses) for losses in zip(*(run["validation"] for run in runs), strict=True)]
            comparable = all(seed in rival for seed in seeds)
            over = exits[-1] - mean(rival[seed]["validation"][-1] for seed in seeds) if comparable else None
            rows.append(
                [
                    name,
                    what,
                    len(exits),
                    f"{exits[-1]:.3f}",
                    None if over is None else f"{over:+.3f}",
                    " ".join(f"{loss:.3f}" for loss in exits),
                    f"{mean(run['train'] for run in runs):.3f}",
                    f"{sum(runs[0]['parameters']) / 1e6:.2f} M",
                    " ".join(str(run["seed"]) for run in runs),
                ]
            )
            others += [
                f"{name}, seed {seed}: val loss {run['validation'][-1]:.3f}"
                for seed, run in by_seed[name].items()
                if run not in runs
            ]
    heads = ["idea", "what", "layers", "val loss", "over BP", "each exit", "train loss", "weights", "seeds"]
    runs = [run for made in found["ideas"].values() for run in made]
    for how in {json.dumps([run["machine"], run["precision"], run["threads"]]): run for run in runs}.values():
        machine = "  ".join(f"{key} {value}" for key, value in how["machine"].items())
        print(f"{machine}  {how['precision']}, {how['threads']} threads")
    print_table(f"charlm, cpu preset, {found['steps']:,} steps", heads, rows)
    for line in others:
        print(line)


def in_epochs(steps: int, most: int) -> tuple[int, int]:
    """So many epochs, and steps of each: the fewest epochs of at most ``most`` steps that make just ``steps``.

    >>> in_epochs(2000, 250), in_epochs(2100, 250)
    ((8, 250), (10, 210))
    """
    epochs = next(epochs for epochs in range(-(-steps // most), steps + 1) if steps % epochs == 0)
    return epochs, steps // epochs


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--ideas", nargs="*", default=list(IDEAS), choices=list(IDEAS), help="none: only the table")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "charlm.json")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps: found {options.steps}, expected at least 1")

    found: dict[str, Any] = {"steps": options.steps, "ideas": {}}
    if options.json.is_file():
        found = json.loads(options.json.read_text(encoding="utf-8"))
        if found["steps"] != options.steps:
            parser.error(f"{options.json} is of {found['steps']} steps; name another with --json")
    for name in options.ideas:
        values = {"data": {"root": options.data_root}}
        overrides = [f"{key}={json.dumps(value)}" for key, value in IDEAS[name][1].items()]
        config = load_config(
            LanguageConfig, find_config("shakespeare", "charlm-cpu"), overrides=overrides, values=values
        )
        epochs, steps = in_epochs(options.steps, config.data.steps)
        config = replace(
            config,
            data=replace(config.data, steps=steps, estimate_batches=ESTIMATE_BATCHES),
            train=replace(config.train, epochs=epochs, precision=fastest_precision("cpu")),
            engine=replace(config.engine, devices=("cpu",), schedule="sequential", threads=options.threads),
        )
        experiment = language_experiment(config)
        experiment = experiment.under(at_its_length(experiment, experiment.config))
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            how = {"precision": config.train.precision, "threads": options.threads, "machine": environment()}
            run = trained(experiment, seed) | how
            print(name, json.dumps(run), file=sys.stderr)
            made = [other for other in found["ideas"].get(name, []) if other["seed"] != seed]
            found["ideas"][name] = sorted([*made, run], key=lambda other: other["seed"])
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.json, found)
    show(found)


if __name__ == "__main__":
    main()
