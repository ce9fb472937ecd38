"""Does it pay? Seconds until an accuracy, on 1 to 16 devices and three networks, by local losses and backpropagation.

    python scripts/bench/pays.py --data-root DIR [--quick] [--only curves costs table] [--json FILE]
    sudo python scripts/bench/pays.py --data-root DIR --real     # some cells for real; needs Linux and root

Learning curves are measured: a small transformer of 4 layers on AG News, all methods with the same batches and seed,
each with the best of the same learning rates; held-out samples are answered four times an epoch. GPipe, 1F1B and data
parallel have BP's curve. Local SGD is trained for real, its workers in turns, on as many samples in all. Costs are
measured: seconds of each layer on whole batches and on parts of them, one thread, the core's own time.

Seconds are forecast, and assume:

- devices like this core, with memory enough; any two joined by a link of the same delay and rate, each way;
- methods may leave devices idle, and get the best of their layouts: stages times replicas (of powers of two) for local
  losses and for backpropagation in micro-batches, the latter by GPipe or 1F1B in the better number of micro-batches;
- replicas of stages average the gradients of each layer in a ring beside the layers that follow; data parallel averages
  all at once, all of it beside its backward, which no code can; local SGD averages between steps;
- gradients, weights and packets travel in fp32 (``--set engine.packet=int8``, with another ``--json``: packets of local
  losses do not); an evaluation takes no time;
- replicas share no batch of a method whose loss compares its samples (PredSim);
- every method has the same batches: larger ones would help data parallel, and have other curves.

What is found is kept row by row in ``--json``, and not done again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from long_line import LinkKind, NoLineError
from pays_curves import Curve, learnt, opened
from pays_real import far_apart, link_of, on_one_device
from pays_times import CUTS, Measured, Way, data_parallel, local, local_sgd, measured_costs, pipelined_backprop

from pipeal.core.methods import BASELINE, DEFAULT, METHODS
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.reporting.environment import environment
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import Cell, print_table

RESULTS = Path(__file__).with_name("results") / "pays.json"

NETWORKS = {"one machine": LinkKind(), "1 Gbit/s, 1 ms": LinkKind(0.001, 1e9), "80 Mbit/s, 50 ms": LinkKind(0.05, 80e6)}
"""Delays are one way; on one machine, links take no time."""

DEVICES = (1, 2, 4, 8, 16)
POINTS = (0, 1, 2)
"""How far below BP's best accuracy a target is."""

LOCAL = ("al", "dgl", "predsim")
"""Methods that are trained; the table has AL, and of the others the one that comes to the best accuracy."""

Found = dict[str, Any]


class Kept:
    """What was found, in a file that is whole after each row.

    Raises:
        ValueError: The file is of another network or data.
    """

    def __init__(self, path: Path, of: Found) -> None:
        self.path, self.of = path, json.loads(json.dumps(of))
        found: Found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if found and found["of"] != self.of:
            raise ValueError(f"{path}: is of {found['of']}, wanted is {self.of}; name another file with --json")
        curves = [
            Curve(**{**row, "measured": [tuple(pair) for pair in row["measured"]]}) for row in found.get("curves", [])
        ]
        self.curves = {curve.key: curve for curve in curves}
        self.costs: Found = found.get("costs", {})
        self.real: list[Found] = found.get("real", [])
        self.table: list[Found] = found.get("table", [])

    def write(self) -> None:
        """All of it."""
        curves = [asdict(curve) for curve in self.curves.values()]
        whole = {"of": self.of, "curves": curves, "costs": self.costs, "real": self.real, "table": self.table}
        write_json(self.path, whole)

    def best(self, method: str) -> Curve | None:
        """Of the learning rates tried, the one that comes to the best accuracy."""
        own = [curve for curve in self.curves.values() if (curve.method, curve.workers) == (method, 1)]
        return max(own, key=lambda curve: curve.best, default=None)

    def measured(self) -> dict[str, Measured]:
        """Costs by form."""
        samples = {int(cut): size for cut, size in self.costs["samples"].items()}
        return {
            form: Measured(
                {int(cut): tuple(LayerCost(**row) for row in layers) for cut, layers in rows.items()},
                samples,
                self.costs["mean"],
            )
            for form, rows in self.costs["rows"].items()
        }


