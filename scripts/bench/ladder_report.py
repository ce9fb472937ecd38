"""What a ladder leaves: its figures as JSON, a table, and a picture.

    python scripts/bench/ladder_report.py scripts/bench/results/ladder-lstm-cpu.json

prints the table of figures that were kept, and draws their picture beside them anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, TypeAlias

from matplotlib.figure import Figure
from rung_data import Task
from rung_training import Measured
from rungs import ONE_THREAD, Form, Rung, Setting

from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import Cell, print_table

Kept: TypeAlias = Mapping[str, Any]
"""Everything about a ladder, as it stands in its JSON."""

COLUMNS = [
    "form", "technique", "ms/step", "samples/s", "tokens/s", "× plain", "each turn", "× before", "of matrix rate",
    "peak MiB", "loss", "± seeds",
]  # fmt: skip

_COLOURS = {"al": "#0072B2", "bp": "#D55E00"}  # of Okabe and Ito
_ASIDE = "#BBBBBB"


@dataclass(frozen=True)
class Results:
    """All that was measured so far.

    Attributes:
        task: What was trained.
        ladders: The rungs of each form.
        found: The turns of each rung; rungs without turns are left out of everything.
        facts: What they were found under: ``title``, ``machine``, ``matrix_rates`` and ``steps``.
    """

    task: Task
    ladders: Sequence[Sequence[Rung]]
    found: dict[Setting, list[Measured]]
    facts: Mapping[str, Any]

    @property
    def rungs(self) -> list[Rung]:
        """All of them, measured or not."""
        return [rung for ladder in self.ladders for rung in ladder]

    def write(self, path: Path) -> Kept:
        """Writes every figure as JSON, and returns it."""
        rungs = [
            {
                "name": named(self.task, rung),
                "aside": rung.aside,
                "setting": asdict(rung.setting),
                "placement": asdict(self.task.placement(rung.setting)) if rung.setting.staged else None,
                "devices": self.task.devices(rung.setting),
                "turns": [asdict(one) for one in self.found[rung.setting]],
            }
            for rung in self.rungs
            if self.found[rung.setting]
        ]
        return keep(path, {**self.facts, "work_per_token_or_image": self.task.work, "rungs": rungs})


@dataclass(frozen=True)
class Row:
    """A rung, as it was kept, beside the rung before it, brackets aside, and the lowest of its form."""

    rung: Mapping[str, Any]
    turns: Sequence[Measured]
    before: Sequence[Measured]
    plain: Sequence[Measured]


def keep(path: Path, kept: Kept) -> Kept:
    """Writes what was measured, and what follows from it, and returns it."""
    own = {"data_parallel_over_one_thread": gains_of_processes(kept), "columns": COLUMNS, "table": table_of(kept)}
    kept = {**kept, **own}
    write_json(path, kept)
    return kept


def ladders_of(kept: Kept) -> list[tuple[Form, list[Row]]]:
    """The rungs of each form, the lowest first."""
    ladders: list[tuple[Form, list[Row]]] = []
    for form, rungs in groupby(kept["rungs"], lambda rung: rung["setting"]["form"]):
        rows: list[Row] = []
        before: list[Measured] = []
        for rung in rungs:
            turns = [Measured(**turn) for turn in rung["turns"]]
            before = before or turns
            rows.append(Row(rung, turns, before, rows[0].turns if rows else turns))
            if not rung["aside"]:
                before = turns
        ladders.append((form, rows))
    return ladders


def table_of(kept: Kept) -> list[list[Cell]]:
    """Under :data:`COLUMNS`. How many times as fast is the median of what it was in each turn."""
    most = max(kept["matrix_rates"].values())
    table: list[list[Cell]] = []
    for form, rows in ladders_of(kept):
        work = kept["work_per_token_or_image"][form]
        for row in rows:
            tokens = median(turn.tokens_per_s for turn in row.turns)
            used = median(map(each_rate, row.turns)) * work / (most * row.rung["devices"])
            peaks = [turn.peak_bytes for turn in row.turns if turn.peak_bytes is not None]
            losses = [turn.loss for turn in row.turns]
            gains = list(ratios(row.turns, row.plain))
            table.append(
                [
                    form,
                    row.rung["name"],
                    f"{1e3 * median(turn.step_s for turn in row.turns):,.1f}",
                    f"{median(turn.samples_per_s for turn in row.turns):,.0f}",
                    f"{tokens:,.0f}" if tokens else None,
                    f"{median(gains):.2f}×",
                    f"{min(gains):.2f}–{max(gains):.2f}",
                    f"{median(ratios(row.turns, row.before)):.2f}×",
                    f"{used:.1%}",
                    f"{median(peaks) / 2**20:,.0f}" if peaks else None,
                    f"{fmean(losses):.3f}",
                    f"{stdev(losses):.3f}" if len(losses) > 1 else None,
                ]
            )
    return table


def gains_of_processes(kept: Kept) -> dict[Form, float]:
    """How much more samples per second data parallel learns from than one process with one thread, by form."""
    gains: dict[Form, float] = {}
    for form, rows in ladders_of(kept):
        alone = [row for row in rows if ONE_THREAD in row.rung["name"]]
        many = [row for row in rows if row.rung["setting"]["processes"] > 1 and not row.rung["setting"]["staged"]]
        for one, all_of_them in zip(alone, many, strict=False):
            gains[form] = median(ratios(all_of_them.turns, one.turns))
    return gains


def draw(kept: Kept, path: Path) -> None:
    """A bar for each rung, as long as its rate; the ends of a line are the turns' extremes."""
    ladders = ladders_of(kept)
    longest = max(len(rows) for _, rows in ladders)
    figure = Figure(figsize=(11, 0.9 + 0.34 * longest), dpi=130, facecolor="white", layout="constrained")
    figure.suptitle(kept["title"], x=0.012, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    for axes, (form, rows) in zip(figure.subplots(1, len(ladders), squeeze=False)[0], ladders, strict=True):
        for place, row in enumerate(rows):
            gains = list(ratios(row.turns, row.plain))
            middle = median(gains)
            axes.barh(place, middle, 0.65, color=_ASIDE if row.rung["aside"] else _COLOURS[form])
            axes.plot([min(gains), max(gains)], [place, place], color="#222222", linewidth=1)
            axes.annotate(
                f"{middle:.2f}×", (max(gains), place), (4, 0), textcoords="offset points", va="center", fontsize=8.5
            )
        axes.set_yticks(range(len(rows)), [row.rung["name"] for row in rows])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(f"{form.upper()}, over plain PyTorch", loc="left", fontsize=10.5)
        axes.tick_params(labelsize=9)
        axes.grid(True, axis="x", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, format="png")


def report(kept: Kept, figures: Path) -> None:
    """Prints the table, and draws the picture beside the figures."""
    picture = figures.with_suffix(".png")
    print_table(kept["title"], COLUMNS, table_of(kept))
    for form, gain in gains_of_processes(kept).items():
        print(f"{form.upper()}: data parallel is {gain:.2f}× as fast per sample as one process with one thread")
    draw(kept, picture)
    print(f"figures: {figures}, picture: {picture}")


def named(task: Task, rung: Rung) -> str:
    """What a rung adds; of stages also which: how many layers each has, and with how many threads or on which GPUs."""
    if not rung.setting.staged:
        return rung.name
    placement = task.placement(rung.setting)
    sizes = "+".join(map(str, placement.sizes)) if len(placement.sizes) > 1 else "(all layers in one)"
    threads = f"{placement.threads} thread{'s' if placement.threads > 1 else ''} each"
    where = threads if task.device.type == "cpu" else ", ".join(dict.fromkeys(placement.devices))
    return f"{rung.name} {sizes}, {where}"


def each_rate(turn: Measured) -> float:
    """Tokens per second, or images."""
    return turn.tokens_per_s or turn.samples_per_s


def ratios(turns: Sequence[Measured], others: Sequence[Measured]) -> Iterator[float]:
    """Of each turn that both have: a machine's hours differ more than a turn's minutes."""
    return (each_rate(one) / each_rate(other) for one, other in zip(turns, others, strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, nargs="+", metavar="FILE", help="that ladder.py has written")
    for figures in parser.parse_args().figures:
        report(json.loads(figures.read_text(encoding="utf-8")), figures)


if __name__ == "__main__":
    main()
