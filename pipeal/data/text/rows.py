"""The rows of the published CSV files, checked: every complaint names file and line."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeal.core.errors import DataError
from pipeal.data.text.lines import read_lines
from pipeal.data.text.published import Labelled

LONGEST_FIELD = 2**24
"""Characters of one field of a CSV file; the library's own bound, 131,072, is less than a book has."""


def read_splits(
    paths: Mapping[str, Path], _seed: int, *, classes: tuple[str, ...]
) -> tuple[tuple[str, ...], Labelled, Labelled]:
    """Reads ``train.csv`` and ``test.csv``; the class names are the lines of a ``classes.txt`` beside, if there is one.

    Raises:
        DataError: What :func:`read_labelled` raises, or another number of class names.
    """
    names = paths["train.csv"].with_name("classes.txt")
    if names.is_file():
        found = tuple(line.strip() for line in read_lines(names) if line.strip())
        # Another count is another data set: without this, AG News files would pass for DBpedia.
        if len(found) != len(classes):
            raise DataError(f"{names}: {len(found)} class names, wanted {len(classes)}; is it another data set's?")
        classes = found
    return classes, read_labelled(paths["train.csv"], len(classes)), read_labelled(paths["test.csv"], len(classes))


def read_labelled(path: Path, classes: int) -> Labelled:
    """Reads ``class,title,description`` rows without a header (AG News, DBpedia).

    The text is title and description joined by a space; one of them may be empty. Blank lines are skipped.

    Args:
        path: The CSV file, plain or ``.gz``.
        classes: How many classes there are; the file counts them from 1.

    Raises:
        DataError: A wrong number of columns, a label that is no whole number or not in 1..classes, an empty
            text, open quotes, no rows; or what :func:`pipeal.data.text.lines.read_lines` raises.
    """
    texts: list[str] = []
    labels: list[int] = []
    for where, row in read_rows(path, ("class", "title", "description")):
        try:
            label = int(row[0])
        except ValueError:
            header = "; if this is a header row, delete it" if not labels else ""
            raise DataError(f"{where}: label {row[0]!r} is not a whole number, wanted 1..{classes}{header}") from None
        if not 1 <= label <= classes:
            raise DataError(f"{where}: label {label} out of range, wanted 1..{classes}")
        text = f"{row[1]} {row[2]}".strip()
        if not text:
            raise DataError(f"{where}: title and description are empty; fill in or delete the row")
        texts.append(text)
        labels.append(label - 1)
    return texts, labels


def read_rows(path: Path, columns: tuple[str, ...], *, header: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Yields each row that is not blank, with words that say where it begins.

    Args:
        path: The CSV file, plain or ``.gz``.
        columns: What a row holds.
        header: Whether the first row must name them.

    Raises:
        DataError: Another header, a wrong number of columns, open quotes, no rows.
    """
    wanted, rows = ",".join(columns), 0
    found = csv_rows(path)
    if header:
        where, first = next(found, (f"{path}, line 1", []))
        if tuple(name.strip().lower() for name in first) != columns:
            raise DataError(f"{where}: header {','.join(first)[:60]!r}, wanted {wanted!r}")
    for where, row in found:
        if len(row) != len(columns):
            raise DataError(f"{where}: {len(row)} columns, wanted {len(columns)} ({wanted})")
        yield where, row
        rows += 1
    if not rows:
        raise DataError(f"{path}: no rows{' under the header' if header else ''}; fetch the file again")


def csv_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields each row of a CSV file that is not blank, with words that say where it begins.

    Raises:
        DataError: Open quotes; or what :func:`pipeal.data.text.lines.read_lines` raises.
    """
    # For all readers of this process. A bound there must be: a quote left open takes the rest of the file.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
    # Strict, so that a stray quote is an error where it stands instead of a text that swallowed its neighbours.
    reader = csv.reader(read_lines(path, old_ends=True), strict=True)
    begin = 1
    try:
        for row in reader:
            if row:
                yield f"{path}, line {begin}", row
            begin = reader.line_num + 1
    except csv.Error as error:
        where, quote = f"{path}, line {begin}", "a quote left open or not doubled in the row"
        if "field limit" in str(error):
            raise DataError(
                f"{where}: a field of more than {csv.field_size_limit():,} characters; close {quote}, or cut the text"
            ) from error
        raise DataError(f"{where}: {error}; probably {quote}") from error
