"""``toyimages``: eight kinds of coloured figures, for demonstrations and tests without any download."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeal.data.images.published import PublishedImages
from pipeal.data.images.split import ImageSplit

CLASSES = ("disc", "ring", "square", "frame", "plus", "bars", "columns", "checks")

TRAIN_IMAGES = 2_000
TEST_IMAGES = 500

_NOISE = 0.15
_HUE_SPREAD = 0.12
"""How far, as a share of the circle, hues of one class lie apart; the classes' own are 1/8 apart."""


def toyimages(size: int, seed: int) -> tuple[tuple[str, ...], ImageSplit, ImageSplit]:
    """Makes the data set: class names, train split, test split.

    Place, extent, hue and ground differ from image to image, and noise lies over all; neither the figure nor
    the hue alone tells every class.

    Args:
        size: The side, in pixels.
        seed: Decides every pixel.
    """
    random = np.random.default_rng((seed, 0x70_79_69_6D))
    return CLASSES, _split(random, TRAIN_IMAGES, size), _split(random, TEST_IMAGES, size)


def _split(random: np.random.Generator, count: int, size: int) -> ImageSplit:
    labels = random.integers(len(CLASSES), size=count)
    masks = _figures(random, labels, size)[..., None]
    hues = (labels / len(CLASSES) + random.normal(0, _HUE_SPREAD, count)) % 1
    ink = _colours(hues, random.uniform(0.5, 1, count))
    ground = random.uniform(0.1, 0.6, (count, 1, 1, 3)).astype(np.float32)
    images = ground + masks * (ink[:, None, None, :] - ground)
    images += random.normal(0, _NOISE, images.shape).astype(np.float32)
    return ImageSplit((images.clip(0, 1) * 255).astype(np.uint8), labels)


def _figures(random: np.random.Generator, labels: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.float32]:
    """``(N, S, S)``: 1 where the figure is, 0 elsewhere."""
    count = len(labels)
    grid = (np.arange(size, dtype=np.float32) + 0.5) / size
    centre = random.uniform(0.35, 0.65, (2, count, 1, 1)).astype(np.float32)
    reach = random.uniform(0.2, 0.35, (count, 1, 1)).astype(np.float32)
    y, x = (grid[None, :, None] - centre[0]) / reach, (grid[None, None, :] - centre[1]) / reach
    far, edge = np.hypot(y, x), np.maximum(abs(y), abs(x))
    inside = edge < 1
    even_y, even_x = np.floor(2.5 * y) % 2 == 0, np.floor(2.5 * x) % 2 == 0
    figures = (
        far < 1,
        (far < 1) & (far > 0.55),
        inside,
        inside & (edge > 0.55),
        inside & (np.minimum(abs(y), abs(x)) < 0.3),
        inside & even_y,
        inside & even_x,
        inside & (even_y == even_x),
    )
    return np.select([(labels == kind)[:, None, None] for kind in range(len(CLASSES))], figures).astype(np.float32)


def _colours(hues: npt.NDArray[np.float64], value: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """``(N, 3)`` RGB of fully saturated hues."""
    part = (np.array([5, 3, 1]) + 6 * hues[:, None]) % 6
    return (value[:, None] * (1 - np.clip(np.minimum(part, 4 - part), 0, 1))).astype(np.float32)


TOYIMAGES = PublishedImages(
    name="toyimages",
    mean=(0.5, 0.5, 0.5),
    std=(0.25, 0.25, 0.25),
    make=toyimages,
)
