"""Where what is made out of data files is kept: in the user's cache folder, never beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from pipeal.core.errors import DataError


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


@contextmanager
def writing() -> Iterator[None]:
    """Within it, that the system refuses to write (:func:`pipeal.core.atomic.replacing`) is a :class:`CacheError`."""
    try:
        yield
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            raise CacheError(f"{error} (data.cache_dir)") from error.__cause__
        raise
