"""What the memory benchmark leaves: tables, and a picture.

python scripts/bench/memory_report.py scripts/bench/results/memory.json [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, TypeAlias

from pipeal.core.options import WithinStage
from pipeal.reporting.figures import COLOURS, LEGEND, finish, new_figure, save
from pipeal.reporting.tables import Cell, print_table

Found: TypeAlias = dict[str, Any]
"""Figures, as they stand in the JSON."""

FORMS = ("BP", "BP, recomputed", "AL by stage", "AL by layer")
CLOCKS = ("wall", "processor")
ORDERS: tuple[WithinStage, ...] = ("layer", "stage")
PEAKS = {"activations": "activations", "resident": "resident", "without_holes": "resident, without holes"}
"""What is measured of each depth, in bytes, and what tables call it."""

MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what memory.py wrote")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the picture there")
    options = parser.parse_args(arguments)
    report(json.loads(options.file.read_text(encoding="utf-8")), options.plot)


def report(found: Found, plot: Path | None) -> None:
    """Prints all of it, and draws what a picture is wanted of."""
    show(found)
    if plot is not None:
        draw(found, plot)


def cases_of(found: Found, block: str, form: str) -> list[Found]:
    return [one for one in found["cases"] if (one["block"], one["form"]) == (block, form)]


def show(found: Found) -> None:
    """Prints all of it."""
    machine = "  ".join(f"{key} {value}" for key, value in found["machine"].items())
    before, after = found["load"][0], found["load"][-1]
    print(f"{machine}\nload average {before:.1f} before, {after:.1f} after; one thread, fp32\n")
    for block in dict.fromkeys(one["block"] for one in found["cases"]):
        show_block(found, block)
    if found["throughput"]:
        rows: list[list[Cell]] = []
        for one in found["throughput"]:
            for clock in CLOCKS:
                ratios = ratios_of(one, clock)
                low, high = interval(ratios)
                quarter, _, three_quarters = quantiles(ratios, n=4)
                of_order = [1e3 * median(one["seconds"][clock][order]) / one["batches"] for order in ORDERS]
                spread = [f"{quarter:.3f}-{three_quarters:.3f}", f"{low:.3f}-{high:.3f}"]
                times = [f"{ms:.1f}" for ms in of_order]
                rows.append([one["block"], one["depth"], clock, *times, f"{median(ratios):.3f}", *spread, len(ratios)])
        heads = ["block", "depth", "clock", *(f"{order}, ms/batch" for order in ORDERS), "layer / stage"]
        heads += ["quartiles", "median, 95 %", "turns"]
        print_table("throughput of AL on one stage, in turns", heads, rows)
    if found["fill"]:
        one = found["fill"][0]
        title = (
            f"\n{one['stages']} virtual stages of {one['layers']} layers, F {1e3 * one['forward_s']:g} ms, "
            f"B and U {1e3 * one['learn_s']:g} ms, pipelined; s"
        )
        heads = ["batches", "layer", "calculated", "stage", "calculated", "fill: layer - stage", "calculated"]
        rows = []
        for one in found["fill"]:
            pairs = [(one["measured"][order], one["calculated"][order]) for order in ORDERS]
            apart = [layer - stage for layer, stage in zip(*pairs, strict=True)]
            rows.append([one["batches"], *(f"{second:.3f}" for pair in (*pairs, apart) for second in pair)])
        print_table(title, heads, rows)


def show_block(found: Found, block: str) -> None:
    """Its table, and what is to be seen of it."""
    cases = {form: cases_of(found, block, form) for form in FORMS}
    depths = [one["depth"] for one in cases["AL by layer"]]
    rows: list[list[Cell]] = [
        [name, form, *(in_mib(one, what) for one in cases[form])]
        for what, name in PEAKS.items()
        for form in FORMS
        if cases[form]
    ]
    both = {form: cases[form] for form in ("BP", "AL by layer") if cases[form]}
    for what, name in (("weights", "weights"), ("optimizer", "optimizer states")):
        rows += [[name, form[:2], *(in_mib(one, what) for one in ones)] for form, ones in both.items()]
    if len(both) == 2:
        pairs = zip(both["AL by layer"], both["BP"], strict=True)
        rows.append(["AL / BP", "", *(f"{more['weights'] / less['weights']:.2f}×" for more, less in pairs)])
    print_table(
        f"{found['blocks'][block]}; peaks in MiB at each depth, ~ predicted",
        ["what", "form", *map(str, depths)],
        rows,
    )
    by_layer = [one for one in cases["AL by layer"] if "activations" not in one["predicted"]]
    first, last = by_layer[0], by_layer[-1]
    print(
        f"AL by layer: activations at depth {last['depth']} are {last['activations'] / first['activations']:.3f} × "
        f"those at {first['depth']}"
    )
    pairs = zip(cases["AL by layer"], cases["AL by stage"], strict=True)
    same = {one["depth"]: one["digest"] == other["digest"] for one, other in pairs if one["digest"] and other["digest"]}
    print(f"AL by stage and by layer: weights and optimizer states equal bit for bit, by depth: {same}")
    errors = {
        name: [
            abs(one["would_predict"][what] / one[what] - 1)
            for one in found["cases"]
            if one["block"] == block and what in one.get("would_predict", {})
        ]
        for what, name in PEAKS.items()
    }
    told = ", ".join(f"{name} {max(shares):.1%}" for name, shares in errors.items() if shares)
    if told:
        print(f"depths that were measured would have been predicted within: {told}")
    print()


def in_mib(one: Found, what: str) -> str:
    """With a mark where it is predicted.

    >>> in_mib({"predicted": ["resident"], "resident": 3 * 2**20}, "resident")
    '~3.0'
    """
    return f"{'~' if what in one['predicted'] else ''}{one[what] / MIB:,.1f}"


def draw(found: Found, path: Path) -> None:
    """A picture of the peaks over depth."""
    blocks = list(dict.fromkeys(one["block"] for one in found["cases"]))
    figure = new_figure(4.2 * len(blocks), 3.4 * len(PEAKS), "Peak memory over depth (hollow: predicted)")
    panels = figure.subplots(len(PEAKS), len(blocks), squeeze=False, sharex=True)
    for row, (what, title) in enumerate(PEAKS.items()):
        for panel, block in zip(panels[row], blocks, strict=True):
            for form, colour in zip(FORMS, COLOURS, strict=False):
                ones = cases_of(found, block, form)
                depths, sizes = [one["depth"] for one in ones], [one[what] / MIB for one in ones]
                style = "--" if form == "AL by stage" else "-"  # it may lie on that of BP
                panel.plot(depths, sizes, style, color=colour, linewidth=1.6, label=form, zorder=2)
                for hollow in (False, True):
                    dots = [place for place, one in enumerate(ones) if (what in one["predicted"]) is hollow]
                    at, high = [depths[place] for place in dots], [sizes[place] for place in dots]
                    panel.scatter(at, high, s=26, color="white" if hollow else colour, edgecolors=colour, zorder=3)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            shown = sorted({one["depth"] for one in found["cases"]})
            panel.set_xticks(shown, labels=list(map(str, shown)))
            panel.minorticks_off()
            what_it_is = found["blocks"][block].replace(", ", "\n", 1)
            finish(panel, what_it_is if row == 0 else "", "blocks" if row == len(PEAKS) - 1 else "", f"{title}, MiB")
    panels[0][0].legend(**LEGEND)
    save(figure, path)


def ratios_of(found: Found, clock: str) -> list[float]:
    """Of each turn, the throughput of ``layer`` as a multiple of that of ``stage``."""
    return [stage / layer for layer, stage in zip(*(found["seconds"][clock][order] for order in ORDERS), strict=True)]


def interval(values: Sequence[float], resamples: int = 2000) -> tuple[float, float]:
    """Of the median, 95 % by bootstrap."""
    draw = Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[round(0.025 * resamples)], medians[round(0.975 * resamples) - 1]


if __name__ == "__main__":
    main()
