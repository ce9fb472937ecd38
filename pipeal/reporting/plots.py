"""Curves of one or several runs: accuracy over epochs and over seconds, and the local losses of each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pipeal.core.by_size import even_sample
from pipeal.core.methods import DEFAULT
from pipeal.reporting.figures import COLOURS, LEGEND, finish, new_figure, save, to_svg
from pipeal.training.metric import Measure, best_rows, held_rows, measure_of
from pipeal.training.row import EpochRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Style: TypeAlias = Literal["-", "--", ":"]
_WHOLE = "end to end"
_MARKED = 15
"""Points of a line up to which each has a mark."""
_MARKS: Mapping[Style, str] = {"-": "o", "--": "s", ":": "^"}
"""By the style of their line."""
_MOST_LAYERS = 32
"""Layers of one run in a picture: the colours of more could not be told apart."""
_MOST_RUNS = 4
"""Runs up to which a panel also has their training and held-out samples: the lines of more could not be told apart."""

Rows = Sequence[EpochRow]
Value = Callable[[EpochRow], Any]
"""A figure of a row; it may be None in rows that are left out."""
_EPOCH, _SECONDS = attrgetter("epoch"), attrgetter("train_time")


@dataclass(frozen=True)
class Line:
    """One line of a panel, or what the legend says of several.

    Attributes:
        label: What the legend calls it.
        colour: As CSS has it.
        style: As matplotlib has it: ``-``, ``--`` or ``:``.
        points: ``(x, mean, least, most)`` over the turns, with x growing; all of them can be drawn.
    """

    label: str
    colour: str
    style: Style
    points: Sequence[tuple[float, float, float, float]] = ()

    @property
    def is_marked(self) -> bool:
        """Whether each of its points has a mark."""
        return len(self.points) <= _MARKED

    def look(self, *, marked: bool) -> dict[str, Any]:
        """How matplotlib draws it; one point shows no style, so each style has a mark of its own."""
        return {
            "color": self.colour,
            "linestyle": self.style,
            "marker": _MARKS[self.style] if marked else "",
            "markersize": 3.6,
            "markerfacecolor": self.colour if self.style == "-" else "white",
        }


@dataclass(frozen=True)
class Panel:
    """Lines over one axis: a quarter of a PNG, or a picture of a page.

    Attributes:
        title: Stands above it.
        x: What the horizontal axis is: ``epoch``, which is a whole number, or seconds.
        lines: Those that have a point.
        keys: What the legend names.
        is_share: Whether the values are written in percent; others get a log scale where they lie far apart.
    """

    title: str
    x: str
    lines: Sequence[Line]
    keys: Sequence[Line]
    is_share: bool = False

    def draw(self, axes: Axes, *, tips: bool = False) -> None:
        """Draws it.

        Args:
            axes: Where.
            tips: Whether it is for a page, in which marks tell their values.
        """
        from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

        finish(axes, "" if tips else self.title, self.x)
        if not self.lines:
            axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center", color="#8a8a8a")
            axes.set(xticks=[], yticks=[])
            return
        for line in self.lines:
            xs, ys, low, high = zip(*line.points, strict=True)
            axes.plot(xs, ys, linewidth=1.7, **line.look(marked=line.is_marked and not tips))
            for x, y in zip(xs, ys, strict=True) if tips and line.is_marked else ():
                axes.plot(x, y, gid=f"tip {self._tick(y)} at {x:.6g}", **line.look(marked=True))
            if low != high:
                axes.fill_between(xs, low, high, color=line.colour, alpha=0.15, linewidth=0)
        points = [point for line in self.lines for point in line.points]
        least, most = min(y for _, y, *_ in points), max(y for _, y, *_ in points)
        if not self.is_share and least > 1e-90 and most > 10 * least:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(lambda value, _: self._tick(value))
        if self.x == "epoch":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        elif min(x for x, *_ in points) >= 0:
            # The margin of its own is a share of what lies between the points, which may be next to nothing.
            axes.set_xlim(0, 1.05 * max(x for x, *_ in points) or None)

    def svg(self) -> str:
        """It alone, for a page."""
        figure = new_figure(5.4, 2.7)
        figure.set_facecolor("none")
        self.draw(figure.subplots(), tips=True)
        return to_svg(figure)

    def _tick(self, value: float) -> str:
        return f"{100 * value:.4g} %" if self.is_share else f"{value:.4g}"


def draw_curves(
    rows_by_run: Mapping[str, Rows],
    path: str | Path,
    title: str,
    titles_by_run: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Draws accuracy over epochs and over time, all runs in each panel, and below a panel for each loss of each run.

    The turns of a run are one mean line and the band between their extremes.

    Args:
        rows_by_run: The recorded rows under the name that the legend gives the run, such as its form.
        path: The PNG to write.
        title: Stands above the panels.
        titles_by_run: The titles of the panels of each layer's first, second, … loss, by the same names; None for those
            of Associated Learning.
    """
    from matplotlib.lines import Line2D

    measured = measure_panels(rows_by_run, measure_of([row for rows in rows_by_run.values() for row in rows]))
    trained = []
    for run, rows in rows_by_run.items():
        panels = loss_panels(rows, DEFAULT.loss_titles if titles_by_run is None else titles_by_run[run])
        several = len(rows_by_run) > 1
        trained += [replace(panel, title=f"{run}: {panel.title}") if several else panel for panel in panels]
    columns = min(4, max(2, len(trained)))
    lines = 1 + ceil(len(trained) / columns)
    figure = new_figure(max(11, 4.4 * columns), 3.8 * lines, title)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.03)  # inches, and shares
    grid = figure.add_gridspec(lines, 2 * columns)
    places = [grid[0, :columns], grid[0, columns:]]
    places += [grid[1 + line, 2 * column : 2 * column + 2] for line in range(lines - 1) for column in range(columns)]
    for place, panel in zip(places, (*measured, *trained), strict=False):
        axes = figure.add_subplot(place)
        panel.draw(axes)
        if panel.lines and panel is not measured[1]:  # which has the lines of the one beside it
            marked = any(line.is_marked for line in panel.lines)
            handles = [Line2D([], [], label=key.label, **key.look(marked=marked)) for key in panel.keys]
            axes.legend(handles=handles, loc="best", ncols=1 + (len(handles) > 6), **LEGEND)
    save(figure, path)


