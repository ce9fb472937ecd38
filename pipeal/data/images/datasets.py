"""The image data sets by name, out of their published files or made on the spot.

A new one is a :class:`~pipeal.data.images.published.PublishedImages` in a file of its own, and a line in
:mod:`pipeal.core.names`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from pipeal.core.errors import DataError, check_named
from pipeal.core.names import VISION
from pipeal.data.checks import at_least
from pipeal.data.images.cache import Decoding, OnBroken, decoded
from pipeal.data.images.published import Colour, PublishedImages
from pipeal.data.images.split import ImageSplit
from pipeal.data.loading.download import Progress
from pipeal.data.loading.sources import Source, obtain

__all__ = ["IMAGE_DATASETS", "ImageDataset", "canonical_image_name", "load_images"]

IMAGE_DATASETS = tuple(VISION.datasets)
"""Their canonical names."""

canonical_image_name = VISION.dataset
"""The canonical name of a data set that is given in any spelling; :meth:`pipeal.core.names.Names.dataset`."""


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """A data set: its canonical name, the class names in label order, two splits, and its pixels' statistics.

    Attributes:
        name: See :meth:`pipeal.core.names.Names.dataset`.
        classes: The names.
        train: What to train on.
        test: What to test on.
        mean: Red, green and blue, of values in [0, 1].
        std: Their standard deviations.
    """

    name: str
    classes: tuple[str, ...]
    train: ImageSplit
    test: ImageSplit
    mean: Colour
    std: Colour


def load_images(
    name: str,
    root: Path | str | None = None,
    *,
    size: int = 32,
    download: bool = True,
    on_broken: OnBroken = "raise",
    cache: bool | Path | str = True,
    seed: int = 0,
    threads: int = 4,
    sources: Mapping[str, Collection[Source]] | None = None,
    progress: Progress | None = None,
    decoding: Progress | None = None,
) -> ImageDataset:
    """Loads a data set by any of its spellings.

    ``tinyimagenet`` is read out of ``tiny-imagenet-200.zip`` as it is, or the folder it unpacks to. ``cifar10`` and
    ``cifar100`` are read out of ``cifar-10-python.tar.gz`` or the folder it unpacks to, or of image files in
    ``{train,test}/<class>/``: ``cifar-10-images.zip`` or the folder ``cifar-10-images``. A zip, and what it unpacks
    to, may lie in ``root`` or in a folder of the same name there. What is missing is downloaded. ``toyimages`` is made
    on the spot.

    Images are decoded once, to RGB of ``size`` × ``size`` pixels (see :func:`pipeal.data.images.decode.square`), and
    kept as memory-mapped files.

    Args:
        name: See :meth:`pipeal.core.names.Names.dataset`.
        root: The folder of all data; ``data`` in the current one by default.
        size: The side of the square images, in pixels.
        download: Fetch the data set where it is missing.
        on_broken: What to do about a broken image: ``raise``, or ``skip`` it and keep its path in the split.
        cache: Whether decoded images are kept: in the user's cache folder, or in memory where that cannot be written
            to; a path for another folder; False to hold them in memory.
        seed: Of ``toyimages``.
        threads: How many decode.
        sources: Other addresses than the public ones, by canonical name.
        progress: Called during downloads, with bytes.
        decoding: Called while images are decoded, with images.

    Raises:
        DataError: An unknown name; files that are not to be had, with what to fetch and where to put it; a broken
            archive or image, with its path; a cache that cannot be written.
        ConfigError: A value out of range.
    """
    published: PublishedImages = VISION.load_dataset(name)
    size = at_least("size", size, 1)
    check_named("on_broken", on_broken, get_args(OnBroken))

    def tell(split: str, done: int, total: int | None) -> None:
        if decoding:
            decoding(f"{published.name} {split}", done, total)

    if published.make:
        data = published.make(size, seed)
    else:
        root = Path(root or "data")
        addresses = published.sources if sources is None else sources.get(published.name, ())
        form = published.found_in(root)
        if form is None:
            lacking = f"{published.name}: neither {' nor '.join(form.path for form in published.forms)} in {root}"
            files = [file for source in addresses for file in source.files]
            obtain(lacking, addresses, root / published.fetched_to, files, download=download, progress=progress)
            form = published.found_in(root)
            if form is None:
                raise DataError(f"{lacking}; put it there, or name another data root")
        path = root / form.path
        md5 = next((source.md5 for source in addresses if source.name == path.name), None)
        data = decoded(Decoding(path, partial(form.opened, path, md5), size, on_broken, threads, tell), cache)
    return ImageDataset(published.name, *data, published.mean, published.std)
