"""What checkpoints and tracing cost a training: seconds per batch with and without, in turns in one process.

    python scripts/bench/overhead.py transformer --data-root DIR [--every 50] [--turns 6]

Each turn trains on the same number of batches: plain, with a checkpoint every so many batches (copied at a snapshot,
written by another thread, kept on the disk as in a run), and with the spans of all actions kept. The order changes from
turn to turn, and the first one warms up. Each way is held against the plain one of the same turn. What a span costs is
also measured by itself, as the times of turns differ by more.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from rich.progress import track
from text import read

from pipeal.core.options import EngineOptions
from pipeal.data import Batch, BatchLoader, PlannedBatchSampler
from pipeal.engine import Action, Pipeline, Window, open_device
from pipeal.engine.devices import fastest_precision
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.engine.trace import StageClock
from pipeal.methods.al import ALPackage
from pipeal.models import build_text
from pipeal.planning.measure.layers import WARM_UP
from pipeal.planning.placement import Placement
from pipeal.planning.planner import place
from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table
from pipeal.training.checkpoint.policy import CheckpointPolicy
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.checkpoint.writer import CheckpointWriter
from pipeal.training.position import Position

Train = Callable[[list[Batch]], None]


class Ways:
    """The ways to train one package, all from where the one before stopped."""

    def __init__(self, package: ALPackage, placement: Placement, every: int, folder: Path) -> None:
        self.package = package
        self.placement = placement
        self.every = every
        self.store = CheckpointStore(folder)
        self.all: dict[str, Train] = {
            "plain": self.plain,
            f"a checkpoint every {every}": self.saved,
            "traced": self.traced,
        }

    def open(self, trace: Window | None = None) -> Pipeline:
        chosen = self.placement
        precision: Any = fastest_precision(chosen.devices[0])
        return Pipeline(
            self.package,
            chosen.devices,
            sizes=chosen.sizes,
            threads=chosen.threads,
            precision=precision,
            trace=trace,
        )

    def plain(self, batches: list[Batch]) -> None:
        with self.open() as pipe:
            pipe.run(batches)

    def traced(self, batches: list[Batch]) -> None:
        with self.open(Window(0, len(batches))) as pipe:
            pipe.run(batches)
            pipe.spans()

    def saved(self, batches: list[Batch]) -> None:
        with self.store, CheckpointWriter(self.store) as writer, self.open() as pipe:
            saves, position = CheckpointPolicy(writer, self.every, lambda: None, {}), Position()

            def save(number: int) -> None:
                position.batches = position.part.batches = number + 1
                saves.after_batch(pipe, position)

            pipe.run(batches, on_batch=save)
        if writer.failures or writer.replaced:
            raise SystemExit(
                f"{writer.failures} checkpoints failed, {writer.replaced} were not begun: {writer.last_failure}"
            )


def seconds_per_span(count: int = 200_000) -> float:
    """The processor time that it takes to keep an action's span, beyond that of timing the action."""
    device, took = open_device("cpu"), []
    for window in (Window(0, 0), Window(0, count)):
        clock = StageClock(device, 0, window)
        clock.restart()
        begin = process_time()
        for batch in range(count):
            clock.add(0, Action.FORWARD, batch, batch, device.stamp())
        took.append((process_time() - begin) / count)
    return took[1] - took[0]


def main() -> None:
    logging.basicConfig(format="%(message)s")  # a checkpoint that is not written would be no cost
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["transformer", "lstm"])
    parser.add_argument("--dataset", default="agnews")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--budget-tokens", type=int, default=8192)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--batches", type=int, default=100, help="in a turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args()

    corpus, vocab = read(options.dataset, options.data_root)
    loader = BatchLoader(corpus, PlannedBatchSampler(corpus.lengths, options.budget_tokens, max_samples=512))
    batches = list(islice(cycle(list(loader)), options.batches))
    torch.manual_seed(0)
    package = build_text(options.model, "al", vocab_size=len(vocab), classes=corpus.classes)
    placement = place(package, batches[: WARM_UP + 8], "pipelined", EngineOptions(precision=fastest_precision("cpu")))
    facts = environment()
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"load average {os.getloadavg()[0]:.1f}; {placement}")
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ways = Ways(package, placement, options.every, Path(folder)).all
        for turn in track(range(options.turns + 1), description="turns", transient=True):
            for name in list(ways)[:: -1 if turn % 2 else 1]:
                wall, cpu = perf_counter(), process_time()
                ways[name](batches)
                if turn:
                    seconds.setdefault(name, []).append((perf_counter() - wall, process_time() - cpu))
    rows = []
    for name in ways:
        pairs = list(zip(seconds[name], seconds["plain"], strict=True))
        over = [[one[clock] / plain[clock] - 1 for one, plain in pairs] for clock in (0, 1)]
        wall, cpu = (median(took[clock] for took in seconds[name]) / options.batches for clock in (0, 1))
        spread = f"{min(over[0]):+.1%} … {max(over[0]):+.1%}"
        rows.append([name, f"{1e3 * wall:.1f}", f"{median(over[0]):+.1%}", spread, f"{median(over[1]):+.1%}"])
    title = f"{options.dataset} {options.model}: {options.turns} turns of {options.batches} batches"
    print_table(title, ["", "ms/batch", "over plain", "least … most", "CPU over plain"], rows)
    span, actions = seconds_per_span(), len(Action) * len(package)
    batch_s = median(took[0] for took in seconds["plain"]) / options.batches
    print(f"a span takes {1e6 * span:.1f} µs; {actions} a batch are {span * actions / batch_s:.3%} of its time")
    if options.json is not None:
        record = {
            "machine": facts,
            "load": os.getloadavg(),
            "placement": str(placement),
            "seconds": seconds,
            "span_s": span,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
