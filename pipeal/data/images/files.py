"""Image files and their classes, in a zip archive as it is or in a folder."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath

from pipeal.core.errors import DataError, refusals_told
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


@dataclass(frozen=True)
class Files:
    """Files by their names relative to the data set's top folder, wherever they lie.

    Attributes:
        path: The archive or folder.
        members: What ``content`` knows each by.
        content: Reads one; may be called from several threads.
    """

    path: Path
    members: Mapping[str, str]
    content: Callable[[str], bytes]

    @property
    def names(self) -> Sequence[str]:
        """All names, sorted; ``/`` between folders."""
        return sorted(self.members)

    def read(self, name: str) -> bytes:
        """The content of a file; from any thread.

        Raises:
            BrokenImageError: It is not there, or damaged.
        """
        try:
            return self.content(self.members[name])
        except KeyError:
            raise BrokenImageError("no such file") from None
        # RuntimeError: an encrypted member; NotImplementedError: packed in a way Python does not know.
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as error:
            raise BrokenImageError(getattr(error, "strerror", None) or str(error)) from error

    def text(self, name: str) -> list[str]:
        """The lines of a UTF-8 file.

        Raises:
            DataError: It cannot be read.
        """
        try:
            return self.read(name).decode("utf-8").splitlines()
        except (BrokenImageError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path}: cannot read {name} ({error}); fetch the data set again") from error

    def listed(self, images: Collection[tuple[str, str]], number: Mapping[str, int]) -> Listed:
        """A split of these files, each with the name of its class.

        Args:
            images: The names of the files and of their classes.
            number: The classes' numbers.
        """
        names = [name for name, _ in images]
        labels = [number[label] for _, label in images]
        return Listed(names, labels, lambda index, size: decode(self.read(names[index]), size))


@contextmanager
def open_files(path: Path) -> Iterator[Files]:
    """The files under a folder, or the members of a zip archive, of which nothing is extracted.

    Raises:
        DataError: It cannot be read, or is no zip archive.
    """
    if path.is_dir():
        yield Files(path, {name: name for name in _walk(path)}, lambda name: (path / name).read_bytes())
        return
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise DataError(f"{path}: broken archive ({error}); delete it and fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    with archive:
        # The Finder adds a folder of its own with one shadow per file.
        members = [name for name in archive.namelist() if not name.startswith("__MACOSX/")]
        yield Files(path, _below_top([name for name in members if _is_plain(name)]), archive.read)


def fingerprint(path: Path) -> str:
    """Differs once an archive, or any file under a folder, has another size, time of change or name.

    A link to what is not there counts as itself: whether it is an image that is missing shows in decoding.

    Raises:
        DataError: It cannot be read.
    """
    found = blake2b(digest_size=8)
    with refusals_told(f"cannot read {path}"):
        names = sorted(_walk(path)) if path.is_dir() else [""]
        for name in names:
            stat = _stat(path / name)
            found.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def class_folders(files: Files) -> Listing:
    """``train/<class>/*.jpg`` and ``test/<class>/*.jpg`` (or png); the classes are the sorted folder names.

    Raises:
        DataError: A split without images, or a test class that has no training images.
    """
    found: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
    for name in files.names:
        split, *folders, _ = PurePosixPath(name).parts if "/" in name else ("", "")
        if split in found and len(folders) == 1 and is_image(name):
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
    return Listing(classes, *(files.listed(pairs, number) for pairs in found.values()))


def _walk(folder: Path) -> list[str]:
    """The files below a folder. Links to folders are followed, but not to one that is already being walked through."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    names = []
    around = {str(folder): frozenset((os.path.realpath(folder),))}
    for where, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        names += [(Path(where) / file).relative_to(folder).as_posix() for file in files]
        here, inner = around.pop(where), {name: os.path.realpath(os.path.join(where, name)) for name in folders}
        folders[:] = [name for name, real in inner.items() if _is_plain(name) and real not in here]
        around |= {os.path.join(where, name): here | {inner[name]} for name in folders}
    return [name for name in names if _is_plain(name)]


def _is_plain(name: str) -> bool:
    """Whether it is a file, and neither it nor a folder that it is in is hidden."""
    return not name.endswith("/") and not any(part.startswith(".") for part in PurePosixPath(name).parts)


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError:  # what it leads to is not there, or is itself
        return file.lstat()


def is_image(name: str) -> bool:
    """Whether a file is called as images are."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def _below_top(names: Sequence[str]) -> dict[str, str]:
    """The members by their names without the one folder that holds them all, if one does."""
    tops = {name.split("/", 1)[0] if "/" in name else "" for name in names}
    top = tops.pop() + "/" if len(tops) == 1 else ""
    return {name.removeprefix(top): name for name in names}
