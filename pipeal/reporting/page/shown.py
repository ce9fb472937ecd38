"""Numbers and texts as the page has them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from pipeal.core.outofmemory import in_units
from pipeal.reporting.tables import is_number

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def shown(value: object) -> object:
    """What jinja does to each value before it escapes it: numbers for people, and no character that HTML lacks."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return number(value)
    return value if hasattr(value, "__html__") else _CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value))


def alignments(rows: Sequence[Sequence[object]]) -> list[str]:
    """The class of each column of a table: ``number``, which stands to the right, or ``words``."""
    columns = zip(*rows, strict=True)
    return ["number" if all(is_number(str(shown(cell))) for cell in column) else "words" for column in columns]


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

    >>> size(512), size(1536), size(None)
    ('512 bytes', '1.50 KiB', '–')
    """
    return "–" if count_bytes is None or not math.isfinite(count_bytes) else in_units(int(count_bytes))
