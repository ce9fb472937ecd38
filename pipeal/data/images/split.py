"""Decoded images and their labels, as they lie in memory or in a mapped file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pipeal.core.errors import DataError

__all__ = ["ImageSplit"]


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Images and their labels.

    Pickled, a memory-mapped split is the path of its file: worker processes map it again and copy nothing.

    Attributes:
        pixels: ``(M, S, S, 3)`` RGB, everything that is stored; memory-mapped where it comes from a cache.
        labels: ``(N,)``, counted from 0.
        skipped: The paths of broken images that were left out.
        rows: ``(N,)``: which stored image each sample is; None where sample i is image i.
        file: The ``.npy`` file that ``pixels`` is the whole of, memory-mapped; None for an array in memory.
    """

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    skipped: tuple[str, ...] = ()
    rows: npt.NDArray[np.int64] | None = None
    file: Path | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> int:
        """The side of the square images, in pixels."""
        return self.pixels.shape[1]

    @property
    def fingerprint(self) -> str:
        """Tells splits apart: a check sum of the labels, of which stored images, and of a few of these."""
        check = crc32(np.ascontiguousarray(self.labels).view(np.uint8).data)
        if self.rows is not None:
            check = crc32(np.ascontiguousarray(self.rows).view(np.uint8).data, check)
        few = np.linspace(0, len(self) - 1, min(64, len(self))).astype(np.int64)
        return f"{crc32(self.images(few).tobytes(), check):08x}"

    def images(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """A copy of the images of those samples, ``(B, S, S, 3)``."""
        chosen = np.asarray(indices, dtype=np.int64)
        return np.asarray(self.pixels[chosen if self.rows is None else self.rows[chosen]])

    def subset(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> ImageSplit:
        """Those samples as a split of their own, over the same stored images.

        Raises:
            DataError: An index out of range.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise DataError(
                f"samples {chosen.min()}..{chosen.max()} of a split of {len(self)}; wanted 0..{len(self) - 1}"
            )
        return replace(self, labels=self.labels[chosen], rows=chosen if self.rows is None else self.rows[chosen])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({"pixels": None} if self.file else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        pixels = np.load(state["file"], mmap_mode="r") if state["file"] else state["pixels"]
        self.__dict__.update(state, pixels=pixels)
