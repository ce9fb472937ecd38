"""Pictures inside the page: as many as keep the whole of it below its size, and never fetched."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from markupsafe import Markup

from pipeal.reporting.page.rows import require_file
from pipeal.reporting.page.shown import shown

_COLOURS = 128
"""More than any of the pictures has, but for the edges of its letters."""

_CSS_DPI = 96

_WIDEST = 2200
"""Pixels, beyond which a picture is made smaller."""

_IMAGE = Markup('<img src="data:image/png;base64,{}" alt="{}" width="{}" height="{}">')
_NOTE = Markup('<p class="note">{}</p>')


@dataclass(frozen=True)
class _Picture:
    path: Path
    words: str


class Album:
    """Keeps a place in the page for each picture, and puts them in when it is known how much room there is."""

    def __init__(self) -> None:
        self._pictures: list[_Picture] = []

    def picture(self, path: Path, words: str) -> Markup:
        """The place of a picture.

        Args:
            path: A PNG.
            words: What it shows, for those who cannot see it.
        """
        self._pictures.append(_Picture(path, words))
        return Markup(f"\x00{len(self._pictures) - 1}\x00")  # escaped text holds no such character

    def fill(self, page: str, most_bytes: int) -> str:
        """The page with its pictures, as long as there is room; a line stands for each that is not there.

        Args:
            page: What was made with the places of this album.
            most_bytes: How large it may become.
        """
        left = most_bytes - len(page.encode())

        def put(place: re.Match[str]) -> str:
            nonlocal left
            found = _embedded(self._pictures[int(place[1])])
            if len(found) > left and found.startswith("<img"):
                name = self._pictures[int(place[1])].path.name
                found = _NOTE.format(f"{name} is left out to keep this page small; look at the file itself.")
            left -= len(found)
            return found

        return re.sub("\x00([0-9]+)\x00", put, page)


def _embedded(picture: _Picture) -> Markup:
    """A picture with its data, or a line that says why there is none."""
    from PIL import Image  # a page without pictures needs none

    try:
        encoded, width, height = _encoded(picture.path)
    except FileNotFoundError:
        return _NOTE.format(f"{picture.path.name} is not there.")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return _NOTE.format(shown(f"{picture.path.name} cannot be shown: {error}"))
    return _IMAGE.format(encoded, picture.words, width, height)


def _encoded(path: Path) -> tuple[str, int, int]:
    """A PNG file in base64 with few colours, and its width and height in the page, so that letters are of one size."""
    from PIL import Image  # as above

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
