"""A picture of who did what when: one row per stage, one bar per forward, backward and update.

stage 0 | F1 B1  U1 F2 B2  U2 F3 ...          busy 97 %   idle 3 %
stage 1 |    F1 B1  U1 F2 B2  U2 ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from pipeal.engine.trace import Span
from pipeal.reporting.figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACTIONS = {"F": ("forward", "#0072B2"), "B": ("backward", "#E69F00"), "U": ("update", "#33B58C")}
"""The name and the colour of each, also in a page."""

_INK = {"F": "white", "B": "#222222", "U": "#222222"}
_GREY = "#6b6b6b"
_IDLE = "#efefef"

Stretch = tuple[float, float]
"""Begin and end, in seconds."""


def steady(spans: Iterable[Span]) -> Stretch:
    """The stretch in which every stage is at work: neither filling nor draining, nor cut off by the recording.

    From when the last stage begins to when the first one ends; where that is empty, all of the recording.
    """
    stages = _by_stage(spans).values()
    if not stages:
        return 0.0, 0.0
    begin = max(min(span.begin for span in stage) for stage in stages)
    end = min(max(span.end for span in stage) for stage in stages)
    if begin < end:
        return begin, end
    return min(span.begin for stage in stages for span in stage), max(span.end for stage in stages for span in stage)


def busy_shares(spans: Iterable[Span], within: Stretch) -> dict[int, float]:
    """The share of a stretch in which each stage is at work, 0 to 1; actions at the same time count once."""
    begin, end = within
    shares = {}
    for stage, own in _by_stage(spans).items():
        busy, seen = 0.0, begin
        for span in sorted(own, key=lambda span: span.begin):
            busy += max(0.0, min(span.end, end) - max(span.begin, seen))
            seen = max(seen, span.end)
        shares[stage] = min(1.0, busy / (end - begin)) if end > begin else 0.0
    return shares


def draw_timeline(spans: Sequence[Span], path: str | Path, *, title: str, devices: Sequence[str]) -> None:
    """Draws the actions of a run, with each stage's busy and idle share in the steady state.

    Args:
        spans: What was recorded, in any order; best some tens of batches.
        path: The PNG to write.
        title: Stands above the chart.
        devices: The device of each stage; there are as many rows.
    """
    stages = len(devices)
    batches = len({span.batch for span in spans})
    rows = [f"stage {stage} · {device}" for stage, device in enumerate(devices)]
    left, right, top, bottom = 0.4 + 0.075 * max(map(len, rows), default=0), 1.35, 0.95, 0.6  # inches around
    width = min(13.0, max(9.0, 2.0 + 0.3 * batches))
    height = stages * max(0.34, 0.62 - 0.02 * stages)
    figure = new_figure(left + width + right, top + height + bottom, dpi=150, packed=False)
    total_w, total_h = figure.get_size_inches()
    axes = figure.add_axes((left / total_w, bottom / total_h, width / total_w, height / total_h))

    origin = min((span.begin for span in spans), default=0.0)
    length = max((span.end for span in spans), default=origin) - origin or 1e-3
    axes.set_xlim(0, length * 1e3)
    axes.set_ylim(stages - 0.5, -0.5)
    for stage in range(stages):
        axes.axhspan(stage - 0.41, stage + 0.41, color=_IDLE, linewidth=0, zorder=0)
    _draw_bars(axes, spans, origin, inches_per_s=width / length)

    window = steady(spans)
    _draw_shares(axes, busy_shares(spans, window), stages)
    trimmed = 0 < window[1] - window[0] < 0.995 * length
    if trimmed:
        for edge in window:
            axes.axvline((edge - origin) * 1e3, color=_GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)

    axes.set_yticks(range(stages), rows, fontsize=9)
    axes.tick_params(axis="y", length=0, pad=8)
    axes.tick_params(axis="x", labelsize=9, colors="#333333")
    axes.set_xlabel("time in ms", fontsize=9.5)
    axes.spines[["left", "right", "top"]].set_visible(False)

    note = "numbers: batches; shares: between the dashed lines" if trimmed else "numbers: batches"
    _draw_head(figure, title, note if spans else "nothing recorded", left=left, right=left + width)
    save(figure, path)


def _draw_head(figure: Figure, title: str, note: str, *, left: float, right: float) -> None:
    """Prints title, note and legend above a chart that lies between ``left`` and ``right``, in inches."""
    from matplotlib.patches import Patch

    width, height = figure.get_size_inches()
    x = left / width
    figure.text(x, 1 - 0.42 / height, title, fontsize=13, fontweight="bold", va="center", parse_math=False)
    figure.text(x, 1 - 0.72 / height, note, fontsize=9, color=_GREY, va="center")
    figure.legend(
        handles=[
            *(Patch(color=colour, label=name) for name, colour in ACTIONS.values()),
            Patch(color=_IDLE, label="idle"),
        ],
        loc="center right",
        bbox_to_anchor=(right / width, 1 - 0.68 / height),
        ncols=4,
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        handleheight=1.0,
        borderaxespad=0,
        borderpad=0,
        columnspacing=1.4,
    )


def _draw_bars(axes: Axes, spans: Iterable[Span], origin: float, *, inches_per_s: float) -> None:
    for stage, own in _by_stage(spans).items():
        for action, (_, colour) in ACTIONS.items():
            axes.broken_barh(
                [((span.begin - origin) * 1e3, (span.end - span.begin) * 1e3) for span in own if span.action == action],
                (stage - 0.41, 0.82),
                facecolor=colour,
                # An update is often thinner than the line that sets equal neighbours apart.
                edgecolor="none" if action == "U" else "white",
                linewidth=0.3,
                zorder=2.5 if action == "U" else 2,
            )
        for run in _runs(own):
            _draw_number(axes, run, origin, inches_per_s=inches_per_s)


def _runs(stage: Iterable[Span]) -> Iterator[list[Span]]:
    """Yields what one number is enough for: neighbouring forwards of a batch, or its backwards and updates."""
    ordered = sorted(stage, key=lambda span: span.begin)
    for _, run in groupby(ordered, key=lambda span: (span.batch, span.action == "F")):
        yield list(run)


def _draw_number(axes: Axes, run: Sequence[Span], origin: float, *, inches_per_s: float) -> None:
    """Prints the batch in the first bar of a run, or else across the run, or else not at all."""
    number = str(run[0].batch)
    for begin, end in ((run[0].begin, run[0].end), (run[0].begin, run[-1].end)):
        fits = 0.85 * (end - begin) * inches_per_s * 72 / (0.62 * len(number))  # font size, in points
        if fits >= 4.5:
            middle = ((begin + end) / 2 - origin) * 1e3
            axes.text(
                middle,
                run[0].stage,
                number,
                size=min(8.0, fits),
                color=_INK[run[0].action],
                ha="center",
                va="center_baseline",
                zorder=4,
            )
            return


def _draw_shares(axes: Axes, shares: dict[int, float], stages: int) -> None:
    """Prints the shares at the right margin, in two columns."""
    inch = 1 / axes.get_window_extent().width * axes.figure.dpi
    for offset, head, colour in ((0.55, "busy", "#222222"), (1.1, "idle", _GREY)):
        x = 1 + offset * inch
        axes.annotate(
            head, (x, 1), xytext=(0, 4), xycoords="axes fraction", textcoords="offset points",
            ha="right", va="bottom", fontsize=9, color=colour,
        )  # fmt: skip
        for stage in range(stages):
            busy = shares.get(stage, 0.0)
            share = busy if head == "busy" else 1 - busy
            axes.annotate(
                f"{share:.0%}".replace("%", " %"), (x, stage), xycoords=("axes fraction", "data"),
                ha="right", va="center", fontsize=9, color=colour, annotation_clip=False,
            )  # fmt: skip


def _by_stage(spans: Iterable[Span]) -> dict[int, list[Span]]:
    stages: dict[int, list[Span]] = {}
    for span in spans:
        stages.setdefault(span.stage, []).append(span)
    return stages