def measure_panels(rows_by_run: Mapping[str, Rows], measure: Measure) -> list[Panel]:
    """Accuracy, or loss, over epochs and over training time: of test, and of a few runs also training and held-out
    samples."""
    kinds: list[tuple[str, Style, Value]] = [(measure.unseen, "-", measure.test)]
    if few := len(rows_by_run) <= _MOST_RUNS:
        kinds.append(("train", "--", measure.train))
    if few and any(held_rows(rows, measure) for rows in rows_by_run.values()):
        kinds.append(("held-out", ":", measure.held))
    runs = [(run, COLOURS[place % len(COLOURS)], rows) for place, (run, rows) in enumerate(rows_by_run.items())]
    keys = [Line(run, colour, "-") for run, colour, _ in runs if run]
    keys += [Line(kind, "#555555" if keys else runs[0][1], style) for kind, style, _ in kinds if runs]
    panels = []
    for x, words, over in ((_EPOCH, "epoch", "epochs"), (_SECONDS, "seconds of training", "training time")):
        lines = [
            Line(run, colour, style, _means(held_rows(rows, measure) if style == ":" else rows, x, value))
            for run, colour, rows in runs
            for _, style, value in kinds
        ]
        panels.append(Panel(f"{measure.name} over {over}", words, _drawn(lines), keys, measure.is_share))
    return panels


def loss_panels(rows: Rows, titles: Sequence[str]) -> list[Panel]:
    """The losses of each layer of a run, or of an even sample of many, deeper layers lighter.

    A panel for each title; but for the first, without those that have no line.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    panels = []
    for part, title in enumerate(titles):
        lines = []
        layers = max((len(row.losses) for row in rows), default=0)
        for layer in even_sample(range(layers), _MOST_LAYERS):
            having = [row for row in rows if len(row.losses) > layer and len(row.losses[layer]) > part]
            name, colour = f"layer {layer + 1}", to_hex(colormaps["viridis"](0.9 * layer / max(1, layers - 1)))
            if layers == 1 and all(len(row.losses[0]) == 1 for row in having):
                name, colour = _WHOLE, "#222222"
            lines.append(Line(name, colour, "-", _means(having, _EPOCH, _loss(layer, part))))
        drawn = _drawn(lines)
        whole = bool(drawn) and all(line.label == _WHOLE for line in drawn)
        if drawn or not part:
            panels.append(Panel(f"loss, {_WHOLE}" if whole else title, "epoch", drawn, drawn))
    return panels


def _means(rows: Rows, x: Value, y: Value) -> list[tuple[float, float, float, float]]:
    """The points of a line, epoch by epoch, without those that no picture has room for."""
    epochs: dict[int, list[EpochRow]] = {}
    for row in rows:
        epochs.setdefault(row.epoch, []).append(row)
    points = []
    for turns in epochs.values():
        xs, ys = [x(row) for row in turns], [y(row) for row in turns]
        if all(abs(value) < 1e90 for value in (*xs, *ys)):  # so that differences are finite; a NaN is not below
            points.append((fmean(xs), fmean(ys), min(ys), max(ys)))
    return sorted(points)


def drawn_rows(rows: Rows, most: int) -> Rows:
    """The rows of at most so many epochs: the first, the last, the best of each turn, and an even sample of the others.

    All turns have the same ones, so that their mean is that of the same trainings everywhere.
    """
    best = dict.fromkeys(row.epoch for row in best_rows(rows)[: most // 2])
    chosen = {*even_sample(sorted({row.epoch for row in rows}), most - len(best)), *best}
    return [row for row in rows if row.epoch in chosen]


def _drawn(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line.points]


def _loss(layer: int, part: int) -> Value:
    return lambda row: row.losses[layer][part]
