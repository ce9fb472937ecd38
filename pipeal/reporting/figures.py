"""What all pictures share: colours, plain axes, a PNG that is whole or absent, and SVG for a page.

Matplotlib is imported where something is drawn, here and in the modules of the pictures: commands start without it.
"""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeal.core.atomic import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: apart for colour-blind eyes, and of different lightness in print; then three darker ones.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#6A3D9A", "#8C564B", "#7A7A00")

LEGEND: dict[str, Any] = {"fontsize": 8.5, "framealpha": 0.85, "edgecolor": "none"}

_UNWANTED = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<clipPath.*?</clipPath>"  # a style would hold for the whole page
    r'| clip-path="[^"]*"'  # nothing is drawn outside, and a page without url() is easily seen to fetch nothing
    r"|(?<=<g) id=\"[^\"]*\"|font-family: [^;\"]*;| xmlns[:a-z]*=\"[^\"]*\"|(?<=\n) +",
    re.DOTALL,
)


def new_figure(width: float, height: float, title: str = "", *, dpi: int = 130) -> Figure:
    """An empty figure, which no other thread and no user's pyplot knows of.

    Args:
        width: In inches, as the height.
        height: See there.
        title: Stands above all panels.
        dpi: Pixels per inch.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white", layout="constrained")
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", parse_math=False)
    return figure


def finish(
    axes: Axes, title: str, x: str, y: str = "", *, grid: Literal["both", "y"] = "both", alone: bool = False
) -> None:
    """Titles and labels, a pale grid behind, and no frame above and to the right.

    Args:
        axes: The panel.
        title: Stands above it.
        x: What the horizontal axis is.
        y: What the vertical axis is.
        grid: Which axes have lines.
        alone: Whether it is the only panel, whose title is the figure's.
    """
    axes.set_title(
        title, loc="left", fontsize=12 if alone else 10.5, fontweight="bold" if alone else None, parse_math=False
    )
    axes.set_xlabel(x, fontsize=9.5)
    axes.set_ylabel(y, fontsize=9.5)
    axes.tick_params(labelsize=9)
    axes.grid(True, axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: str | Path) -> None:
    """Writes a PNG.

    Raises:
        DataError: The system refused to write.
    """
    with replacing(Path(path)) as aside:
        figure.savefig(aside, format="png")


def to_svg(figure: Figure) -> str:
    """An ``svg`` element for an HTML page, the same for the same figure; its letters are the page's.

    An artist whose gid begins with ``tip`` shows the rest of it under the pointer.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    written = StringIO()
    # Global while this is written, but nothing that PNGs read.
    with matplotlib.rc_context({"svg.hashsalt": "pipeal", "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None})
    svg = written.getvalue()
    svg = re.sub(r'<g id="tip ([^"]*)">', r"<g><title>\1</title>", svg[svg.index("<svg") :])
    return _UNWANTED.sub("", svg)
