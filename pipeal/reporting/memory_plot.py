"""A picture of the memory that training takes: activations, and all of it, over depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeal.reporting.figures import COLOURS, LEGEND, finish, new_figure, save


@dataclass(frozen=True)
class MemoryCurve:
    """One way to train.

    Attributes:
        depths: Layers, rising.
        activation_bytes: For each.
        peak_bytes: For each, all parts at once.
        measured: Depth, activations and all parts at once, as measured; None where they were not.
    """

    depths: Sequence[int]
    activation_bytes: Sequence[int]
    peak_bytes: Sequence[int]
    measured: tuple[int, int, int] | None = None


def draw_memory(curves: Mapping[str, MemoryCurve], path: str | Path, title: str, limit_bytes: int | None) -> None:
    """Draws both over depth, on logarithmic scales.

    Args:
        curves: By the name of the way; lines of those that begin with ``AL`` are whole.
        path: The PNG to write.
        title: Stands above.
        limit_bytes: A line for what there is; None for none.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = new_figure(11.5, 4.6, title)
    panels = figure.subplots(1, 2)
    for panel, what in zip(panels, ("activations", "all parts at once"), strict=True):
        for number, (name, curve) in enumerate(curves.items()):
            whole = name.startswith("AL")
            colour = COLOURS[number % len(COLOURS)]
            activations = what == "activations"
            panel.plot(
                curve.depths,
                [size / 2**20 for size in (curve.activation_bytes if activations else curve.peak_bytes)],
                color=colour,
                linestyle="-" if whole else "--",
                linewidth=1.8,
                label=name,
            )
            if curve.measured is not None:
                depth, of_activations, of_all = curve.measured
                own = (of_activations if activations else of_all) / 2**20
                panel.plot([depth], [own], "o" if whole else "s", color=colour, markersize=6, markerfacecolor="white")
        if limit_bytes is not None and what != "activations":
            panel.axhline(limit_bytes / 2**20, color="#9a9a9a", linestyle=":", linewidth=1.5, label="--memory")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(LogLocator(base=2))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            axis.set_minor_locator(NullLocator())
        finish(panel, what, "layers", "MiB")
    panels[1].legend(**LEGEND, loc="upper left")
    save(figure, path)