def find_curves(kept: Kept, experiment: Any, options: argparse.Namespace) -> None:
    """Trains what is not there yet: every method with every rate, then workers with BP's best."""

    def add(wanted: Curve) -> None:
        if wanted.key not in kept.curves:
            kept.curves[wanted.key] = curve = learnt(experiment, wanted, options.per_epoch)
            kept.write()
            print(f"{wanted.key}: best {curve.best:.4f}, {curve.seconds:.0f} s", flush=True)

    for method in (BASELINE.name, *LOCAL):
        for rate in options.rates:
            add(Curve(method, rate))
    backprop = kept.best(BASELINE.name)
    assert backprop is not None
    for workers in options.workers:
        for steps in options.local_steps:
            add(Curve(BASELINE.name, backprop.rate, workers, steps))


def find_costs(kept: Kept, experiment: Any, options: argparse.Namespace) -> None:
    """Measures what layers cost, once, or again where it is asked for."""
    if kept.costs and not options.again:
        return
    found = measured_costs(experiment, (*LOCAL, BASELINE.name), CUTS[: options.cuts], rounds=options.rounds)
    first = next(iter(found.values()))
    rows = {
        form: {cut: [asdict(row) for row in layers] for cut, layers in one.rows.items()} for form, one in found.items()
    }
    facts = {"samples": first.samples, "mean": first.mean, "load": os.getloadavg()[0], "machine": environment()}
    kept.costs = json.loads(json.dumps({**facts, "rows": rows}))
    kept.write()


def find_table(kept: Kept) -> None:
    """Forecasts every cell: the best way of each method in each network on so many devices to each target."""
    costs, backprop = kept.measured(), kept.best(BASELINE.name)
    assert backprop is not None
    others = [curve for name in LOCAL[1:] if (curve := kept.best(name)) is not None]
    ours = [
        curve for curve in (kept.best(DEFAULT.name), max(others, key=lambda curve: curve.best)) if curve is not None
    ]
    bp, workers = costs[BASELINE.name], [curve for curve in kept.curves.values() if curve.workers > 1]
    kept.table = []
    for points in POINTS:
        target = backprop.best - points / 100
        needs = {curve.method: curve.until(target) for curve in (*ours, backprop)}
        for network, kind in NETWORKS.items():
            link = link_of(kind)
            found: dict[str, list[Way]] = {}
            for curve in ours:
                needed = needs[curve.method]
                method, own = METHODS[curve.method], costs[curve.method]
                ways = local(own, link, DEVICES[-1], needed or 0.0, shares=not method.compares_samples)
                found[method.label] = [] if needed is None else list(ways)
            batches = needs[BASELINE.name]
            assert batches is not None  # its own best
            found["BP pipelined"] = list(pipelined_backprop(bp, link, DEVICES[-1], batches))
            found["BP data parallel"] = list(data_parallel(bp, link, DEVICES[-1], batches))
            plain = [way for way in found["BP data parallel"] if way.devices == 1]
            found["BP local SGD"] = [*plain, *local_sgd(bp, link, DEVICES[-1], workers, target)]
            for devices in DEVICES:
                cells = {
                    name: min((way for way in ways if way.devices <= devices), default=None)
                    for name, ways in found.items()
                }
                row = {name: None if way is None else asdict(way) for name, way in cells.items()}
                kept.table.append({"points": points, "network": network, "devices": devices, "cells": row})
    kept.write()


def show(kept: Kept) -> None:
    """Prints curves, the table and the cells for real."""
    backprop = kept.best(BASELINE.name)
    assert backprop is not None
    print_table(
        "Learning curves: the best held-out accuracy, and batches until BP's best, and 1 and 2 points less",
        ["method", "rate", "workers", "local steps", "best", *(f"−{points}" for points in POINTS)],
        [
            [
                *(curve.method, f"{curve.rate:g}", curve.workers, curve.local_steps or None, f"{curve.best:.4f}"),
                *(_whole(curve.until(backprop.best - points / 100)) for points in POINTS),
            ]
            for curve in sorted(kept.curves.values(), key=lambda curve: (curve.workers, curve.method, curve.key))
        ],
    )
    for points in POINTS:
        rows = [row for row in kept.table if row["points"] == points]
        print_table(
            f"Seconds until {backprop.best - points / 100:.4f}, {points} points below BP's best (in brackets: layout)",
            ["network", "devices", *rows[0]["cells"]],
            [[row["network"], row["devices"], *_cells(row["cells"])] for row in rows],
        )
    if kept.real:
        print_table(
            "For real",
            ["cell", "batches", "forecast, s", "measured, s", "off by", "load"],
            [
                [
                    *(one["cell"], one["batches"], one["forecast_s"], one["measured_s"]),
                    *(f"{one['forecast_s'] / one['measured_s'] - 1:+.1%}", round(one["load"], 1)),
                ]
                for one in kept.real
            ],
        )


