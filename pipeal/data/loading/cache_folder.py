"""Where what is made out of data files is kept: in the user's cache folder, never beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

from platformdirs import user_cache_path

from pipeal.core.atomic import sweep
from pipeal.core.errors import DataError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class CacheError(DataError):
    """What was to be kept cannot be written; the data itself is not at fault."""


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/pipeal`` or ``~/.cache/pipeal``, or what other systems have for it; it need not be there yet.

    Raises:
        CacheError: There is no home folder to have one in.
    """
    try:
        folder = user_cache_path("pipeal", appauthor=False)
    except (RuntimeError, OSError) as error:
        raise CacheError(f"no cache folder: {error}; name one (data.cache_dir)") from error
    if not folder.is_absolute():  # as where HOME is not set, and the system knows no user
        raise CacheError(f"no cache folder: {folder} has no home; set HOME, or name a folder (data.cache_dir)")
    return folder


def kept(
    source: Path,
    what: str,
    kind: str,
    key: str,
    read: Callable[[Path], T | None],
    write: Callable[[Path], None],
    cache: bool | Path | str,
) -> T | None:
    """What is made out of a data file: made once, and read from its own files from then on.

    Args:
        source: The data file, or folder. Its name and place are part of the names of the files that are made.
        what: What is made; a folder in the user's cache folder is called so.
        kind: What tells several forms of one source apart; part of the names, too.
        key: Another one for each content of the source. Files of other keys are removed.
        read: Reads the files whose names begin with a stem; None where they are not there, or not whole.
        write: Makes them.
        cache: The folder they lie in; True for one in the user's cache folder; False keeps nothing.

    Returns:
        What ``read`` gives; None where nothing is to be kept, or where the user's cache folder cannot be written to,
        which is logged.

    Raises:
        CacheError: The folder that was named cannot be written to.
    """
    if cache is False:
        return None
    try:
        folder = cache_folder() / what if cache is True else Path(cache)
        place = blake2b(str(source.resolve()).encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
        known = f"{source.name}{kind}.{place}."
        stem = folder / f"{known}{key}"
        found = read(stem)
        if found is None:
            write(stem)
            for old in folder.glob(escape(known) + "*"):
                if not old.name.startswith(stem.name):
                    # Another process may be faster, or own the file; it only takes room.
                    with suppress(OSError):
                        old.unlink()
            sweep(folder, known)
            found = read(stem)
        if found is None:
            raise CacheError(f"{stem}.*: not what was just written; check the disk, or choose another data.cache_dir")
        return found
    except CacheError as error:
        if cache is not True:
            raise
        _log.warning(f"{source.name}: its {what} are made each time: {error}")
        return None


@contextmanager
def writing() -> Iterator[None]:
    """Within it, that the system refuses to write (:func:`pipeal.core.atomic.replacing`) is a :class:`CacheError`."""
    try:
        yield
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            raise CacheError(f"{error} (data.cache_dir)") from error.__cause__
        raise
