"""Tiny-ImageNet-200: 100,000 images of 200 classes to train on, 10,000 to test on, of 64 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from pipeal.core.errors import DataError
from pipeal.data.images.files import Files, Listing, is_image
from pipeal.data.images.published import PublishedImages, zip_or_folder
from pipeal.data.loading.sources import Source

_ANNOTATIONS = "val/val_annotations.txt"


def tiny_imagenet(files: Files) -> Listing:
    """``train/<wnid>/images/*.JPEG``, and the flat ``val/images`` that ``val/val_annotations.txt`` sorts.

    The validation images are the test split: the published test images have no labels. The classes are the
    sorted wnids, by their first name in ``words.txt`` where there is one.

    Raises:
        DataError: No images, no annotations, or annotations that do not fit the images.
    """
    train: list[tuple[str, str]] = []
    flat: set[str] = set()
    for name in files.names:
        parts = PurePosixPath(name).parts
        if len(parts) == 4 and parts[0] == "train" and parts[2] == "images" and is_image(name):
            train.append((name, parts[1]))
        elif len(parts) == 3 and parts[:2] == ("val", "images") and is_image(name):
            flat.add(name)
    if not train:
        raise DataError(f"{files.path}: no images under train/<wnid>/images/; is it Tiny-ImageNet-200?")
    if _ANNOTATIONS not in files.members:
        raise DataError(
            f"{files.path}: no {_ANNOTATIONS}, which tells the classes of the images in val/images; "
            "put it there or fetch the data set again"
        )
    number = {wnid: label for label, wnid in enumerate(sorted({wnid for _, wnid in train}))}
    test: dict[str, str] = {}
    for line, text in enumerate(files.text(_ANNOTATIONS), start=1):
        if not text.strip():
            continue
        image, wnid = (*text.split("\t"), "")[:2]
        if wnid not in number:
            raise DataError(
                f"{files.path}, {_ANNOTATIONS}, line {line}: class {wnid!r} of {image!r} has no images under train/; "
                "fetch the data set again"
            )
        if test.setdefault(f"val/images/{image}", wnid) != wnid:
            raise DataError(
                f"{files.path}, {_ANNOTATIONS}, line {line}: {image!r} has two classes, {wnid!r} and "
                f"{test[f'val/images/{image}']!r}; fetch the data set again"
            )
    unknown = sorted(flat - set(test))
    if unknown or not test:
        left = f"nothing of {unknown[0]}" if unknown else "nothing"
        raise DataError(f"{files.path}: {_ANNOTATIONS} says {left}; wanted a line for each image in val/images")
    return Listing(_class_names(files, list(number)), files.listed(train, number), files.listed(test.items(), number))


def _class_names(files: Files, wnids: Sequence[str]) -> tuple[str, ...]:
    if "words.txt" not in files.members:
        return tuple(wnids)
    words = dict(line.split("\t", 1) for line in files.text("words.txt") if "\t" in line)
    names = [words.get(wnid, wnid).split(",")[0].strip() for wnid in wnids]
    # Two classes may share a name (there are two cranes in ImageNet); then the wnid tells them apart.
    return tuple(
        name if names.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True)
    )


TINYIMAGENET = PublishedImages(
    name="tinyimagenet",
    mean=(0.4802, 0.4481, 0.3975),
    std=(0.2770, 0.2691, 0.2821),
    # The archive stays as it is, and is read as it is. Checksum as common loaders list it.
    sources=(Source("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
    fetched_to="tiny-imagenet-200",
    forms=zip_or_folder("tiny-imagenet-200", tiny_imagenet),
)
