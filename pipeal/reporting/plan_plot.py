"""A picture of a plan: what more devices bring, schedule by schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeal.reporting.figures import COLOURS, finish, new_figure, save

_WIDE = 16
"""Beyond so many devices both scales are logarithmic."""

Curve = Sequence[tuple[int, float]]
"""Devices, and how many times as fast as on one."""


def draw_plan(curves: Mapping[str, Curve], path: str | Path, title: str, versus: str) -> None:
    """Draws speed-ups over the number of devices.

    Args:
        curves: By method; the names of AL schedules begin with ``AL``, and their lines are whole.
        path: The PNG to write.
        title: Stands above.
        versus: What 1 on the vertical axis is.
    """
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    figure = new_figure(9.6, 5.6)
    axes = figure.subplots()
    numbers = sorted({devices for curve in curves.values() for devices, _ in curve})
    most = max(numbers, default=1)
    ends = [min(numbers, default=1), most]
    axes.plot(ends, ends, color="#9a9a9a", linestyle=":", linewidth=1.4, label="ideal")
    seen = {"AL": 0, "BP": 0}
    for method, curve in curves.items():
        form = method[:2]
        colour = COLOURS[seen[form] % 4]
        seen[form] += 1
        style = "-" if form == "AL" else "--"
        marker = "o" if form == "AL" else "s"
        xs, ys = [devices for devices, _ in curve], [gain for _, gain in curve]
        axes.plot(
            xs,
            ys,
            color=colour,
            linestyle=style,
            marker=marker,
            markersize=3.8,
            markerfacecolor=colour if form == "AL" else "white",
            linewidth=1.7,
            label=method,
        )
    if most > _WIDE:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(base=2))
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_locator(NullLocator())
    else:
        axes.set_xticks(numbers)
        axes.set_ylim(bottom=0)
    finish(axes, title, "devices", f"batches per second, as multiples of {versus}", alone=True)
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    save(figure, path)
