"""Image files and their classes, in a zip archive as it is or in a folder."""

from __future__ import annotations

import os
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TypeAlias

from pipeal.core.errors import DataError
from pipeal.data.images.decode import BrokenImageError, Pixels, decode

SUFFIXES = frozenset((".jpeg", ".jpg", ".png"))
"""What image files are called; case does not count."""


@dataclass(frozen=True)
class Listed:
    """The images of a split, not yet decoded.

    Attributes:
        paths: Their names in the archive or folder, for messages.
        labels: Their classes, counted from 0.
        pixels: Decodes image i to a size; raises BrokenImageError. May be called from several threads.
    """

    paths: Sequence[str]
    labels: Sequence[int]
    pixels: Callable[[int, int], Pixels]


@dataclass(frozen=True)
class Listing:
    """What a data set holds: the class names in label order, and two splits."""

    classes: tuple[str, ...]
    train: Listed
    test: Listed


class Files(ABC):
    """Files by their names relative to the data set's top folder, wherever they lie.

    Attributes:
        path: The archive or folder.
    """

    path: Path

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """All names, sorted; ``/`` between folders."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file; from any thread.

        Raises:
            BrokenImageError: It is not there, or damaged.
        """

    def close(self) -> None:
        """Gives up what is open."""
        return

    def text(self, name: str) -> list[str]:
        """The lines of a UTF-8 file.

        Raises:
            DataError: It cannot be read.
        """
        try:
            return self.read(name).decode("utf-8").splitlines()
        except (BrokenImageError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path}: cannot read {name} ({error}); fetch the data set again") from error


class ZipFiles(Files):
    """The members of a zip archive; nothing is extracted.

    Raises:
        DataError: It cannot be opened, or is no zip archive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise DataError(f"{path}: broken archive ({error}); delete it and fetch it again") from error
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        # The Finder adds a folder of its own with one shadow per file.
        members = [name for name in self._zip.namelist() if not name.startswith("__MACOSX/")]
        self._members = _below_top([name for name in members if _is_plain(name)])

    @property
    def names(self) -> Sequence[str]:
        """The names of the members."""
        return sorted(self._members)

    def read(self, name: str) -> bytes:
        """Unpacks a member."""
        try:
            return self._zip.read(self._members[name])
        except KeyError:
            raise BrokenImageError("no such file in the archive") from None
        # RuntimeError: an encrypted member; NotImplementedError: packed in a way Python does not know.
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as error:
            raise BrokenImageError(str(error)) from error

    def close(self) -> None:
        """Closes the archive."""
        self._zip.close()


class FolderFiles(Files):
    """The files under a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names = sorted(_walk(path))

    @property
    def names(self) -> Sequence[str]:
        """The names of the files."""
        return self._names

    def read(self, name: str) -> bytes:
        """Reads a file."""
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise BrokenImageError(error.strerror or str(error)) from error


def open_files(path: Path) -> Files:
    """A folder's files, or an archive's."""
    return FolderFiles(path) if path.is_dir() else ZipFiles(path)


def fingerprint(path: Path) -> str:
    """Differs once an archive, or any file under a folder, has another size, time of change or name.

    Raises:
        DataError: It cannot be read.
    """
    found = blake2b(digest_size=8)
    try:
        names = sorted(_walk(path)) if path.is_dir() else [""]
        for name in names:
            stat = (path / name).stat()
            found.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return found.hexdigest()


Layout: TypeAlias = Callable[[Files], Listing]
"""Finds the classes and images among files."""


def class_folders(files: Files) -> Listing:
    """``train/<class>/*.jpg`` and ``test/<class>/*.jpg`` (or png); the classes are the sorted folder names.

    Raises:
        DataError: A split without images, or a test class that has no training images.
    """
    found: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
    for name in files.names:
        split, *folders, _ = PurePosixPath(name).parts if "/" in name else ("", "")
        if split in found and len(folders) == 1 and _is_image(name):
            found[split].append((name, folders[0]))
    wanted = "wanted train/<class>/*.jpg and test/<class>/*.jpg (or .png)"
    for split, pairs in found.items():
        if not pairs:
            raise DataError(f"{files.path}: no images under {split}/<class>/; {wanted}")
    classes = tuple(sorted({label for _, label in found["train"]}))
    strange = sorted({label for _, label in found["test"]} - set(classes))
    if strange:
        raise DataError(f"{files.path}: test/{strange[0]} has no images under train/{strange[0]}; {wanted}")
    number = {name: label for label, name in enumerate(classes)}
    return Listing(classes, *(_listed(files, pairs, number) for pairs in found.values()))


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
        if len(parts) == 4 and parts[0] == "train" and parts[2] == "images" and _is_image(name):
            train.append((name, parts[1]))
        elif len(parts) == 3 and parts[:2] == ("val", "images") and _is_image(name):
            flat.add(name)
    if not train:
        raise DataError(f"{files.path}: no images under train/<wnid>/images/; is it Tiny-ImageNet-200?")
    if _ANNOTATIONS not in files.names:
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
    return Listing(
        _class_names(files, list(number)), _listed(files, train, number), _listed(files, list(test.items()), number)
    )


def _class_names(files: Files, wnids: Sequence[str]) -> tuple[str, ...]:
    if "words.txt" not in files.names:
        return tuple(wnids)
    words = dict(line.split("\t", 1) for line in files.text("words.txt") if "\t" in line)
    names = [words.get(wnid, wnid).split(",")[0].strip() for wnid in wnids]
    # Two classes may share a name (there are two cranes in ImageNet); then the wnid tells them apart.
    return tuple(
        name if names.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True)
    )


def _listed(files: Files, pairs: Sequence[tuple[str, str]], number: Mapping[str, int]) -> Listed:
    names = [name for name, _ in pairs]
    return Listed(names, [number[label] for _, label in pairs], partial(_pixels, files, names))


def _pixels(files: Files, names: Sequence[str], index: int, size: int) -> Pixels:
    return decode(files.read(names[index]), size)


def _walk(folder: Path) -> list[str]:
    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    return [
        name
        for where, _, files in os.walk(folder, onerror=refuse)
        for file in files
        if _is_plain(name := (Path(where) / file).relative_to(folder).as_posix())
    ]


def _is_plain(name: str) -> bool:
    return not name.endswith("/") and not PurePosixPath(name).name.startswith(".")


def _is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def _below_top(names: Sequence[str]) -> dict[str, str]:
    """The members by their names without the one folder that holds them all, if one does."""
    tops = {name.split("/", 1)[0] if "/" in name else "" for name in names}
    top = tops.pop() + "/" if len(tops) == 1 else ""
    return {name.removeprefix(top): name for name in names}
