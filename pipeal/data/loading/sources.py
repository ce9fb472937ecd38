"""Published data sets: their names, their files on the network, and how these come into a folder."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from pipeal.core.atomic import replacing
from pipeal.core.errors import DataError
from pipeal.core.lock import in_turn
from pipeal.data.loading import download as network
from pipeal.data.loading.download import Progress

__all__ = ["Source", "unpack_members"]

Unpack: TypeAlias = Callable[[Path, Path, Collection[str]], None]
"""Takes an archive, a folder and the names of the files to make there."""


@dataclass(frozen=True)
class Source:
    """One file on the network and the data files it gives.

    Attributes:
        url: Its address.
        md5: Its wanted MD5; None accepts any.
        files: The names of the data files it gives; by default the file itself, under its own name.
        unpack: Makes them out of an archive; None where the file itself is the one data file.
    """

    url: str
    md5: str | None
    files: tuple[str, ...] = ()
    unpack: Unpack | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", self.files or (self.url.rsplit("/", 1)[-1],))

    @property
    def name(self) -> str:
        """The name under which it lies in the data folder."""
        return self.url.rsplit("/", 1)[-1] if self.unpack else self.files[0]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A data set, as far as texts and images have it in common.

    Attributes:
        name: Its canonical name: small letters and digits.
        sources: Where its files can be fetched.
    """

    name: str
    sources: tuple[Source, ...] = ()


def obtain(
    lacking: str,
    sources: Collection[Source],
    folder: Path,
    missing: Collection[str],
    *,
    download: bool,
    progress: Progress | None,
) -> None:
    """Makes the missing files in ``folder``: out of archives that lie there, and stay, else from the network.

    Args:
        lacking: What a message begins with: which files are nowhere to be found.
        sources: Where they can be fetched.
        folder: Where they go.
        missing: Their names.
        download: Whether to fetch what no archive holds.
        progress: Called during downloads.

    Raises:
        DataError: They are not to be had, with what to fetch; an archive with another checksum, or a broken one; or
            what :func:`pipeal.data.loading.download.download` raises, with what to do by hand.
    """
    for source in sources:
        archive, files = folder / source.name, [name for name in source.files if name in missing]
        if files and source.unpack and archive.is_file():
            # In turn: another process may have fetched it, and removes it once it is unpacked.
            with in_turn(_lock_of(archive)):
                files = _lacking(folder, files)
                if files and archive.is_file():
                    network.verify(archive, md5=source.md5)
                    source.unpack(archive, folder, files)
    missing = _lacking(folder, missing)
    wanted = [source for source in sources if not set(source.files).isdisjoint(missing)]
    if missing and not (download and sources):
        urls = " and ".join(source.url for source in wanted)
        raise DataError(f"{lacking}; {f'fetch {urls}, and ' if urls else ''}put it there, or name another data root")
    for source in wanted:
        with in_turn(_lock_of(folder / source.name)):
            files = _lacking(folder, [name for name in source.files if name in missing])
            if not files:
                continue  # another process has made them
            try:
                fetched = network.download(source.url, folder / source.name, md5=source.md5, progress=progress)
            except DataError as error:
                raise DataError(f"{error}; or fetch it elsewhere and put {source.name} into {folder}") from error
            if source.unpack:
                source.unpack(fetched, folder, files)
                fetched.unlink()


def _lacking(folder: Path, names: Collection[str]) -> list[str]:
    return [name for name in names if not (folder / name).is_file()]


def _lock_of(file: Path) -> Path:
    return file.with_name(file.name + ".lock")


@contextmanager
def reading(archive: Path) -> Iterator[tarfile.TarFile]:
    """A tar archive, of which members are read and not extracted: no path in it can reach outside a folder.

    Raises:
        DataError: Within the block, too: the archive is broken.
    """
    try:
        with tarfile.open(archive) as tar:
            yield tar
    except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{archive}: broken archive ({error}); delete it and fetch it again") from error


def unpack_members(archive: Path, folder: Path, files: Collection[str]) -> None:
    """Copies the members with those names, whatever folder they have in the archive, into ``folder``.

    Raises:
        DataError: The archive is broken or lacks one of the files.
    """
    left = set(files)
    with reading(archive) as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            content = tar.extractfile(member) if name in left and member.isfile() else None
            if content is not None:
                with content, replacing(folder / name) as aside, aside.open("wb") as out:
                    shutil.copyfileobj(content, out)
                left.remove(name)
    if left:
        raise DataError(f"{archive}: holds no {', '.join(sorted(left))}; delete it and fetch it again")
