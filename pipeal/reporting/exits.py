"""Early exits shown: as a table, and as a picture of accuracy over cost with a point for each exit and the policy."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pipeal.reporting.figures import COLOURS, finish, new_figure, save
from pipeal.reporting.tables import Cell, print_table
from pipeal.training.exits import ExitRow, ExitTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXIT_COLUMNS = ("exit", "accuracy", "points", "MFLOPs/sample", "cost", "ms/sample", "leave here")

_EXIT, _EARLY, *_ = COLOURS


def print_exits(table: ExitTable, title: str, *, console: Console | None = None) -> None:
    """Prints accuracy and cost of every exit."""
    rows: list[list[Cell]] = [
        [
            row.name,
            f"{row.accuracy:.4f}",
            f"{row.points:+.2f}" if isfinite(row.points) else None,
            row.mflops,
            None if row.relative_cost is None else f"{row.relative_cost:.1%}",
            row.ms,
            None if row.share is None else f"{row.share:.1%}",
        ]
        for row in (*table.exits, table.early)
    ]
    print_table(title, EXIT_COLUMNS, rows, console=console)


def draw_exits(table: ExitTable, path: str | Path, title: str) -> None:
    """Draws the points of a table; the calibrated policy lies the better, the further up and to the left.

    Args:
        table: What was measured.
        path: The PNG to write.
        title: Stands above the picture.
    """
    figure = new_figure(7.2, 4.8)
    axes = figure.subplots()
    axes.axhline(100 * table.full.accuracy, color="#b0b0b0", linewidth=1, linestyle="--", zorder=1)
    costs, accuracies = [row.mflops for row in table.exits], [100 * row.accuracy for row in table.exits]
    axes.plot(costs, accuracies, color=_EXIT, marker="o", markersize=6, linewidth=1.4, label="one exit for all samples")
    points = f", {table.early.points:+.2f} points" if isfinite(table.early.points) else ""
    label = f"calibrated early exit: saves {table.saving:.0%}{points}"
    early = (table.early.mflops, 100 * table.early.accuracy)
    axes.plot(*early, color=_EARLY, marker="*", markersize=15, linestyle="", zorder=3, label=label)
    _name(axes, table.exits)

    finish(axes, title, "cost per sample (MFLOPs)", "test accuracy", alone=True)
    axes.set_xlim(left=0, right=1.16 * max(*costs, early[0]) or 1)
    heights = [value for value in (*accuracies, early[1]) if isfinite(value)] or [0.0]
    low, high = min(heights), max(heights)
    room = max(0.3 * (high - low), 1.0)  # a point at least: less is noise, and must not look like more
    axes.set_ylim(low - room, high + room)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    figure.legend(fontsize=8.5, loc="outside lower center", ncols=2, frameon=False)
    save(figure, path)


def _name(axes: Axes, rows: Sequence[ExitRow]) -> None:
    """Writes beside each point which exit it is and how many leave there, on the side where no line goes on."""
    from matplotlib.patheffects import withStroke

    for row, after in zip(rows, [*rows[1:], rows[-1]], strict=True):
        if not isfinite(row.accuracy):  # diverged: a point nowhere
            continue
        falls = after.accuracy < row.accuracy
        share = "" if row.share is None else f"\n{row.share:.0%} leave"
        axes.annotate(
            row.name + share,
            (row.mflops, 100 * row.accuracy),
            xytext=(5, 7 if falls else -7),
            textcoords="offset points",
            ha="left",
            va="bottom" if falls else "top",
            fontsize=8,
            color="#444444",
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
