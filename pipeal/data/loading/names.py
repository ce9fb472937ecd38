"""Data sets have published names in many spellings, and one canonical name each."""

from __future__ import annotations

from collections.abc import Mapping

from pipeal.core.errors import DataError, unknown_name


def canonical_name(name: str, spellings: Mapping[str, str]) -> str:
    """The name behind a spelling; case, ``_``, ``-`` and spaces do not count.

    Args:
        name: As somebody wrote it.
        spellings: From every spelling, without those marks and in small letters, to the canonical name.

    Raises:
        DataError: The name is unknown; the message holds the nearest known one.
    """
    known = spellings.get(name.lower().translate({ord(mark): None for mark in "_- "}))
    if known is None:
        raise DataError(unknown_name("data set", name, set(spellings.values())))
    return known
