"""A file that is either whole or absent: written aside, then renamed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from shutil import rmtree
from time import time
from uuid import uuid4

from pipeal.core.errors import DataError

_NO_FOLDER = (errno.EEXIST, errno.ENOTDIR)
"""Error numbers that mean a file stands where a folder is needed: more space would not help."""

_ABANDONED_S = 86_400.0
"""How long a file, or a folder and all in it, may be in the making without a change: its process may be suspended."""

_CUT = 40
"""Letters of a name that are part of its hidden one, which must not be too long where the name itself is not."""

_ANY_MARK = "[0-9a-f]" * 12
"""A pattern of what tells one in the making from others of its name."""

_UNSYNCABLE = (errno.EINVAL, errno.ENOTSUP)
"""Error numbers of file systems that cannot sync a folder: they make names durable in other ways."""


@contextmanager
def replacing(path: Path, *, sweeps: bool = True) -> Iterator[Path]:
    """Gives a path beside ``path`` to write to; it takes the name ``path`` when the block ends well.

    Missing folders are made. When the block raises, what was written is removed and an older ``path`` stays. After the
    block, the file and its name survive a power cut.

    Args:
        path: The file.
        sweeps: Whether :func:`sweep` follows for its name, which lists the folder.

    Raises:
        DataError: The system refused to write (no space, no permission, no such folder, too long a name); or ``path``
            has no name, or is there and is no file: a folder, a device, a pipe, all of which stay.
    """
    if not path.name:
        raise DataError(f"cannot write {str(path)!r}: expected the name of a file")
    aside = path.with_name(f".{path.name[:_CUT]}.{uuid4().hex[:12]}.aside")
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "a device, or something else that is no file"
            raise DataError(f"cannot write {path}: it is {what}; choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        sync_file(aside)
        os.replace(aside, path)
        sync_folder(path.parent)
        if sweeps:
            sweep(path.parent, path.name, whole=True)
    except OSError as error:
        room = "" if error.errno in _NO_FOLDER else "make room there or "
        raise DataError(f"cannot write {path}: {error.strerror or error}; {room}choose another folder") from error
    finally:
        # After the rename there is nothing left to remove; an unusable folder has nothing either.
        _remove(aside)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder beside ``path``, which takes its name, whole, when the block ends well.

    What has the name by then, a file or a folder, is removed; when the block raises, it stays as it is. :func:`sweep`
    follows for its name.

    Raises:
        DataError: The system refused.
    """
    if not path.name:
        raise DataError(f"cannot write {str(path)!r}: expected the name of a folder")
    mark = uuid4().hex[:12]
    aside, before = (path.with_name(f".{path.name[:_CUT]}.{mark}.{kind}") for kind in ("aside", "before"))
    try:
        make_folder(aside)
        yield aside
        for written in aside.rglob("*"):
            if written.is_file():
                sync_file(written)
        if os.path.lexists(path):
            path.rename(before)
        try:
            aside.rename(path)
        except OSError:
            if os.path.lexists(before):
                before.rename(path)
            raise
        sync_folder(path.parent)
        for kind in ("aside", "before"):
            sweep(path.parent, path.name, kind, whole=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}; choose another folder") from error
    finally:
        for left in (aside, before):
            _remove(left)


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text; a reader sees the old file or the new one, never a part. Raises as :func:`replacing`."""
    with replacing(Path(path), sweeps=False) as aside:  # small, and often written
        aside.write_text(text, encoding="utf-8")


def abandoned(
    folder: Path, name: str = "", kind: str = "aside", *, whole: bool = False, older_than_s: float = _ABANDONED_S
) -> Iterator[Path]:
    """What a kill left in the making in a folder: hidden files and folders that nothing has changed for a day.

    Args:
        folder: Where they are.
        name: What the names that they should have taken begin with.
        kind: How their own names end.
        whole: Whether ``name`` is all of that name.
        older_than_s: For how long nothing has changed them; 0 where no other process writes there.
    """
    for left in folder.glob(f".{escape(name[:_CUT])}{f'.{_ANY_MARK}' if whole else '*'}.{kind}"):
        with suppress(OSError):  # another process has just removed it
            changed = max(one.lstat().st_mtime for one in (left, *left.rglob("*")))
            if time() - changed >= older_than_s:
                yield left


def sweep(
    folder: Path, name: str = "", kind: str = "aside", *, whole: bool = False, older_than_s: float = _ABANDONED_S
) -> None:
    """Removes what is :func:`abandoned`, as far as the system lets it."""
    with suppress(OSError):
        for left in abandoned(folder, name, kind, whole=whole, older_than_s=older_than_s):
            _remove(left)


def make_folder(path: Path) -> None:
    """Makes a folder where there is none, and those above it; their names survive a power cut.

    Raises:
        OSError: The system refused.
    """
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync_folder(one.parent)


def sync_file(path: Path) -> None:
    """Waits until what is in a file is on the disk.

    Raises:
        OSError: The system could not.
    """
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk: what is written, made, renamed there is lost before this.

    Raises:
        OSError: The system could not.
    """
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _UNSYNCABLE:
            raise
    finally:
        os.close(folder)


def _remove(left: Path) -> None:
    if left.is_dir() and not left.is_symlink():
        rmtree(left, ignore_errors=True)
    else:
        with suppress(OSError):
            left.unlink()