def _whole(batches: float | None) -> Cell:
    return "never" if batches is None else ceil(batches)


def _cells(cells: Mapping[str, Found | None]) -> Iterator[Cell]:
    """Seconds and layout; the least in bold, with all that are as good to three digits."""
    least = min(cell["seconds"] for cell in cells.values() if cell is not None)
    for cell in cells.values():
        if cell is None:
            yield "never"
            continue
        shown, best = (f"{one:.3g}" for one in (cell["seconds"], least))
        yield f"{f'**{shown}**' if shown == best else shown} ({cell['layout']})"


def draw(kept: Kept, path: Path, points: int = 1) -> None:
    """Seconds over devices, a panel for each network."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(NETWORKS), figsize=(12, 4.2), sharey=True)
    for axis, network in zip(axes, NETWORKS, strict=True):
        rows = [row for row in kept.table if (row["points"], row["network"]) == (points, network)]
        for name, mark in zip(rows[0]["cells"], "os^vD", strict=True):
            reached = [(row["devices"], cell["seconds"]) for row in rows if (cell := row["cells"][name]) is not None]
            if reached:
                axis.plot(*zip(*reached, strict=True), f"{mark}-", label=name, alpha=0.8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(DEVICES, map(str, DEVICES))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.set_title(network)
        axis.set_xlabel("devices")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel(f"seconds until BP's best − {points} point")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def find_real(kept: Kept, experiment: Any, options: argparse.Namespace) -> None:
    """Two cells for real; replaces those that are kept."""
    costs, backprop = kept.measured(), kept.best(BASELINE.name)
    assert backprop is not None
    kept.real = []
    for method in (DEFAULT.name, BASELINE.name):
        curve = kept.best(method)
        batches = None if curve is None else curve.until(backprop.best - 0.01)
        if curve is not None and batches is not None:
            batch_s = sum(row.seconds for row in costs[method].rows[1])
            kept.real.append(on_one_device(experiment, curve, max(1, ceil(batches)), batch_s))
    order = {"experiment": options.experiment, "rounds": options.rounds, "rate": backprop.rate}
    kept.real += far_apart({**order, "batches": options.real_batches}, list(NETWORKS.values())[-1])
    kept.write()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--dataset", default="agnews", help="of texts")
    parser.add_argument("--only", nargs="+", choices=("curves", "costs", "table"), default=["curves", "costs", "table"])
    parser.add_argument("--real", action="store_true", help="also some cells for real")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 3e-3], help="learning rates that all try")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8, 16], help="of local SGD")
    parser.add_argument("--local-steps", nargs="+", type=int, default=[10, 50], metavar="H")
    parser.add_argument("--again", action="store_true", help="measure costs again, as on a machine that is quiet now")
    parser.add_argument("--rounds", type=int, default=3, help="of measuring costs; medians count")
    parser.add_argument("--real-batches", type=int, default=100, help="of the two processes")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="all of it, tiny, on the embedded texts")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    options = parser.parse_args(arguments)
    options.per_epoch, options.cuts = 4, len(CUTS)
    if options.quick:
        if options.json == RESULTS:
            parser.error("--quick: its figures are not to be kept; name another file with --json")
        options.dataset, options.epochs, options.rates, options.workers, options.local_steps = (
            "toynews",
            1,
            [3e-3],
            [2],
            [2],
        )
        options.per_epoch, options.rounds, options.real_batches = 1, 1, 5
    keep_freed_memory()
    torch.set_num_threads(1)
    options.experiment = options.dataset, options.data_root, options.epochs, options.overrides
    experiment = opened(*options.experiment)
    try:
        of = {"dataset": options.dataset, "epochs": options.epochs, "overrides": options.overrides}
        kept = Kept(options.json, {**of, "data": experiment.facts})
        finders = {
            "curves": partial(find_curves, kept, experiment, options),
            "costs": partial(find_costs, kept, experiment, options),
            "table": partial(find_table, kept),
        }
        for name in options.only:
            finders[name]()
        if options.real:
            find_real(kept, experiment, options)
    except (NoLineError, RuntimeError, ValueError) as error:
        parser.exit(1, f"pays.py: {error}\n")
    if "table" in options.only:
        show(kept)
        draw(kept, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
