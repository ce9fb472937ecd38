"""Are the stages that ``--devices cpu,cpu,cpu`` gets as fast as the best of all sizes given by hand?

    python scripts/bench/named_devices.py agnews transformer --data-root DIR [--stages 3] [--turns 3] [--batches 6]

Trains the AL form of a shipped configuration in every division of its layers into so many stages, in turns in one
process, each turn on the same batches, and says where the division stands that a run would take: how many times as long
it takes as the fastest of all, by the medians of the turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median

from pipeal.config import LanguageConfig, TextConfig, VisionConfig, find_config, load_config
from pipeal.core.errors import PipealError
from pipeal.engine import Pipeline
from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table
from pipeal.run.build import Experiment
from pipeal.run.build_language import language_experiment
from pipeal.run.build_text import text_experiment
from pipeal.run.build_vision import vision_experiment
from pipeal.run.choices import choose, sample_batches
from pipeal.run.opening import new_layers, open_pipeline
from pipeal.run.remembered import PlacementCache

WARM_UP = 2
"""Batches of each pipeline that are not timed."""


def divisions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide a row of layers.

    >>> list(divisions(4, 3))
    [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    """
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *cuts, layers)))


def experiment_of(dataset: str, model: str, root: Path, overrides: list[str]) -> Experiment:
    """What a command with these names reads."""
    given = [*overrides, f"data.root={root}"]
    path = find_config(dataset, model)
    if model == "charlm":
        return language_experiment(load_config(LanguageConfig, path, overrides=given))
    if model in ("lstm", "transformer"):
        return text_experiment(load_config(TextConfig, path, overrides=given))
    return vision_experiment(load_config(VisionConfig, path, overrides=given))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("model")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batches", type=int, default=6, help="that are timed, of each division in each turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    arguments = parser.parse_args()
    devices = [f"engine.devices={','.join(['cpu'] * arguments.stages)}"]
    try:
        experiment = experiment_of(arguments.dataset, arguments.model, arguments.data_root, devices)
        chosen = choose(experiment, "al", cache=PlacementCache(retry=True))
    except PipealError as error:
        parser.error(str(error))
    seed = chosen.train.seed
    batches = sample_batches(experiment.train_batches(seed), WARM_UP + arguments.batches)
    layers = sum(1 for _ in new_layers(experiment, chosen, 1, here=()))
    found: dict[tuple[int, ...], list[float]] = {sizes: [] for sizes in divisions(layers, arguments.stages)}
    for _ in range(arguments.turns):
        for sizes, seconds in found.items():
            config = replace(chosen, engine=replace(chosen.engine, sizes=sizes))
            pipe: Pipeline = open_pipeline(new_layers(experiment, config, 1), config, seed)
            with pipe:
                pipe.run(batches[:WARM_UP])
                seconds.append(pipe.run(batches[WARM_UP:]).seconds / arguments.batches)
    best = min(median(seconds) for seconds in found.values())
    taken = tuple(chosen.engine.sizes or ())
    rows = [
        [
            " + ".join(map(str, sizes)),
            1e3 * median(seconds),
            f"{1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f}",
            f"{median(seconds) / best:.3f}×",
            "taken" if sizes == taken else "",
        ]
        for sizes, seconds in sorted(found.items(), key=lambda each: median(each[1]))
    ]
    title = f"{arguments.dataset} {arguments.model} on {arguments.stages} named devices, {chosen.train.precision}"
    print_table(title, ["layers of each", "ms/batch", "of each turn", "× fastest", ""], rows)
    if arguments.json is not None:
        figures = [{"sizes": sizes, "seconds_per_batch": seconds} for sizes, seconds in found.items()]
        kept = {"machine": environment(), "taken": taken, "divisions": figures}
        arguments.json.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
