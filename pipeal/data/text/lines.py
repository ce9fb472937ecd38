"""The UTF-8 lines of a plain or gzip file, as a stream, with errors that name file and line."""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Generator
from pathlib import Path

from pipeal.core.errors import DataError


def read_lines(path: Path, *, old_ends: bool = False) -> Generator[str, None, None]:
    r"""Yields the lines with their line ends. A byte order mark is dropped.

    A name that ends in ``.gz`` is read as gzip.

    Args:
        path: The file.
        old_ends: Whether ``\r`` alone ends a line, too, as on old Macs; else only ``\n`` does.

    Raises:
        DataError: The file cannot be opened, is not UTF-8 (with the line), or is a broken gzip file (with the
            last good line).
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                yield from text_of(raw, number, str(path), old_ends=old_ends)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: broken gzip file after line {number} ({error}); fetch or compress it again"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def text_of(raw: bytes, number: int, where: str, *, old_ends: bool = False) -> list[str]:
    """The text of a line, counted from 1, of what ``where`` names; several where old ends are in it.

    Raises:
        DataError: It is not UTF-8.
    """
    line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}, line {number}: byte 0x{line[error.start]:02x} at place {error.start + 1} "
            "is not UTF-8; convert it to UTF-8"
        ) from error
    return _OLD_END.split(text) if old_ends and "\r" in text else [text]


_OLD_END = re.compile(r"(?<=\r)(?!\n|\Z)")


def plain_or_gz(path: Path) -> Path | None:
    """The file, or else the one with ``.gz`` behind its name; None where there is neither."""
    return next((found for found in (path, path.with_name(path.name + ".gz")) if found.is_file()), None)
