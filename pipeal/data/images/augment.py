"""What training images go through, a whole batch at once, with randomness that belongs to the sample.

``none`` scales to [0, 1] and normalises. ``basic`` cuts each image out of its copy with 4 pixels of zeros around,
and mirrors every second one. ``strong`` further changes brightness, contrast, saturation and hue, in random order,
of 4 in 5 images, and takes the colour from 1 in 5. The operations and ranges are those of torchvision's
``RandomCrop(S, padding=4)``, ``RandomHorizontalFlip``, ``RandomApply([ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8)``
and ``RandomGrayscale(p=0.2)`` in ``transforms.v2``; colours are changed in float, after the scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeal.core.names import Augmentation
from pipeal.core.rng import key_seed
from pipeal.data.images.decode import Pixels

__all__ = ["Augment"]

Floats: TypeAlias = npt.NDArray[np.float32]

PADDING = 4
JITTERED = 0.8
GREYED = 0.2
BRIGHTNESS = CONTRAST = SATURATION = (0.6, 1.4)
HUE = (-0.1, 0.1)

_ORDERS = np.array(list(permutations(range(4))))
_DRAWS = 10
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class Draws:
    """What was drawn for each of B samples; every array is ``(B,)`` unless said.

    Attributes:
        top: First row of the cut out of the padded image, 0 to 8.
        left: First column.
        flip: Whether the cut is mirrored, left to right.
        jitter: Whether the colours change.
        order: ``(B, 4)``: in which order; 0 brightness, 1 contrast, 2 saturation, 3 hue.
        factors: ``(B, 4)`` float32: by how much each.
        grey: Whether the colour is taken away.
    """

    top: npt.NDArray[np.int64]
    left: npt.NDArray[np.int64]
    flip: npt.NDArray[np.bool_]
    jitter: npt.NDArray[np.bool_]
    order: npt.NDArray[np.int64]
    factors: Floats
    grey: npt.NDArray[np.bool_]


def draw(seed: int, epoch: int, indices: Sequence[int] | npt.NDArray[np.int64]) -> Draws:
    """Draws for the samples with those indices; a sample's draws depend on (seed, epoch, index) alone."""
    u = _uniform(key_seed(seed, epoch), np.asarray(indices, dtype=np.uint64), _DRAWS)
    places = (u[:, :2] * (2 * PADDING + 1)).astype(np.int64)
    ranges = np.array([BRIGHTNESS, CONTRAST, SATURATION, HUE])
    factors = ranges[:, 0] + u[:, 4:8] * (ranges[:, 1] - ranges[:, 0])
    return Draws(
        top=places[:, 0],
        left=places[:, 1],
        flip=u[:, 2] < 0.5,
        jitter=u[:, 3] < JITTERED,
        order=_ORDERS[(u[:, 8] * len(_ORDERS)).astype(np.int64)],
        factors=factors.astype(np.float32),
        grey=u[:, 9] < GREYED,
    )


def crop_flip(pixels: Pixels, draws: Draws) -> Pixels:
    """Cuts ``(B, S, S, 3)`` images out of themselves with a border of zeros, and mirrors some."""
    count, side = pixels.shape[:2]
    padded = np.zeros((count, side + 2 * PADDING, side + 2 * PADDING, 3), np.uint8)
    padded[:, PADDING:-PADDING, PADDING:-PADDING] = pixels
    # All places a cut can begin at, as a view; picking one per image copies whole rows.
    windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(1, 2)).transpose(0, 1, 2, 4, 5, 3)
    cut: Pixels = windows[np.arange(count), draws.top, draws.left]
    cut[draws.flip] = cut[draws.flip, :, ::-1]
    return cut


def jitter(images: Floats, draws: Draws) -> None:
    """Changes the colours of ``(B, 3, S, S)`` images in [0, 1], in place."""
    for turn in range(4):
        for kind, change in enumerate(_CHANGES):
            chosen = np.flatnonzero(draws.jitter & (draws.order[:, turn] == kind))
            if chosen.size:
                images[chosen] = change(images[chosen], draws.factors[chosen, kind, None, None])
    images[draws.grey] = _grey(images[draws.grey])[:, None]


