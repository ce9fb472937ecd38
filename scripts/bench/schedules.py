"""What the schedules bring: virtual stages against theory, then real tensors on this machine's cores.

    python scripts/bench/schedules.py [--quick] [--json FILE]

Table 1 runs layers that only take time, so it measures the schedule and the engine's own cost; table 2 trains.
Everything runs in one process; what is compared runs in turns, so that a slow minute of the machine hits all.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, BinaryIO

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from virtual import VirtualLayer

from pipeal import AE, AL, ENC, ALPackage, LabelAE, Pipeline
from pipeal.engine import SCHEDULES, Action, balance
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.engine.devices.cpus import cores
from pipeal.models import build_text
from pipeal.planning import simulate
from pipeal.planning.placement import Placement
from pipeal.planning.planner import place
from pipeal.reporting.environment import environment

FORWARD_S, BACKWARD_S = 0.005, 0.010
MEASURED_SEQUENTIAL = 4
"""Up to how many stages ``sequential`` is measured, not only calculated: it takes S · 15 ms a batch."""

Build = Callable[[], tuple[ALPackage, Sequence[Any]]]
"""Makes a fresh package and the batches of one run."""


@dataclass(frozen=True)
class VirtualRow:
    """One number of equal stages; all times in seconds. ``sequential_s`` is None where it was not measured."""

    stages: int
    ideal_s: float
    pipelined_s: float
    simulated_s: float
    al_fm_s: float
    sequential_calculated_s: float
    sequential_s: float | None

    @property
    def share_of_ideal(self) -> float:
        return self.ideal_s / self.pipelined_s

    @property
    def al_fm_gain(self) -> float:
        return self.sequential_calculated_s / self.al_fm_s

    @property
    def al_fm_cap(self) -> float:
        return 3 * self.stages / (self.stages + 2)


@dataclass(frozen=True)
class RealRow:
    """One choice on the real cores: the median of the repeats, their range, and the gain over ``sequential``."""

    model: str
    schedule: str
    stages: str
    threads: int
    median_s: float
    least_s: float
    most_s: float
    gain: float


def oversleep_s(repeats: int = 100) -> float:
    """How much later than asked a thread wakes here, in the median: what a virtual layer cannot help."""
    late = []
    for _ in range(repeats):
        begin = perf_counter()
        sleep(FORWARD_S)
        late.append(perf_counter() - begin - FORWARD_S)
    return median(late)


_AWAKE: list[BinaryIO] = []
"""Open for as long as the process lives: so long cores stay awake."""


def wake_on_time() -> None:
    """Has threads that sleep wake when they are to, as far as Linux lets them; threads inherit it.

    Takes away the 50 µs by which one may lie longer, to save power. And, where the process may (as root), keeps cores
    from halting while there is nothing to do: a virtual one may take half a millisecond until it runs again.
    """
    if not sys.platform.startswith("linux"):
        return
    set_timer_slack = 29  # PR_SET_TIMERSLACK
    ctypes.CDLL(None).prctl(set_timer_slack, 1)
    with suppress(OSError):
        awake = open("/dev/cpu_dma_latency", "wb", buffering=0)  # noqa: SIM115
        awake.write(bytes(4))  # microseconds that a core may take
        _AWAKE.append(awake)


def virtual_seconds(schedule: str, stages: int, batches: int) -> float:
    """Measures one run through the real executor."""
    layers = [VirtualLayer(FORWARD_S, BACKWARD_S) for _ in range(stages)]
    with Pipeline(layers, schedule=schedule) as pipe:
        return pipe.run([(None, None)] * batches).seconds


def calculated_seconds(schedule: str, stages: int, batches: int) -> float:
    """The same by the simulator."""
    stage = {Action.FORWARD: FORWARD_S, Action.BACKWARD: BACKWARD_S, Action.UPDATE: 0.0}
    return simulate(SCHEDULES[schedule], [stage] * stages, batches).makespan_s


def measure_virtual(stages: int, batches: int, repeats: int) -> VirtualRow:
    """Medians of ``repeats`` runs, schedule by schedule in turns."""
    names = ["pipelined", "al-fm", *(["sequential"] if stages <= MEASURED_SEQUENTIAL else [])]
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            found[name].append(virtual_seconds(name, stages, batches))
    return VirtualRow(
        stages,
        (stages - 1) * FORWARD_S + batches * (FORWARD_S + BACKWARD_S),
        median(found["pipelined"]),
        calculated_seconds("pipelined", stages, batches),
        median(found["al-fm"]),
        calculated_seconds("sequential", stages, batches),
        median(found["sequential"]) if "sequential" in found else None,
    )


def equal_layers(depth: int = 4, width: int = 512, rows: int = 256, batches: int = 12) -> tuple[ALPackage, list[Any]]:
    """A stack of equal layers, three matrices each, and random batches of 16 classes."""
    torch.manual_seed(0)
    code, classes = 64, 16
    sides: list[AE] = [LabelAE(nn.Linear(classes, code), nn.Linear(code, classes), classes)]
    sides += [AE(nn.Linear(code, code), nn.Linear(code, code)) for _ in range(depth - 1)]

    def block() -> nn.Module:
        parts = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
        return nn.Sequential(*parts)

    package = ALPackage([AL(ENC(block(), nn.Linear(width, code)), side) for side in sides])
    return package, [(torch.randn(rows, width), torch.randint(classes, (rows,))) for _ in range(batches)]


def measure_real(name: str, build: Build, *, stage_counts: Sequence[int], repeats: int) -> list[RealRow]:
    """Every schedule on every number of stages with one intra-op thread per worker, and what auto chooses, in turns.

    Args:
        name: Of the model, for the table.
        build: Makes a fresh package and its batches.
        stage_counts: The numbers of stages; larger ones than the model has layers are left out.
        repeats: How many runs of each; one more before them warms up.
    """
    package, batches = build()
    layers = len(package)
    stage_counts = [stages for stages in stage_counts if stages <= layers]

    def fixed(stages: int, threads: int) -> Placement:
        return Placement(["cpu"] * stages, balance([1.0] * layers, stages), threads)

    choices = {("sequential", "1 stage"): fixed(1, 1)}
    choices |= {(name, f"{count} stages"): fixed(count, 1) for name in list(SCHEDULES)[1:] for count in stage_counts}
    choices["sequential", "1 stage, all cores"] = fixed(1, cores())
    choices["pipelined", "auto"] = place(package, batches, "pipelined")
    seconds: dict[tuple[str, str], list[float]] = {choice: [] for choice in choices}
    for turn in range(repeats + 1):
        for (schedule, what), where in choices.items():
            with Pipeline(package, where.devices, schedule, sizes=where.sizes, threads=where.threads) as pipe:
                took = pipe.run(batches).seconds
            if turn:
                seconds[schedule, what].append(took)
    alone = median(seconds["sequential", "1 stage"])
    return [
        RealRow(
            name,
            schedule,
            what,
            choices[schedule, what].threads,
            median(took),
            min(took),
            max(took),
            alone / median(took),
        )
        for (schedule, what), took in seconds.items()
    ]


def transformer(batches: int = 24) -> tuple[ALPackage, list[Any]]:
    """The published transformer, 4 AL layers, on random words: 64 texts of 24 to 32 words each batch."""
    torch.manual_seed(0)
    words = 30_000
    package = build_text("transformer", "al", vocab_size=words, classes=4)
    lengths = cycle(range(24, 33, 2))
    return package, [
        (torch.randint(2, words, (64, length)), torch.randint(4, (64,))) for length in islice(lengths, batches)
    ]


# Further models join here: a name, and a function that builds the package and the batches of a run.
MODELS: dict[str, Build] = {"4 equal MLP layers": equal_layers, "transformer": transformer}
QUICK_MODELS: dict[str, Build] = {"4 equal MLP layers": partial(equal_layers, batches=6)}


def virtual_table(rows: Sequence[VirtualRow], batches: int, repeats: int) -> Table:
    title = f"1. S equal virtual stages, F 5 ms, B 10 ms, {batches} batches, median of {repeats} (one run if S > 8); s"
    table = Table(title=title, title_justify="left", box=None)
    columns = ("S", "ideal", "pipelined", "% of ideal", "simulated", "al-fm", "al-fm ×", "its cap")
    for column in (*columns, "sequential, calculated", "measured"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.stages),
            f"{row.ideal_s:.3f}",
            f"{row.pipelined_s:.3f}",
            f"{row.share_of_ideal:.1%}",
            f"{row.simulated_s:.3f}",
            f"{row.al_fm_s:.3f}",
            f"{row.al_fm_gain:.2f}",
            f"{row.al_fm_cap:.2f}",
            f"{row.sequential_calculated_s:.3f}",
            "" if row.sequential_s is None else f"{row.sequential_s:.3f}",
        )
    return table


def real_table(rows: Sequence[RealRow], repeats: int) -> Table:
    title = f"2. Real tensors on the cores, in turns, median of {repeats}; seconds per run"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("model", "schedule", "placement", "threads each", "median", "least", "most", "× sequential"):
        table.add_column(column, justify="left" if column in ("model", "schedule", "placement") else "right")
    for row in rows:
        times = (f"{value:.3f}" for value in (row.median_s, row.least_s, row.most_s))
        table.add_row(row.model, row.schedule, row.stages, str(row.threads), *times, f"{row.gain:.2f}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer batches, stages and repeats: half a minute")
    parser.add_argument("--stages", type=int, nargs="+", help="only these rows of table 1, and no table 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    wake_on_time()
    batches, repeats = (40, 1) if options.quick else (200, 3)
    console = Console(width=120, highlight=False)

    facts = environment()
    console.print("  ".join(f"{key}: {value}" for key, value in facts.items()), "\n", markup=False)
    console.print(f"load average: {os.getloadavg()[0]:.1f}; a sleep of 5 ms takes {5 + 1e3 * oversleep_s():.2f} ms\n")
    virtual = [
        measure_virtual(stages, batches, repeats if stages <= 8 else 1)
        for stages in options.stages or ((2, 4, 8) if options.quick else (2, 4, 8, 16, 64))
    ]
    console.print(virtual_table(virtual, batches, repeats), "")

    keep_freed_memory()
    turns = 3 if options.quick else 5
    real: list[RealRow] = []
    models = {} if options.stages else QUICK_MODELS if options.quick else MODELS
    for name, build in models.items():
        real += measure_real(name, build, stage_counts=(2, 4), repeats=turns)
    if real:
        console.print(real_table(real, turns))

    if options.json is not None:
        figures = {"machine": facts, "virtual": [asdict(row) for row in virtual], "real": [asdict(row) for row in real]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
