"""Forecasts held against what they are forecasts of: runs on this machine's cores, and the published scaling table.

    python scripts/bench/forecast.py [--quick] [--json scripts/bench/results/forecast.json]

Table 1 trains for real, one intra-op thread per stage, stages in threads and in processes (gloo, started by torchrun)
that share the cores; held.py says what the forecast is made from. Nothing is fitted to the runs. The figures mean
something on a machine that does nothing else; all of it takes about 20 minutes.

Table 2 has the published figures of the AL pipeline beside forecasts. One figure is fitted for each kind of row: how
slow its BP is, which the one-GPU column says. All others of the forecasts are predicted. What al-fm then still lacks is
given as a share of serial work, which is no forecast: it is what is left over, put into words.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from held import MODELS, Held, hold_processes, hold_threads

from pipeal.engine import SCHEDULES
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.planning.pure.forecast import forecast
from pipeal.planning.pure.hardware import PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.layout import best_layout
from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table

STAGES = (2, 4)

EXECUTORS = ("threads", "processes")

ASKED = {2: 0.10, 4: 0.15}
"""How far a forecast may be from the run, by the number of stages."""


PUBLISHED = {
    "12 layers": {1: 1.19, 2: 1.33, 3: 1.64, 4: 1.75, 6: 1.55},
    "n layers": {1: 1.16, 2: 1.68, 3: 2.05, 4: 2.09, 5: 1.94, 6: 1.83},
}
"""Speed-up over BP on the same GPUs, AG News, transformer, by the number of GPUs."""


@dataclass(frozen=True)
class Scaling:
    """One row of the published table, and the forecasts for it, as speed-ups over BP."""

    model: str
    gpus: int
    published: float
    al_fm: float
    pipelined: float

    @property
    def serial_share(self) -> float:
        """What is left over, as a share of the step: ``al-fm`` with that much of it serial is as published."""
        one = PUBLISHED[self.model][1]
        ideal, found = self.al_fm / one, self.published / one
        return 0.0 if self.gpus == 1 else max(0.0, (1 / found - 1 / ideal) / (1 - 1 / ideal))


def scaling(batches: int = 1000) -> list[Scaling]:
    """Equal layers, a backward of two forwards, transfers that cost nothing; BP as slow as the one-GPU column says.

    BP on several GPUs is model parallel without a pipeline there, so it takes the same time on any number of them.
    """
    rows = []
    for model, published in PUBLISHED.items():
        for gpus, speedup in published.items():
            layers = 12 if model == "12 layers" else gpus
            costs = {"gpu": [LayerCost(1.0, 2.0)] * layers}
            bp_s = published[1] * 3 * layers
            setup = Setup((PlannedDevice("gpu"),) * gpus, batches=batches)
            even = best_layout(costs, setup)  # as published: as many layers each, also under al-fm
            found = [forecast(name, SCHEDULES[name], costs, setup, even).batch_s for name in ("al-fm", "pipelined")]
            rows.append(Scaling(model, gpus, speedup, *(bp_s / batch_s for batch_s in found)))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer batches and turns")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="rows of table 1")
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=list(EXECUTORS), help="rows of table 1")
    parser.add_argument("--batches", type=int, help="of a run of table 1; default: 24, or 10 with --quick")
    parser.add_argument("--turns", type=int, help="of table 1; default: 5, or 3 with --quick")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    batches = options.batches or (10 if options.quick else 24)
    turns = options.turns or (3 if options.quick else 5)
    facts = environment()
    print("  ".join(f"{key}: {value}" for key, value in facts.items()), f"  load average: {os.getloadavg()[0]:.1f}\n")

    keep_freed_memory()
    torch.set_num_threads(1)
    rows = scaling()
    held: list[Held] = []
    for model in options.models:
        for executor in options.executors:
            for stages in STAGES:
                hold = hold_threads if executor == "threads" else hold_processes
                row = hold(model, stages, batches, turns)
                held.append(row)
                print(f"{row.model}, {executor}, {stages} stages: {row.error:+.1%}", file=sys.stderr)
                if options.json is not None:  # after each row: all of them take long
                    write(options.json, facts, batches, held, rows)
    print_table(
        f"1. Predicted and measured, {batches} batches, medians of {turns} turns; ms per batch",
        [
            *("model", "executor", "stages", "layers of each", "crowding", "carrying"),
            *("predicted", "measured", "error", "asked", "kept", "of the turns", "others"),
        ],
        [
            [
                *(row.model, row.executor, row.stages, " + ".join(map(str, row.sizes))),
                median(turn[row.stages] for turn in row.crowding),
                median(sum(turn) for turn in row.carried_ms) if row.carried_ms else None,
                *(median(row.predicted_ms), median(row.measured_ms), f"{row.error:+.1%}", f"{ASKED[row.stages]:.0%}"),
                "yes" if is_kept(row) else "NO",
                f"{min(row.errors):+.1%} to {max(row.errors):+.1%}",
                f"{max(row.others):.0%}",
            ]
            for row in held
        ],
    )
    print(
        "crowding: how many times as long training takes while so many train at once; carrying: what the packets of a "
        "batch\ntake the cores; error: of the medians; kept: no further from 0 than asked; of the turns: the smallest "
        "and the largest;\nothers: the share of the cores that other programs had, at most"
    )
    print()
    print_table(
        "2. The published scaling, as speed-up over BP on as many GPUs",
        ["layers", "GPUs", "published", "al-fm, forecast", "left over, as serial work", "pipelined, forecast"],
        [
            [
                *(row.model, row.gpus, row.published, row.al_fm),
                "fitted" if row.gpus == 1 else f"{row.serial_share:.0%}",
                row.pipelined,
            ]
            for row in rows
        ],
    )
    print(
        "al-fm joins all threads after every batch, which caps it; what is still missing is work that one thread at a "
        "time does:\nPython's lock, held while each layer's thread is made and its kernels are launched (a thread per "
        "layer and batch: with more\nlayers there are more of them). pipelined joins nothing and keeps its threads."
    )


def is_kept(row: Held) -> bool:
    """Whether the forecast is as near the run as asked."""
    return abs(row.error) <= ASKED[row.stages]


def write(path: Path, facts: dict[str, Any], batches: int, held: Sequence[Held], rows: Sequence[Scaling]) -> None:
    """Leaves every figure as JSON."""
    figures = {
        "machine": facts,
        "batches": batches,
        "held": [
            {**asdict(row), "errors": row.errors, "error": row.error, "asked": ASKED[row.stages], "kept": is_kept(row)}
            for row in held
        ],
        "scaling": [{**asdict(row), "serial_share": row.serial_share} for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
