"""CIFAR-10 and CIFAR-100 in their published Python form, read by torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeal.core.errors import DataError
from pipeal.data.images.decode import Pixels, square
from pipeal.data.images.files import Listed, Listing, class_folders
from pipeal.data.images.published import Colour, Form, PublishedImages, zip_or_folder
from pipeal.data.loading.download import verify
from pipeal.data.loading.sources import Source, unpack_members


@contextmanager
def _opened(classes: int, path: Path, md5: str | None) -> Iterator[Listing]:
    """Reads the published archive, or the folder that unpacking it gives.

    The files are pickles, which can run any program: an archive of another MD5 is refused, and so is a file.

    Args:
        classes: 10 or 100.
        path: ``cifar-10-python.tar.gz`` or ``cifar-10-batches-py``; the same for CIFAR-100.
        md5: Of the archive.

    Raises:
        DataError: Something is missing or has another checksum.
    """
    # Not with the module: torchvision takes a second to import, which a run on texts has no use for.
    from torchvision import datasets

    reader = getattr(datasets, f"CIFAR{classes}")
    if path.is_dir():
        yield _read(reader, path.parent, path)
        return
    verify(path, md5=md5)
    files = [file for file, _ in (*reader.train_list, *reader.test_list)] + [reader.meta["filename"]]
    # Unpacked for as long as it takes to read: what is kept of them is the cache of pixels.
    try:
        with TemporaryDirectory(prefix="pipeal-") as aside:
            unpack_members(path, Path(aside) / reader.base_folder, files)
            listing = _read(reader, Path(aside), path)
    except OSError as error:
        raise DataError(f"{path}: cannot unpack it for reading ({error}); make room in the folder TMPDIR") from error
    yield listing


def _read(reader: Any, root: Path, path: Path) -> Listing:
    from torchvision.datasets.utils import check_integrity

    try:
        train, test = (reader(root, train=part, download=False) for part in (True, False))
    except RuntimeError as error:
        wanted = [*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])]
        bad = [file for file, md5 in wanted if not check_integrity(root / reader.base_folder / file, md5)]
        raise DataError(
            f"{path}: {', '.join(bad)} missing or not as published; delete the folder and fetch {reader.filename} again"
        ) from error
    return Listing(tuple(train.classes), _listed(train, "train"), _listed(test, "test"))


def _listed(data: Any, split: str) -> Listed:
    images: npt.NDArray[np.uint8] = data.data

    def pixels(index: int, size: int) -> Pixels:
        return square(Image.fromarray(images[index]), size)

    return Listed([f"{split}/{index}" for index in range(len(images))], data.targets, pixels)


def _published(classes: int, folder: str, md5: str, mean: Colour, std: Colour) -> PublishedImages:
    archive, opened = f"cifar-{classes}-python.tar.gz", partial(_opened, classes)
    return PublishedImages(
        name=f"cifar{classes}",
        mean=mean,
        std=std,
        # The archive stays as it is, and is read as it is. Checksums as torchvision lists them.
        sources=(Source(f"https://www.cs.toronto.edu/~kriz/{archive}", md5),),
        forms=(
            Form(f"{folder}/", Path.is_dir, opened),
            Form(archive, Path.is_file, opened),
            *zip_or_folder(f"cifar-{classes}-images", class_folders),
        ),
    )


CIFAR10 = _published(
    10,
    "cifar-10-batches-py",
    "c58f30108f718f92721af3b95e74349a",
    (0.4914, 0.4822, 0.4465),
    (0.2023, 0.1994, 0.2010),
)
CIFAR100 = _published(
    100,
    "cifar-100-python",
    "eb9058c3a382ffc7106e4002c42a8d85",
    (0.5071, 0.4867, 0.4408),
    (0.2675, 0.2565, 0.2761),
)
