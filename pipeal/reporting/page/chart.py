"""Lines over an axis, as SVG inside the page: sharp at any size, in its letters, and a few kilobytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pipeal.reporting.page.markup import Html, number, tag

Style: TypeAlias = Literal["solid", "dashed", "dotted"]

_WIDTH, _HEIGHT = 540, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 40
_MOST_POINTS = 200
_DASHES = {"dashed": "5 4", "dotted": "1.5 4"}


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: What the legend calls it; the legend leaves it out if empty.
        points: ``(x, y)``, with x growing; points that are not finite are left out.
        colour: As CSS has it.
        style: ``solid``, ``dashed`` or ``dotted``.
        band: ``(x, least, most)`` behind it; empty for none.
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    style: Style = "solid"
    band: Sequence[tuple[float, float, float]] = ()


def chart(
    title: str, lines: Sequence[Line], *, x: str, whole: bool = False, shown: Callable[[float], str] = "{:,.4g}".format
) -> Html:
    """A chart with its legend; values that lie far apart get a logarithmic scale.

    Args:
        title: Stands above it.
        lines: What it shows; without a point, the chart says so.
        x: What the horizontal axis is.
        whole: Whether that counts something, so that it has marks at whole numbers only.
        shown: How the marks of the vertical axis are written.
    """
    drawn = [(line, _thinned([point for point in line.points if _drawable(point)])) for line in lines]
    drawn = [(line, points) for line, points in drawn if points]
    head = tag("figcaption", title)
    if not drawn:
        return tag("figure", head, tag("p", "Nothing recorded.", class_="note"), class_="chart")
    ys = [y for _, points in drawn for _, y in points]
    xs = [x for _, points in drawn for x, _ in points]
    far = min(ys) > 1e-90 and max(ys) > 10 * min(ys)  # of less, half may be 0, which has no logarithm
    y_scale = _Scale(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP, logarithmic=far)
    x_scale = _Scale(min(xs) if whole else min(0.0, *xs), max(xs), _LEFT, _WIDTH - _RIGHT, fitted=True)
    marks = [mark for mark in x_scale.marks() if not whole or float(mark).is_integer()]
    parts = [*_grid(y_scale, shown), *_axis(x_scale, marks, x)]
    for line, points in drawn:
        parts += _line(line, points, x_scale, y_scale)
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    picture = tag("svg", *parts, viewBox=box, role="img", aria_label=title)
    keys = (tag("li", tag("i", class_="key", style=_key(line)), line.label) for line, _ in drawn if line.label)
    return tag("figure", head, picture, tag("ul", *keys, class_="keys"), class_="chart")


class _Scale:
    """From values to pixels along one axis."""

    def __init__(
        self, least: float, most: float, begin: float, end: float, *, logarithmic: bool = False, fitted: bool = False
    ) -> None:
        self.logarithmic, self.begin, self.end = logarithmic, begin, end
        if math.isclose(least, most, rel_tol=1e-9, abs_tol=1e-90):  # one point stands in the middle
            margin = abs(most) / 2 or 1.0
            least, most = (least / 2, most * 2) if logarithmic else (least - margin, most + margin)
        elif not logarithmic and not fitted:
            margin = 0.04 * (most - least)
            least, most = (max(0.0, least - margin) if least >= 0 else least - margin), most + margin
        self.least, self.most = least, most

    def __call__(self, value: float) -> float:
        least, most, at = self.least, self.most, min(max(value, self.least), self.most)
        if self.logarithmic:
            least, most, at = math.log10(least), math.log10(most), math.log10(at)
        return round(self.begin + (self.end - self.begin) * (at - least) / (most - least), 2)

    def marks(self) -> list[float]:
        """Round values within the scale: about six of them."""
        if self.logarithmic:
            return self._marks_of_tens()
        step = 10.0 ** math.floor(math.log10((self.most - self.least) / 5))
        step *= next(times for times in (1, 2, 5, 10) if (self.most - self.least) / (step * times) <= 6)
        first = math.ceil(self.least / step - 1e-9)
        last = math.floor(self.most / step + 1e-9)
        return [round(place * step, 12) if step < 1e6 else place * step for place in range(first, last + 1)]

    def _marks_of_tens(self) -> list[float]:
        tens = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
        for parts in ((1, 2, 5), (1,)):
            marks = [part * 10.0**ten for ten in tens for part in parts]
            marks = [mark for mark in marks if self.least <= mark <= self.most]
            if len(marks) <= 8:
                return marks
        return marks[:: math.ceil(len(marks) / 8)]


def _grid(scale: _Scale, shown: Callable[[float], str]) -> list[Html]:
    found = []
    for mark in scale.marks():
        at = str(scale(mark))
        found.append(tag("line", x1=str(_LEFT), x2=str(_WIDTH - _RIGHT), y1=at, y2=at, class_="grid"))
        found.append(tag("text", shown(mark), x=str(_LEFT - 8), y=at, class_="y"))
    return found


def _axis(scale: _Scale, marks: Sequence[float], words: str) -> list[Html]:
    floor = _HEIGHT - _BOTTOM
    found = [tag("line", x1=str(_LEFT), x2=str(_WIDTH - _RIGHT), y1=str(floor), y2=str(floor), class_="axis")]
    for mark in marks:
        found.append(tag("text", f"{mark:,g}", x=str(scale(mark)), y=str(floor + 15), class_="x"))
    middle = str((_LEFT + _WIDTH - _RIGHT) / 2)
    return [*found, tag("text", words, x=middle, y=str(_HEIGHT - 6), class_="x words")]


def _line(line: Line, points: Sequence[tuple[float, float]], x: _Scale, y: _Scale) -> list[Html]:
    found = []
    band = [edge for edge in line.band if _drawable(edge)]
    if len(band) > 1:
        outline = [(at, most) for at, _, most in band] + [(at, least) for at, least, _ in reversed(band)]
        found.append(tag("polygon", points=_path(outline, x, y), fill=line.colour, opacity="0.14"))
    dashes = {} if line.style == "solid" else {"stroke_dasharray": _DASHES[line.style]}
    found.append(tag("polyline", points=_path(points, x, y), stroke=line.colour, class_="line", **dashes))
    if len(points) <= 20:
        for at, value in points:
            fill = line.colour if line.style == "solid" else "white"
            found.append(
                tag(
                    "circle",
                    tag("title", f"{line.label} {number(value)} at {number(at)}".strip()),
                    cx=str(x(at)),
                    cy=str(y(value)),
                    r="2.6",
                    fill=fill,
                    stroke=line.colour,
                )
            )
    return found


def _path(points: Sequence[tuple[float, float]], x: _Scale, y: _Scale) -> str:
    return " ".join(f"{x(at)},{y(value)}" for at, value in points)


def _drawable(point: Sequence[float]) -> bool:
    return all(abs(value) < 1e90 for value in point)  # so that differences are finite; a NaN is not below


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most so many points as can be told apart, the last among them."""
    step = math.ceil(len(points) / _MOST_POINTS)
    return points if step <= 1 else [*points[::step], *([points[-1]] if (len(points) - 1) % step else [])]


def _key(line: Line) -> str:
    return f"border-top: 2px {line.style} {line.colour}"
