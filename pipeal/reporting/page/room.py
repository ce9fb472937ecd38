"""The room of a page: text comes first, then charts, then pictures; what finds no room is named instead."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from markupsafe import Markup
from PIL import Image

from pipeal.reporting.page.rows import require_file
from pipeal.reporting.page.shown import shown
from pipeal.reporting.plots import Panel

_COLOURS = 128
"""More than any of the pictures has, but for the edges of its letters."""

_CSS_DPI = 96

_WIDEST = 2200
"""Pixels, beyond which a picture is made smaller."""

_IMAGE = Markup('<img src="data:image/png;base64,{}" alt="{}" width="{}" height="{}">')
_NOTE = Markup('<p class="note">{}</p>')


class Room:
    """Gives out the bytes that a page may have.

    Sections take theirs while the page is made. Charts and pictures leave a place in it, and are made and put there
    when it is known how much is left: charts first, as a large picture of one run must not cost another its curves.

    Args:
        most_bytes: How large the page may become.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._left_for_text = most_bytes * 9 // 10  # the rest is for the head, and for lines on what is left out
        self._places: list[tuple[str, Callable[[], Markup]]] = []

    def section(self, name: str, caller: Callable[[], Markup]) -> Markup:
        """A part of the page, or where there is no room for it a line that says so. For ``{% call %}`` in a template.

        Args:
            name: What it is.
            caller: Makes it.
        """
        made = caller()
        if len(made.encode()) > self._left_for_text:
            return _left_out(name, "ask for a page of fewer runs")
        self._left_for_text -= len(made.encode())
        return made

    def chart(self, panel: Panel) -> Markup:
        """The place of a chart; what is drawn is matplotlib's, and holds no text from a file."""
        return self._place("chart", panel.title, lambda: Markup(panel.svg()))

    def picture(self, path: Path, words: str) -> Markup:
        """The place of a picture.

        Args:
            path: A PNG.
            words: What it shows, for those who cannot see it.
        """
        return self._place("picture", path.name, lambda: _embedded(path, words))

    def fill(self, page: str) -> str:
        """The page with its charts and pictures, as long as there is room; a line stands for each that is not there."""
        for kind in ("chart", "picture"):
            left = self._most - len(page.encode())

            def put(place: re.Match[str]) -> str:
                nonlocal left
                name, make = self._places[int(place[1])]
                found = make() if left > 0 else Markup()
                size = len(found.encode())
                if size > left or not found:
                    return _left_out(name, "look at the run's folder")
                left -= size
                return found

            page = re.sub(f"\x00{kind}([0-9]+)\x00", put, page)
        return page

    def _place(self, kind: str, name: str, make: Callable[[], Markup]) -> Markup:
        self._places.append((name, make))
        return Markup(f"\x00{kind}{len(self._places) - 1}\x00")  # escaped text holds no such character


def _left_out(name: str, instead: str) -> Markup:
    return _NOTE.format(shown(f"{name} is left out to keep this page small; {instead}."))


def _embedded(path: Path, words: str) -> Markup:
    """A picture with its data, or a line that says why there is none."""
    try:
        encoded, width, height = _encoded(path)
    except FileNotFoundError:
        return _NOTE.format(f"{path.name} is not there.")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return _NOTE.format(shown(f"{path.name} cannot be shown: {error}"))
    return _IMAGE.format(encoded, words, width, height)


def _encoded(path: Path) -> tuple[str, int, int]:
    """A PNG file in base64 with few colours, and its width and height in the page, so that letters are of one size."""
    require_file(path)
    with Image.open(path, formats=["PNG"]) as file:
        dpi = float(file.info.get("dpi", (0.0, 0.0))[0])
        picture = Image.new("RGB", file.size, "white")
        rgba = file.convert("RGBA")
        picture.paste(rgba, mask=rgba)
    if picture.width > _WIDEST:
        picture = picture.resize((_WIDEST, max(1, picture.height * _WIDEST // picture.width)))
    few = picture.quantize(_COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    written = BytesIO()
    few.save(written, "PNG", optimize=True)
    scale = _CSS_DPI / dpi if 72 <= dpi <= 600 else 1.0
    return b64encode(written.getvalue()).decode("ascii"), round(picture.width * scale), round(picture.height * scale)