class Augment:
    """Makes ``(B, 3, S, S)`` float32 batches out of ``(B, S, S, 3)`` pixels.

    All in NumPy, on the calling thread: small operators gain nothing from PyTorch's intra-op threads, lose much where
    these wait for a busy core, and might sum in another order for another number of them.

    Args:
        kind: See the module.
        mean: Per channel, of values in [0, 1]; taken away last.
        std: Divided by.
        seed: Of all draws.
        channels_last: Lay the batch out channel by channel (``torch.channels_last``).
    """

    def __init__(
        self,
        kind: Augmentation,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int = 0,
        channels_last: bool = False,
    ) -> None:
        self.kind = kind
        self.seed = seed
        self.channels_last = channels_last
        # (v - mean) / std as one product and one sum.
        self._scale = 1 / np.array(std, np.float64)
        self._shift = -np.array(mean, np.float64) * self._scale

    def __call__(self, pixels: Pixels, epoch: int, indices: Sequence[int]) -> Tensor:
        """Augments the images of the samples ``indices`` as it is their turn in this epoch."""
        if self.kind == "none":
            return self._from_pixels(pixels)
        draws = draw(self.seed, epoch, indices)
        cut = crop_flip(pixels, draws)
        if self.kind == "basic":
            return self._from_pixels(cut)
        images = np.ascontiguousarray(cut.transpose(0, 3, 1, 2)).astype(np.float32)
        images /= 255
        jitter(images, draws)
        _scale_rows(images.reshape(*images.shape[:2], -1), self._scale[:, None], self._shift[:, None])
        if self.channels_last:
            return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return torch.from_numpy(images)

    def _from_pixels(self, pixels: Pixels) -> Tensor:
        count, side = pixels.shape[:2]
        scale = self._scale / 255
        if self.channels_last:
            # Whole rows at once: three channels are too short a loop.
            rows = pixels.reshape(count, side, side * 3).astype(np.float32)
            _scale_rows(rows, np.tile(scale, side), np.tile(self._shift, side))
            return torch.from_numpy(rows.reshape(count, side, side, 3)).permute(0, 3, 1, 2)
        # Turned while they are bytes: a quarter of the traffic.
        images = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).astype(np.float32)
        _scale_rows(images.reshape(count, 3, side * side), scale[:, None], self._shift[:, None])
        return torch.from_numpy(images)


def _scale_rows(values: Floats, scale: npt.NDArray[np.float64], shift: npt.NDArray[np.float64]) -> None:
    values *= scale.astype(np.float32)
    values += shift.astype(np.float32)


def _brightness(images: Floats, factor: Floats) -> Floats:
    return np.clip(images * factor[..., None], 0, 1)


def _contrast(images: Floats, factor: Floats) -> Floats:
    return _blend(images, _grey(images).mean((1, 2))[:, None, None], factor)


def _saturation(images: Floats, factor: Floats) -> Floats:
    return _blend(images, _grey(images), factor)


def _hue(images: Floats, factor: Floats) -> Floats:
    """Turns the hue by a share of the circle, by way of HSV: https://en.wikipedia.org/wiki/HSL_and_HSV."""
    r, g, b = images[:, 0], images[:, 1], images[:, 2]
    value = np.maximum(np.maximum(r, g), b)
    chroma = value - np.minimum(np.minimum(r, g), b)
    safe = np.where(chroma > 0, chroma, np.float32(1))
    # In sixths of the circle, from red; greys have no hue, and none is made up for them.
    sixths = np.where(value == r, (g - b) / safe, np.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe))
    sixths += 6 * factor
    turned = np.empty_like(images)
    for channel, offset in enumerate((5, 3, 1)):
        part = sixths + np.float32(offset)
        part -= 6 * np.floor(part / 6)
        turned[:, channel] = value - chroma * np.clip(np.minimum(part, 4 - part), 0, 1)
    return turned


def _grey(images: Floats) -> Floats:
    """``(B, S, S)``: the luma of ITU-R BT.601, with the coefficients that torchvision has."""
    grey: Floats = images[:, 0] * np.float32(0.2989)
    grey += images[:, 1] * np.float32(0.587)
    grey += images[:, 2] * np.float32(0.114)
    return grey


def _blend(images: Floats, other: Floats, share: Floats) -> Floats:
    """``share`` of the images and the rest of ``other``, ``(B, S, S)``."""
    blended = images * share[..., None]
    blended += (other * (1 - share))[:, None]
    return np.clip(blended, 0, 1, out=blended)


_CHANGES: tuple[Callable[[Floats, Floats], Floats], ...] = (_brightness, _contrast, _saturation, _hue)


def _uniform(key: int, indices: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.float64]:
    """``(B, count)`` numbers in [0, 1): numbers ``index × count`` and on of the SplitMix64 sequence of a key.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    steps = indices[:, None] * np.uint64(count) + np.arange(1, count + 1, dtype=np.uint64)
    z: npt.NDArray[np.uint64] = np.add(steps * np.uint64(_GOLDEN), np.uint64(key), dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
