"""The image data sets by name, out of their published files or made on the spot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from pipeal.core.errors import ConfigError, DataError
from pipeal.core.names import VISION
from pipeal.data.images import toyimages
from pipeal.data.images.cache import Decoded, OnBroken, cached, in_memory
from pipeal.data.images.cifar import cifar
from pipeal.data.images.files import Layout, Listing, class_folders, open_files, tiny_imagenet
from pipeal.data.images.split import ImageSplit
from pipeal.data.loading.cache_folder import CacheError, cache_folder
from pipeal.data.loading.download import Progress
from pipeal.data.loading.sources import SOURCES, Source, fetch

__all__ = ["IMAGE_DATASETS", "ImageDataset", "canonical_image_name", "load_images"]

IMAGE_DATASETS = VISION.datasets
canonical_image_name = VISION.dataset

_log = logging.getLogger(__name__)

Colour: TypeAlias = tuple[float, float, float]


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


@dataclass(frozen=True)
class _Published:
    """Where a published data set may lie under the data root, first come first, and its statistics."""

    forms: tuple[tuple[str, Layout | None], ...]  # no layout: the published Python form of CIFAR
    fetched_to: str
    mean: Colour
    std: Colour


_PUBLISHED = {
    "tinyimagenet": _Published(
        (
            ("tiny-imagenet-200/tiny-imagenet-200.zip", tiny_imagenet),
            ("tiny-imagenet-200.zip", tiny_imagenet),
            ("tiny-imagenet-200/tiny-imagenet-200/", tiny_imagenet),
            ("tiny-imagenet-200/", tiny_imagenet),
        ),
        "tiny-imagenet-200",
        (0.4802, 0.4481, 0.3975),
        (0.2770, 0.2691, 0.2821),
    ),
    **{
        f"cifar{classes}": _Published(
            (
                (f"{python}/", None),
                (f"cifar-{classes}-python.tar.gz", None),
                (f"cifar-{classes}-images/cifar-{classes}-images.zip", class_folders),
                (f"cifar-{classes}-images.zip", class_folders),
                (f"cifar-{classes}-images/cifar-{classes}-images/", class_folders),
                (f"cifar-{classes}-images/", class_folders),
            ),
            "",
            mean,
            std,
        )
        for classes, python, mean, std in (
            (10, "cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
            (100, "cifar-100-python", (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        )
    },
}


def load_images(
    name: str,
    root: Path | None = None,
    *,
    size: int = 32,
    download: bool = True,
    on_broken: OnBroken = "raise",
    cache: bool | Path = True,
    seed: int = 0,
    threads: int = 4,
    sources: Mapping[str, Collection[Source]] = SOURCES,
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
        sources: The public addresses, by canonical name.
        progress: Called during downloads, with bytes.
        decoding: Called while images are decoded, with images.

    Raises:
        DataError: An unknown name; files that are not to be had, with what to fetch and where to put it; a broken
            archive or image, with its path; a cache that cannot be written.
        ConfigError: A value out of range.
    """
    known = VISION.dataset(name)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"size is {size!r}; wanted a whole number of pixels, at least 1")
    if on_broken not in ("raise", "skip"):
        raise ConfigError(f"on_broken is {on_broken!r}; wanted 'raise' or 'skip'")
    if known == "toyimages":
        return ImageDataset(known, toyimages.CLASSES, *toyimages.toyimages(size, seed), toyimages.MEAN, toyimages.STD)
    published, addresses = _PUBLISHED[known], sources.get(known, ())
    root = root or Path("data")
    found = _find(published, root)
    if found is None and download and addresses:
        fetch(addresses, root / published.fetched_to, [file for source in addresses for file in source.files], progress)
        found = _find(published, root)
    if found is None:
        raise DataError(_how_to_get(known, root, addresses))

    def tell(split: str, done: int, total: int | None) -> None:
        if decoding:
            decoding(f"{known} {split}", done, total)

    path, layout = found
    opened = partial(cifar, known, path, _md5(addresses, path)) if layout is None else partial(_listing, path, layout)
    decoded = _decoded(opened, path, cache, size, on_broken, threads, tell)
    return ImageDataset(known, decoded.classes, decoded.train, decoded.test, published.mean, published.std)


def _decoded(
    opened: Callable[[], AbstractContextManager[Listing]],
    path: Path,
    cache: bool | Path,
    size: int,
    on_broken: OnBroken,
    threads: int,
    tell: Progress,
) -> Decoded:
    if cache is not False:
        try:
            folder = cache_folder() / "images" if cache is True else cache
            return cached(opened, path, folder, size=size, on_broken=on_broken, threads=threads, tell=tell)
        except CacheError as error:
            if cache is not True:
                raise
            _log.warning(f"decoded images are kept in memory alone: {error}")
    with opened() as listing:
        return in_memory(listing, path, size, on_broken, threads, tell)


def _find(published: _Published, root: Path) -> tuple[Path, Layout | None] | None:
    for form, layout in published.forms:
        path = root / form
        # A folder that holds no folder holds no images: an archive's own, before the archive is there.
        if _is_data_folder(path, layout) if form.endswith("/") else path.is_file():
            return path, layout
    return None


def _is_data_folder(path: Path, layout: Layout | None) -> bool:
    return path.is_dir() and (layout is None or (path / "train").is_dir())


def _how_to_get(name: str, root: Path, sources: Collection[Source]) -> str:
    published = _PUBLISHED[name]
    forms = " nor ".join(form for form, _ in published.forms)
    urls = [source.url for source in sources]
    what = f"fetch {' and '.join(urls)}, and put it into {root / published.fetched_to}" if urls else "put one there"
    return f"{name}: neither {forms} in {root}; {what}, or name another data root"


def _md5(sources: Collection[Source], path: Path) -> str | None:
    return next((source.md5 for source in sources if source.name == path.name), None)


@contextmanager
def _listing(path: Path, layout: Layout) -> Iterator[Listing]:
    with open_files(path) as files:
        yield layout(files)
