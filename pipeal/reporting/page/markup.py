"""HTML that is escaped by construction: text is text, unless it was made by :func:`tag`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape

_NUMBER = re.compile(r"[-+−]?\d[\d.,]*(?:e[-+]?\d+)?\s?(?:%|×|[kMGT]?i?B|of \d+)?|–")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_ALONE = ("img", "meta")

Cell = str | float | int | None
"""What a table of the page holds; None is a dash."""


class Html(str):
    """A text that is markup already."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str) -> Html:
    """An element; children and attributes that are no :class:`Html` are escaped.

    Args:
        name: The element.
        children: What it holds.
        attributes: Its attributes; a trailing underscore is dropped, so that ``class_`` can be said. An empty text
            is an attribute without a value.

    >>> tag("p", "a < b", tag("b", "!"), class_="note")
    '<p class="note">a &lt; b<b>!</b></p>'
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' if value else f" {key}"
        for key, value in attributes.items()
    )
    if name in _ALONE:
        return Html(f"<{name}{said}>")
    return Html(f"<{name}{said}>{join(children)}</{name}>")


def text(value: str) -> Html:
    """A value as it may stand in a page: markup as it is, all else escaped."""
    return value if isinstance(value, Html) else Html(escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", value)))


def join(parts: Sequence[str]) -> Html:
    """Several pieces as one."""
    return Html("".join(map(text, parts)))


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell | Html]], *, class_: str = "") -> Html:
    """A table that scrolls within itself where it is too wide; columns of numbers stand to the right."""
    shown = [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
    right = [
        bool(column) and all(not isinstance(cell, Html) and _NUMBER.fullmatch(cell) for cell in column)
        for column in zip(*shown, strict=True)
    ] or [False] * len(heads)
    kinds = ["number" if to_right else "words" for to_right in right]
    head = tag("tr", *(tag("th", name, class_=kind, scope="col") for name, kind in zip(heads, kinds, strict=True)))
    body = [tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in shown]
    whole = tag("table", tag("thead", head), tag("tbody", *body), **({"class_": class_} if class_ else {}))
    return tag("div", whole, class_="scroll")


def number(value: float | int | None, decimals: int | None = None) -> str:
    """A number for people; None, and what is no number, is a dash.

    >>> number(12345.6), number(0.123456), number(7), number(None), number(0.00001234)
    ('12,346', '0.1235', '7', '–', '1.23e-05')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if decimals is not None:
        return f"{value:,.{decimals}f}"
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if 0 < size < 1e-3 or size >= 1e12:
        return f"{value:.3g}"
    return f"{value:,.{0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 4}f}"


def percent(share: float | None) -> str:
    """A share of 1 as a percentage.

    >>> percent(0.9876), percent(None)
    ('98.8 %', '–')
    """
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.1f} %"


def size(count_bytes: float | None) -> str:
    """Bytes for people.

    >>> size(512), size(1536), size(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    if count_bytes is None or not math.isfinite(count_bytes):
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count_bytes) < 1024:
            return f"{count_bytes:.0f} B" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.1f} TiB"


def fold(title: str, *children: str, is_open: bool = False) -> Html:
    """A section that can be folded away; printed, it is always open."""
    summary = tag("summary", title)
    return tag("details", summary, *children, **({"open": ""} if is_open else {}))
