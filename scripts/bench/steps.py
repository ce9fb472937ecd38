"""What a training step of models bound by calls takes, here and with another checkout: processes of both in turns.

    python scripts/bench/steps.py --data-root DIR [--models charlm lstm transformer] [--against TREE] [--pairs 7]

A step of the lesson's character model (``shakespeare-charlm.yaml``, 12 blocks of 64) and of the models of the embedded
news has such small tensors that a good part of it is calls: of Python, of PyTorch's dispatcher, on a GPU of kernels.
Each process trains on one thread, in one stage, on batches that are there already. ``--against`` names another
checkout, such as a worktree of an earlier commit. Then a process of each trains for some steps, while the other waits
(A B, B A, …): neighbours on the machine slow both, and each turn is held against the other one of its pair. Processes
differ by a few percent, by where their memory lies, so that there are several pairs of them. Medians, by the clock and
of processor time, which suffers less from neighbours, but does suffer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack, closing
from itertools import cycle, islice
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import Any

ROOT = Path(__file__).parents[2]
MODELS: dict[str, tuple[str, str, list[str]]] = {
    "charlm": ("shakespeare", "charlm", ["model.block=64", "data.batch_size=12"]),
    "lstm": ("toynews", "lstm", []),
    "transformer": ("toynews", "transformer", []),
}
"""By name, the configuration, and what of it is changed."""


def train_when_told(model: str, options: argparse.Namespace) -> None:
    """Trains for some steps for each line that it reads, with the code that Python finds, and says what a step took:
    milliseconds by the clock, and of processor time."""
    from pipeal.config import LanguageConfig, TextConfig, find_config, load_config
    from pipeal.engine.devices.allocator import keep_freed_memory
    from pipeal.run.build_language import language_experiment
    from pipeal.run.build_text import text_experiment
    from pipeal.run.duration import at_its_length
    from pipeal.run.opening import open_pipeline

    keep_freed_memory()
    kind: Any = LanguageConfig if model == "charlm" else TextConfig
    dataset, name, changed = MODELS[model]
    how = [*changed, *options.set, f"engine.schedule={options.schedule}", f"train.mode={options.mode}"]
    how += ["engine.devices=cpu", "engine.threads=1", "train.precision=fp32"]
    values = {"data": {"root": str(options.data_root)}}
    config = load_config(kind, find_config(dataset, name), overrides=how, values=values)
    experiment: Any = (language_experiment if model == "charlm" else text_experiment)(config)
    experiment = experiment.under(at_its_length(experiment, config, quiet=True))
    with closing(experiment.train_batches(0)) as loader:
        batches = list(islice(cycle(list(islice(loader, options.steps))), options.steps))
    with open_pipeline(experiment.package(options.mode, 0), experiment.config, 0) as pipe:
        pipe.run(batches)
        print("ready", flush=True)
        for _ in sys.stdin:
            wall, cpu = perf_counter(), process_time()
            pipe.run(batches)
            took = {"wall": perf_counter() - wall, "cpu": process_time() - cpu}
            print(json.dumps({clock: 1e3 * taken / options.steps for clock, taken in took.items()}), flush=True)


class Trainer:
    """A process that trains one model with the code of a tree, when it is told to; ``with`` it."""

    def __init__(self, tree: Path, model: str, options: argparse.Namespace) -> None:
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--one", model, "--mode", options.mode]
        command += ["--steps", str(options.steps), "--schedule", options.schedule]
        command += ["--data-root", str(options.data_root.resolve()), *(f"--set={one}" for one in options.set)]
        self._process = subprocess.Popen(
            command, env=environment, cwd=tree, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> Trainer:
        self._hear()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # no more lines: it ends

    def turn(self) -> dict[str, float]:
        """What a step took in some more steps."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._hear())
        return found

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with code {self._process.wait()}; see above")
        return line


def in_turns(model: str, trees: list[Path], options: argparse.Namespace) -> list[list[dict[str, float]]]:
    """For each pair of turns, what a step took with each tree."""
    found = []
    for _ in range(options.pairs):
        with ExitStack() as stack:
            trainers = [stack.enter_context(Trainer(tree, model, options)) for tree in trees]
            for number in range(options.turns):
                places = range(len(trainers))[:: -1 if number % 2 else 1]
                took = {place: trainers[place].turn() for place in places}
                found.append([took[place] for place in range(len(trainers))])
    return found


def shown(pairs: list[tuple[float, ...]]) -> list[str]:
    """The median of each tree, and of how much less this one takes, with the middle half of the pairs."""
    cells = [f"{median(column):.2f}" for column in zip(*pairs, strict=True)]
    if len(pairs[0]) > 1:
        less = [1 - mine / other for mine, other in pairs]
        low, _, high = quantiles(less, n=4)
        cells.append(f"{median(less):+.1%} ({low:+.1%} to {high:+.1%})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--against", type=Path, metavar="TREE", help="another checkout")
    parser.add_argument("--pairs", type=int, default=7, help="of processes")
    parser.add_argument("--turns", type=int, default=6, help="of each process, at least 2")
    parser.add_argument("--steps", type=int, default=20, help="in a turn")
    parser.add_argument("--mode", default="al", help="the method, such as al or bp")
    parser.add_argument("--schedule", default="sequential")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the configuration")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    parser.add_argument("--one", choices=list(MODELS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        train_when_told(options.one, options)
        return

    from pipeal.reporting.environment import environment
    from pipeal.reporting.tables import print_table

    facts, load = environment(), os.getloadavg()[0]
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"load average {load:.1f}")
    trees = [ROOT] if options.against is None else [ROOT, options.against.resolve()]
    found: dict[str, list[list[dict[str, float]]]] = {}
    heads = ["ms per step", "this tree", *([] if options.against is None else ["the other", "less"])]
    for model in options.models:
        pairs = found[model] = in_turns(model, trees, options)
        clocks = (("wall", "by the clock"), ("cpu", "processor"))
        rows = [[name, *shown([tuple(one[clock] for one in pair) for pair in pairs])] for clock, name in clocks]
        each = f"{options.pairs} × {options.turns} turns of {options.steps} steps"
        print_table(f"{model}, {options.mode}: {each}, medians", heads, rows)
        print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
        if options.json is not None:
            record = {
                "machine": facts,
                "load": [load, os.getloadavg()[0]],
                "mode": options.mode,
                "steps": options.steps,
                "set": options.set,
                "ms": found,
            }
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
