"""Curves of one or several runs: accuracy over epochs and over seconds, and the local losses of each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from pipeal.core.atomic import replacing
from pipeal.core.methods import DEFAULT
from pipeal.training.metric import held_rows, measure_of
from pipeal.training.row import EpochRow

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
_STYLES = ("-", "--", ":", "-.")
_TRAIN: dict[str, Any] = {"linestyle": "--", "markerfacecolor": "white", "alpha": 0.8}
_HELD: dict[str, Any] = {"linestyle": ":", "markerfacecolor": "white", "alpha": 0.8}
_LEGEND: dict[str, Any] = {"fontsize": 8.5, "loc": "best", "framealpha": 0.85, "edgecolor": "none"}

Rows = Sequence[EpochRow]
Value = Callable[[EpochRow], float]


def draw_curves(
    rows_by_run: Mapping[str, Rows], path: str | Path, title: str, losses: Sequence[str] = DEFAULT.loss_titles
) -> None:
    """Draws a figure of four panels; the turns of a run are one mean line and the band between their extremes.

    Args:
        rows_by_run: The recorded rows under the name that the legend gives the run, such as its form.
        path: The PNG to write.
        title: Stands above the panels.
        losses: The titles of the panels of each layer's first and second loss; one without a title stays empty.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.03)  # inches, and shares
    figure = Figure(figsize=(11, 7.6), dpi=130, facecolor="white", layout=layout)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", parse_math=False)
    (by_epoch, by_second), (first, second) = figure.subplots(2, 2)

    measure = measure_of([row for rows in rows_by_run.values() for row in rows])
    for number, (run, rows) in enumerate(rows_by_run.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        for axes, x in ((by_epoch, _epoch), (by_second, _seconds)):
            _draw_line(axes, rows, x, measure.test, label=run, color=colour)
            _draw_line(axes, rows, x, measure.train, color=colour, **_TRAIN)
            _draw_line(axes, held_rows(rows, measure), x, measure.held_value, color=colour, **_HELD)
        style = _STYLES[number % len(_STYLES)]
        named = run if len(rows_by_run) > 1 else ""
        _draw_losses(first, rows, part=0, run=named, linestyle=style)
        _draw_losses(second, rows, part=1, run=named, linestyle=style)

    _finish(by_epoch, f"{measure.name} over epochs", "epoch")
    _finish(by_second, f"{measure.name} over training time", "seconds of training")
    for axes, name in zip((first, second), (*losses, "", ""), strict=False):
        _finish(axes, name, "epoch")
    by_second.set_xlim(left=0)
    for axes in filter(_drawn, (by_epoch, by_second) if measure.is_share else ()):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    for axes in filter(_drawn, (by_epoch, first, second)):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if _drawn(by_epoch):
        kinds = [_key(measure.unseen), _key("train", **_TRAIN)]
        if any(held_rows(rows, measure) for rows in rows_by_run.values()):
            kinds.append(_key("held-out", **_HELD))
        by_epoch.legend(handles=[*by_epoch.get_legend_handles_labels()[0], *kinds], **_LEGEND)
    for axes in filter(_drawn, (first, second)):
        _spread(axes)
        axes.legend(ncols=1 + (len(axes.lines) > 6), **_LEGEND)

    with replacing(Path(path)) as aside:
        figure.savefig(aside, format="png")


def _key(name: str, **style: Any) -> Line2D:
    return Line2D([], [], color="#555555", marker="o", markersize=3.6, label=name, **style)


def _drawn(axes: Axes) -> bool:
    return bool(axes.lines)


def _epoch(row: EpochRow) -> float:
    return row.epoch


def _seconds(row: EpochRow) -> float:
    return row.train_time


def _draw_line(axes: Axes, rows: Rows, x: Value, y: Value, **style: Any) -> None:
    """Draws the mean over turns, epoch by epoch, and behind it the band from the least to the greatest."""
    epochs = [[row for row in rows if row.epoch == epoch] for epoch in sorted({row.epoch for row in rows})]
    if not epochs:
        return
    xs = [fmean(map(x, turns)) for turns in epochs]
    marker = "o" if len(xs) <= 15 else ""
    axes.plot(xs, [fmean(map(y, turns)) for turns in epochs], linewidth=1.7, marker=marker, markersize=3.6, **style)
    if any(len(turns) > 1 for turns in epochs):
        low, high = ([pick(map(y, turns)) for turns in epochs] for pick in (min, max))
        axes.fill_between(xs, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _draw_losses(axes: Axes, rows: Rows, *, part: int, run: str, linestyle: str) -> None:
    """Draws the loss in one place of each layer's, deeper layers lighter."""
    layers = max((len(row.losses) for row in rows), default=0)
    for layer in range(layers):
        having = [row for row in rows if len(row.losses) > layer and len(row.losses[layer]) > part]
        whole = layers == 1 and bool(having) and len(having[0].losses[0]) == 1
        colour = "#222222" if whole else colormaps["viridis"](0.9 * layer / max(1, layers - 1))
        label = " ".join(filter(None, (run, "end to end" if whole else f"layer {layer + 1}")))
        _draw_line(axes, having, _epoch, _loss(layer, part), label=label, color=colour, linestyle=linestyle)


def _loss(layer: int, part: int) -> Value:
    return lambda row: row.losses[layer][part]


def _finish(axes: Axes, title: str, x: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.set_xlabel(x, fontsize=9.5)
    axes.tick_params(labelsize=9)
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if not _drawn(axes):
        axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center", color="#8a8a8a")
        axes.set_xticks([])
        axes.set_yticks([])


def _spread(axes: Axes) -> None:
    """A log scale where the layers' losses lie far apart."""
    values = [value for line in axes.lines for value in np.asarray(line.get_ydata(), float) if np.isfinite(value)]
    if values and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
