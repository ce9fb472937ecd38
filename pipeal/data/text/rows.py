"""The rows of the published CSV files, checked: every complaint names file and line."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from pipeal.core.errors import DataError
from pipeal.data.text.lines import read_lines

SENTIMENTS = ("positive", "negative")
"""The IMDb labels in class order: 0 for positive and 1 for negative, as in the published AL code."""


def read_labelled(path: Path, classes: int) -> tuple[list[str], list[int]]:
    """Reads ``class,title,description`` rows without a header (AG News, DBpedia).

    The text is title and description joined by a space; one of them may be empty. Blank lines are skipped.

    Args:
        path: The CSV file, plain or ``.gz``.
        classes: How many classes there are; the file counts them from 1.

    Returns:
        Texts, and labels counted from 0.

    Raises:
        DataError: A wrong number of columns, a label that is no whole number or not in 1..classes, an empty
            text, open quotes, no rows; or what :func:`pipeal.data.text.lines.read_lines` raises.
    """
    texts: list[str] = []
    labels: list[int] = []
    for line, row in _rows(path):
        if len(row) != 3:
            raise DataError(f"{path}, line {line}: {len(row)} columns, wanted 3 (class,title,description)")
        try:
            label = int(row[0])
        except ValueError:
            header = "; if this is a header row, delete it" if not labels else ""
            raise DataError(
                f"{path}, line {line}: label {row[0]!r} is not a whole number, wanted 1..{classes}{header}"
            ) from None
        if not 1 <= label <= classes:
            raise DataError(f"{path}, line {line}: label {label} out of range, wanted 1..{classes}")
        text = f"{row[1]} {row[2]}".strip()
        if not text:
            raise DataError(f"{path}, line {line}: title and description are empty; fill in or delete the row")
        texts.append(text)
        labels.append(label - 1)
    if not texts:
        raise DataError(f"{path}: no rows; fetch the file again")
    return texts, labels


def read_reviews(path: Path) -> tuple[list[str], list[int]]:
    """Reads ``review,sentiment`` rows under a header of that name (IMDb).

    Returns:
        Texts, and labels: 0 for positive, 1 for negative.

    Raises:
        DataError: Another header, a wrong number of columns, an unknown sentiment, an empty review, open
            quotes, no rows; or what :func:`pipeal.data.text.lines.read_lines` raises.
    """
    rows = _rows(path)
    line, header = next(rows, (1, []))
    if [name.strip().lower() for name in header] != ["review", "sentiment"]:
        raise DataError(f"{path}, line {line}: header {','.join(header)[:60]!r}, wanted 'review,sentiment'")
    texts: list[str] = []
    labels: list[int] = []
    for line, row in rows:
        if len(row) != 2:
            raise DataError(f"{path}, line {line}: {len(row)} columns, wanted 2 (review,sentiment)")
        review, sentiment = row[0].strip(), row[1].strip().lower()
        if sentiment not in SENTIMENTS:
            raise DataError(f"{path}, line {line}: sentiment {row[1][:60]!r}, wanted positive or negative")
        if not review:
            raise DataError(f"{path}, line {line}: the review is empty; fill in or delete the row")
        texts.append(review)
        labels.append(SENTIMENTS.index(sentiment))
    if not texts:
        raise DataError(f"{path}: no rows under the header; fetch the file again")
    return texts, labels


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields each row that is not blank, with the number of the line it begins on."""
    # Strict, so that a stray quote is an error where it stands instead of a text that swallowed its neighbours.
    reader = csv.reader(read_lines(path), strict=True)
    begin = 1
    try:
        for row in reader:
            if row:
                yield begin, row
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {begin}: {error}; probably a quote left open or not doubled in the row"
        ) from error
