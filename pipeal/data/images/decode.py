"""From an encoded image to the pixels that are kept: RGB, square, of one size."""

from __future__ import annotations

import io
import struct
import zlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

Pixels: TypeAlias = npt.NDArray[np.uint8]

MAX_PIXELS = 1 << 26
"""The most pixels an image may unfold to; a file of some bytes can claim any number."""


class BrokenImageError(Exception):
    """No image, or only a part of one; the message says in a few words what is wrong."""


# What Pillow raises on damaged files, beside OSError: its readers find the damage wherever they stand.
_DAMAGED = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, IndexError, KeyError, OverflowError),
    *(struct.error, zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning),
)


def decode(content: bytes, size: int) -> Pixels:
    """Decodes a JPEG or PNG file, whole, and brings it to ``(size, size, 3)``; see :func:`square`.

    An EXIF orientation is not followed: the pixels are taken as they are stored.

    Raises:
        BrokenImageError: Not an image, a truncated one, or one of more than :data:`MAX_PIXELS`.
    """
    if not content:
        raise BrokenImageError("the file is empty")
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
            _bounded(*image.size)
            image.load()
            return square(image, size)
    except UnidentifiedImageError as error:
        raise BrokenImageError("neither JPEG nor PNG") from error
    except _DAMAGED as error:
        raise BrokenImageError(" ".join(str(error).split()) or type(error).__name__) from error


def square(image: Image.Image, size: int) -> Pixels:
    """RGB pixels ``(size, size, 3)``: the shorter side is resized, then the centre is cut out.

    The pixels are those of torchvision's ``Resize(size)`` (bilinear, with antialiasing) and
    ``CenterCrop(size)``. An image whose shorter side fits already is not resized.
    """
    rgb = _rgb(image)
    width, height = rgb.size
    short = min(width, height)
    if short != size:
        # As torchvision rounds: the longer side towards nothing.
        width, height = (size if side == short else int(size * side / short) for side in (width, height))
        _bounded(width, height)
        rgb = rgb.resize((width, height), Image.Resampling.BILINEAR)
    if (width, height) != (size, size):
        left, top = round((width - size) / 2), round((height - size) / 2)
        rgb = rgb.crop((left, top, left + size, top + size))
    return np.asarray(rgb)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow would cut values above 255 off; the high byte is the picture.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info:
        # The same colours as straight to RGB, but without Pillow's warning about palettes.
        image = image.convert("RGBA")
    return image.convert("RGB")


def _bounded(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise BrokenImageError(f"{width} × {height} pixels, more than {MAX_PIXELS:,}")
