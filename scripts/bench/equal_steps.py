"""Losses of text models after equally many batches: of random ones, of texts of similar length, with touched vectors.

    python scripts/bench/equal_steps.py transformer --data-root DIR

The other rungs of ladder.py change a loss by rounding alone. These two change what a model learns from in a step, and
how: a ladder's turns are too short to tell what becomes of that. All else is our fastest form, on one thread. Losses
are of one fixed part of the test samples, in nats.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rung_data import Task, task_of
from rung_training import rise
from rungs import FORMS, TEXTS, Form, Setting

from pipeal.engine import Pipeline
from pipeal.engine.devices import fastest_precision
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.reporting.environment import environment
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import Cell, print_table

KINDS: dict[str, dict[str, Any]] = {
    "random": {},
    "by length": {"by_length": True},
    "by length, touched": {"by_length": True, "touched": True},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=TEXTS)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--after", nargs="+", type=int, default=[30, 65, 130], help="batches, each time more")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    after: list[int] = options.after
    if after[0] < 1 or after != sorted(set(after)) or options.seeds < 1:
        parser.error(f"found --after {after} --seeds {options.seeds}; expected growing numbers, and at least one seed")
    keep_freed_memory()
    torch.set_num_threads(1)
    machine, task = environment(), task_of(options.model, torch.device("cpu"), options.data_root)
    forms: list[Form] = options.forms
    found: dict[Form, dict[str, list[list[float]]]] = {form: {kind: [] for kind in KINDS} for form in forms}
    for seed in range(options.seeds):
        for form, kinds in found.items():
            for kind, losses in kinds.items():
                losses.append(losses_of(task, setting_of(form, kind), seed, after))
                print(f"seed {seed}, {form}, {kind}: {losses[-1]}", flush=True)
                if options.json is not None:
                    write_json(options.json, {"machine": machine, "after": after, "losses": found})
    rows: list[list[Cell]] = []
    for form, kinds in found.items():
        for kind, losses in kinds.items():
            each = [" / ".join(f"{loss:.3f}" for loss in column) for column in zip(*losses, strict=True)]
            means = [f"{fmean(column):.3f}" for column in zip(*losses, strict=True)]
            rows.append([form, kind, *(cell for pair in zip(means, each, strict=True) for cell in pair)])
    columns = [column for number in after for column in (f"after {number}", "of each seed")]
    print_table(f"{options.model}, loss in nats", ["form", "batches", *columns], rows)


def setting_of(form: Form, kind: str) -> Setting:
    """Our fastest form, but for what is asked."""
    precision = fastest_precision("cpu")
    return Setting(form, "ours", keeps_memory=True, precision=precision, fused=True, engine=True, **KINDS[kind])


def losses_of(task: Task, setting: Setting, seed: int, after: Sequence[int]) -> list[float]:
    """Of one training, each time that it has come so far."""
    package, batches = task.package(setting, seed), task.batches(setting, seed)
    losses, done = [], 0
    for number in after:
        package.train()
        with Pipeline(package, ["cpu"], threads=1, seed=seed, first_batch=done, **setting.of_pipeline) as pipe:
            pipe.run(islice(batches, number - done), rise)
        losses.append(task.loss(package))
        done = number
    return losses


if __name__ == "__main__":
    main()
