"""A picture of who did what when: one row per stage, one bar per forward, backward and update; and along its edges,
where layers are kept in the memory of the host, one per copy.

stage 0 | F1 B1  U1 F2 B2  U2 F3 ...          busy 97 %   idle 3 %
stage 1 |    F1 B1  U1 F2 B2  U2 ...

On a GPU a bar is as long as the host had the action open there (host-open). How much of that had kernels to run for
certain stands beside it (kernel-busy).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from pipeal.engine.trace import CopySpan, Span
from pipeal.reporting.figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACTIONS = {"F": ("forward", "#0072B2"), "B": ("backward", "#E69F00"), "U": ("update", "#33B58C")}
"""The name and the colour of each, also in a page."""

COPIES = {"bring": ("layer brought", "#CC79A7"), "send": ("layer sent home", "#D55E00")}
"""The name and the colour of each."""

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


def kernel_shares(spans: Iterable[Span], within: Stretch) -> dict[int, float]:
    """For each stage on a GPU, the least share of a stretch in which there were kernels to run."""
    on_gpus = [span for span in spans if span.given is not None]
    given = [replace(span, begin=min(span.end, max(span.begin, span.given or 0.0))) for span in on_gpus]
    return busy_shares(given, within)


def shown_share(busy: float, kernels: float | None) -> str:
    """What stands beside a stage.

    >>> shown_share(0.98, None), shown_share(0.98, 0.4)
    ('busy 98%, idle 2%', 'host-open 98%, kernel-busy ≥ 40%')
    """
    if kernels is None:
        return f"busy {busy:.0%}, idle {1 - busy:.0%}"
    return f"host-open {busy:.0%}, kernel-busy ≥ {kernels:.0%}"


def timeline_lines(spans: Sequence[Span], seconds: float, width: int) -> list[str]:
    """A timeline in letters, the last stage above, from the beginning of the :func:`steady` stretch on: a digit for the
    forward of that batch, ``▒`` for its backward and update, ``·`` for waiting. A cell shows what took most of it.

    >>> from pipeal.engine.schedule import Action
    >>> moments = [("F", 0, 0, 1), ("B", 0, 1, 3), ("F", 1, 3, 4), ("B", 1, 4, 6)]
    >>> found = [Span(0, 0, Action(name), batch, begin, end) for name, batch, begin, end in moments]
    >>> timeline_lines(found, seconds=8.0, width=8)
    ['0▒▒1▒▒··']

    Args:
        spans: What was recorded, in any order.
        seconds: How much of it.
        width: Cells.
    """
    origin = steady(spans)[0]
    lines = []
    for _, own in sorted(_by_stage(spans).items(), reverse=True):
        cells: list[dict[str, float]] = [{} for _ in range(width)]
        for span in own:
            begin, end = ((moment - origin) * width / seconds for moment in (span.begin, span.end))
            letter = str(span.batch % 10) if span.action == "F" else "▒"
            for place in range(max(0, int(begin)), min(width, int(end) + 1)):
                share = min(end, place + 1) - max(begin, place)
                cells[place][letter] = cells[place].get(letter, 0.0) + share
        for cell in cells:
            cell["·"] = 1 - sum(cell.values())
        lines.append("".join(max(cell, key=cell.__getitem__) for cell in cells))
    return lines


def draw_timeline(
    spans: Sequence[Span],
    path: str | Path,
    *,
    title: str,
    devices: Sequence[str],
    copies: Sequence[CopySpan] = (),
    numbers: str = "batches",
) -> None:
    """Draws the actions of a run, with each stage's busy and idle share in the steady state; those of a GPU are by its
    host, with the least share in which it had kernels to run.

    Args:
        spans: What was recorded, in any order; best some tens of batches.
        path: The PNG to write.
        title: Stands above the chart.
        devices: The device of each stage; there are as many rows.
        copies: Of layers, beside their work.
        numbers: What the numbers are of.
    """
    from matplotlib.patches import Patch

    stages, window = len(devices), steady(spans)
    width = min(15.0, max(11.0, 4.0 + 0.3 * len({span.batch for span in spans})))
    figure = new_figure(width, 1.6 + stages * max(0.34, 0.62 - 0.02 * stages), title, dpi=150)
    axes = figure.subplots()
    origin = min((span.begin for span in spans), default=0.0)
    length = max((span.end for span in spans), default=origin) - origin or 1e-3
    axes.set_xlim(0, length * 1e3)
    axes.set_ylim(stages - 0.5, -0.5)
    for stage in range(stages):
        axes.axhspan(stage - 0.41, stage + 0.41, color=_IDLE, linewidth=0, zorder=0)
    for stage, own in _by_stage(spans).items():
        _draw_bars(axes, stage, own, origin)
    _draw_copies(axes, copies, origin)
    note = f"numbers: {numbers}" if spans else "nothing recorded"
    if 0 < window[1] - window[0] < 0.995 * length:
        note += "; shares: between the dashed lines"
        for edge in window:
            axes.axvline((edge - origin) * 1e3, color=_GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)

    busy, kernels = busy_shares(spans, window), kernel_shares(spans, window)
    shares = [shown_share(busy.get(stage, 0.0), kernels.get(stage)) for stage in range(stages)]
    axes.set_yticks(range(stages), [f"stage {stage} · {device}" for stage, device in enumerate(devices)])
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(stages), shares)
    for each in (axes, right):
        each.tick_params(axis="y", length=0, pad=8, labelsize=9)
        each.spines[:].set_visible(False)
    axes.spines["bottom"].set_visible(True)
    axes.tick_params(axis="x", labelsize=9, colors="#333333")
    axes.set_xlabel("time in ms", fontsize=9.5)
    axes.set_title(note, loc="left", fontsize=9, color=_GREY)
    kinds = [*ACTIONS.values(), *(COPIES.values() if copies else ()), ("idle", _IDLE)]
    handles = [Patch(color=colour, label=name) for name, colour in kinds]
    figure.legend(
        handles=handles, loc="outside upper right", ncols=len(kinds), frameon=False, fontsize=9, handlelength=1.2
    )

    figure.draw_without_rendering()  # before it, the layout is not known: how wide a bar is, and which numbers fit
    inches_per_s = axes.get_window_extent().width / figure.dpi / length
    for own in _by_stage(spans).values():
        for run in _runs(own):
            _draw_number(axes, run, origin, inches_per_s)
    save(figure, path)


def _draw_bars(axes: Axes, stage: int, own: Sequence[Span], origin: float) -> None:
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


def _draw_copies(axes: Axes, copies: Iterable[CopySpan], origin: float) -> None:
    """What is brought above a stage's row, what is sent below: both ways may be in use at a time."""
    for copy in copies:
        _, colour = COPIES[copy.way]
        edge = copy.stage + (-0.49 if copy.way == "bring" else 0.42)
        stretch = (copy.begin - origin) * 1e3, (copy.end - copy.begin) * 1e3
        axes.broken_barh([stretch], (edge, 0.07), facecolor=colour, linewidth=0, zorder=2)


def _runs(stage: Iterable[Span]) -> Iterator[list[Span]]:
    """Yields what one number is enough for: neighbouring forwards of a batch, or its backwards and updates."""
    ordered = sorted(stage, key=lambda span: span.begin)
    for _, run in groupby(ordered, key=lambda span: (span.batch, span.action == "F")):
        yield list(run)


def _draw_number(axes: Axes, run: Sequence[Span], origin: float, inches_per_s: float) -> None:
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


def _by_stage(spans: Iterable[Span]) -> dict[int, list[Span]]:
    stages: dict[int, list[Span]] = {}
    for span in spans:
        stages.setdefault(span.stage, []).append(span)
    return stages
