"""The charts of runs: accuracy, or loss, over epochs and over time, and the losses of each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from matplotlib import colormaps
from matplotlib.colors import to_hex

from pipeal.reporting.page.chart import Line, Style, chart
from pipeal.reporting.page.folder import Run
from pipeal.reporting.page.markup import Html, tag
from pipeal.training.metric import Measure, held_rows
from pipeal.training.row import EpochRow

# Okabe and Ito's palette.
_RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07D00", "#56B4E9", "#333333")

Value = Callable[[EpochRow], float]


def run_curves(run: Run) -> Html:
    """The four charts of one run; several turns are one mean line and the band between their extremes."""
    charts = _measured(run.measure, _lines(run.rows, run.measure, "", _RUNS[0]), "training time")
    for part, title in enumerate(run.loss_titles):
        lines = _losses(run.rows, part)
        if lines or not part:
            charts.append(chart(title.capitalize(), lines, x="epoch", whole=True))
    return tag("div", *charts, class_="charts")


def compared_curves(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """Accuracy, or loss, of several runs in one chart over epochs, and in one over time."""
    charts: list[Html] = []
    for measure in dict.fromkeys(run.measure for run in runs):
        lines = [
            pair
            for place, (run, name) in enumerate(zip(runs, names, strict=True))
            for pair in (_lines(run.rows, measure, name, _RUNS[place % len(_RUNS)]) if run.measure is measure else ())
        ]
        charts += _measured(measure, lines, "time", " (dashed: training samples, dotted: held out)")
    return tag("div", *charts, class_="charts")


def _measured(measure: Measure, lines: Sequence[tuple[Line, Line]], time: str, note: str = "") -> list[Html]:
    """A chart over epochs and one over time; each pair of lines has one for either."""
    name, shown = measure.name.capitalize(), _points if measure.is_share else "{:,.4g}".format
    over_epochs, over_time = [line for line, _ in lines], [line for _, line in lines]
    return [
        chart(f"{name} over epochs{note}", over_epochs, x="epoch", whole=True, shown=shown),
        chart(f"{name} over {time}{note}", over_time, x="seconds of training", shown=shown),
    ]


def _lines(rows: Sequence[EpochRow], measure: Measure, name: str, colour: str) -> list[tuple[Line, Line]]:
    """The measure on test, training and held-out samples, each over epochs and over time."""
    found = []
    held = held_rows(rows, measure)
    kinds: list[tuple[str, Value, Style, Sequence[EpochRow]]] = [
        (measure.unseen, measure.test, "solid", rows),
        ("train", measure.train, "dashed", rows),
    ]
    if held:
        kinds.append(("held-out", measure.held_value, "dotted", held))
    for kind, value, style, own in kinds:
        label = kind if not name else name if style == "solid" else ""  # of several runs, the legend names each once
        points, band = _means(own, value)
        times = [fmean(row.train_time for row in turns) for turns in _by_epoch(own)]
        over_time = [(at, y) for at, (_, y) in zip(times, points, strict=True)]
        band_over_time = [(at, *edges) for at, (_, *edges) in zip(times, band, strict=False)]
        found.append(
            (
                Line(label, points, colour, style, band),
                Line(label, over_time, colour, style, [(at, low, high) for at, low, high in band_over_time]),
            )
        )
    return found


def _losses(rows: Sequence[EpochRow], part: int) -> list[Line]:
    layers = max((len(row.losses) for row in rows), default=0)
    lines = []
    for layer in range(layers):
        having = [row for row in rows if len(row.losses) > layer and len(row.losses[layer]) > part]
        if having:
            points, band = _means(having, _loss(layer, part))
            colour = to_hex(colormaps["viridis"](0.88 * layer / max(1, layers - 1)))  # deeper layers are lighter
            lines.append(Line(f"layer {layer + 1}" if layers > 1 else "all layers", points, colour, band=band))
    return lines


def _means(
    rows: Sequence[EpochRow], value: Value
) -> tuple[list[tuple[float, float]], list[tuple[float, float, float]]]:
    """The mean over turns for each epoch, and the band from the least to the greatest if there are several turns."""
    points, band = [], []
    for turns in _by_epoch(rows):
        values = [value(row) for row in turns]
        points.append((float(turns[0].epoch), fmean(values)))
        band.append((float(turns[0].epoch), min(values), max(values)))
    return points, band if len(rows) > len(points) else []


def _by_epoch(rows: Sequence[EpochRow]) -> list[list[EpochRow]]:
    epochs: dict[int, list[EpochRow]] = {}
    for row in rows:
        epochs.setdefault(row.epoch, []).append(row)
    return [epochs[epoch] for epoch in sorted(epochs)]


def _loss(layer: int, part: int) -> Value:
    return lambda row: row.losses[layer][part]


def _points(share: float) -> str:
    return f"{100 * share:.4g} %"
