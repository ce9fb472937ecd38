"""What the batches of a run were: their shapes, and the padding in them beside that of random batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeal.data import FixedBatchSampler, padding_share
from pipeal.reporting.figures import COLOURS, LEGEND, finish, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOKENS, _PADDING = COLOURS[0], "#D9D9D9"


@dataclass(frozen=True)
class Batches:
    """The batches trained on.

    Attributes:
        shapes: How often a batch had so many samples and was padded to that length (0 for images).
        lengths: ``(N,)`` of the training samples; None for images.
    """

    shapes: Counter[tuple[int, int]]
    lengths: npt.NDArray[np.int64] | None

    @cached_property
    def padding_of_random(self) -> float:
        """The share of padding in random batches of as many samples, each padded to its longest."""
        assert self.lengths is not None
        size = max(1, round(sum(n * times for (n, _), times in self.shapes.items()) / self.shapes.total()))
        # What is longer than every batch was over the budget and dropped: it would pad no batch of this run.
        trained = self.lengths[self.lengths <= max(length for _, length in self.shapes)]
        return padding_share(trained, FixedBatchSampler(trained, size))

    def summary(self) -> dict[str, object]:
        """Sizes and shapes, for ``summary.json``."""
        found: dict[str, object] = {
            "shapes": len(self.shapes),
            "samples": _spread(n for n, _ in self.shapes.elements()),
        }
        if self.lengths is not None:
            found["padded_length"] = _spread(length for _, length in self.shapes.elements())
            found["padded_lengths"] = len({length for _, length in self.shapes})
            found["padding_share_of_random_batches"] = self.padding_of_random
        return found

    def draw(self, path: Path, title: str, padding: float) -> None:
        """Draws the lengths of the samples, the batches, and the padding before and after.

        Args:
            path: The PNG to write.
            title: Stands above the panels.
            padding: The share of padding in what was trained on.
        """
        assert self.lengths is not None
        figure = new_figure(11, 4.1, title)
        samples, batches, tokens = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
        _draw_lengths(samples, self.lengths)
        _draw_shapes(batches, self.shapes)
        _draw_padding(tokens, {"random batches\nof this size": self.padding_of_random, "this run": padding})
        save(figure, path)


def _spread(values: Iterable[int]) -> dict[str, float]:
    found = np.fromiter(values, np.int64)
    return {"least": int(found.min()), "median": float(np.median(found)), "most": int(found.max())}


def _draw_lengths(axes: Axes, lengths: npt.NDArray[np.int64]) -> None:
    longest = int(lengths.max())
    width = -(-longest // 64)
    axes.hist(lengths, bins=np.arange(0.5, longest + width + 0.5, width).tolist(), color=_TOKENS)
    axes.axvline(float(lengths.mean()), color="#222222", linewidth=1, linestyle="--")
    axes.annotate(
        f"mean {lengths.mean():.1f}",
        (float(lengths.mean()), 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -10),
        textcoords="offset points",
        fontsize=8.5,
    )
    finish(axes, f"length of {len(lengths):,} samples", "tokens", "samples", grid="y")


def _draw_shapes(axes: Axes, shapes: Counter[tuple[int, int]]) -> None:
    sizes, lengths = np.array(list(shapes)).T
    often = np.array(list(shapes.values()))
    axes.scatter(lengths, sizes, s=12 + 60 * often / often.max(), color=_TOKENS, alpha=0.45, linewidths=0)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    finish(
        axes, f"{shapes.total():,} batches of {len(shapes):,} shapes", "padded length", "samples in the batch", grid="y"
    )


def _draw_padding(axes: Axes, padding: dict[str, float]) -> None:
    """Real tokens are the same in both; what is beside them is padding."""
    for place, share in enumerate(padding.values()):
        wasted = share / (1 - share)
        axes.bar(place, 1, 0.6, color=_TOKENS, label=None if place else "tokens")
        axes.bar(place, wasted, 0.6, bottom=1, color=_PADDING, label=None if place else "padding")
        axes.annotate(
            f"{share:.1%} padding",
            (place, 1 + wasted),
            (0, 4),
            ha="center",
            textcoords="offset points",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over a line of the grid
        )
    axes.set_xticks(range(len(padding)), padding)
    axes.margins(x=0.15, y=0.3)  # above the bars is room for the legend
    axes.legend(loc="upper center", ncols=2, **LEGEND)
    finish(axes, "what is computed, over what is read", "", grid="y")
