"""A user's own texts with labels: a CSV file with a header, or a file of JSON lines; complaints name file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np

from pipeal.core.errors import ConfigError, DataError, listed
from pipeal.core.names import FILE, is_file
from pipeal.data.text.datasets import TextDataset, TextSplit
from pipeal.data.text.lines import read_lines
from pipeal.data.text.rows import csv_rows

__all__ = ["load_text_file"]

_SHOWN = 10
"""Labels and columns that a message lists."""


def load_text_file(
    path: Path | str,
    test_path: Path | str | None = None,
    *,
    text: Sequence[str] = ("text",),
    label: str = "label",
    test_share: float = 0.2,
    seed: int = 0,
) -> TextDataset:
    """Reads texts and labels; the classes are the labels of the first file, numbers by value and words by letters.

    Args:
        path: Ends in ``.csv`` or ``.jsonl``, or in one of them with ``.gz``; UTF-8.
        test_path: Likewise, to test on; None draws a share of the first.
        text: The columns of the text, joined by a space.
        label: The column of the label.
        test_share: The share that is drawn.
        seed: Of the draw.

    Raises:
        DataError: A file cannot be read or is malformed, holds no text or one class alone, or the second one has a
            label that the first has not; or the share leaves nothing to train or to test on.
        ConfigError: ``text`` is no list of columns, or has that of the label; a share that is not from 0 to 1.
    """
    if isinstance(text, str):
        raise ConfigError(f"text is {text!r}; wanted a list of columns, such as [{text!r}]")
    if label in text:
        raise ConfigError(f"the label's column, {label!r}, is one of the text, which would tell it; {_NAME_THEM}")
    if not 0 <= test_share <= 1:
        raise ConfigError(f"test_share is {test_share}; wanted a share from 0 to 1")
    path = Path(path)
    texts, labels, found = _read(path, text, label)
    words = sorted(found, key=_whole_numbers_first)
    if len(words) < 2:
        raise DataError(f"{path}: every {label} is {_short(words[0])}; wanted at least two classes")
    numbers = {word: number for number, word in enumerate(words)}
    whole = TextSplit(texts, [numbers[word] for word in labels])
    if test_path is None:
        train, test = _drawn(path, whole, test_share, seed)
        return TextDataset(FILE, tuple(words), train, test)
    test_texts, test_labels, found = _read(Path(test_path), text, label)
    for word, where in found.items():
        if word not in numbers:
            raise DataError(f"{where}: {label} {_short(word)} is not in {path}, which has {_listed(words)}")
    return TextDataset(FILE, tuple(words), whole, TextSplit(test_texts, [numbers[word] for word in test_labels]))


def _drawn(path: Path, whole: TextSplit, share: float, seed: int) -> tuple[TextSplit, TextSplit]:
    """What to train on and what to test on, each in the order of the file."""
    count = round(len(whole) * share)
    if not 0 < count < len(whole):
        raise DataError(
            f"{path}: {share:g} of its {len(whole)} texts is {count} to test on; expected some, but not all: choose "
            "another share, or name a file to test on"
        )
    order = np.random.default_rng(seed).permutation(len(whole))
    train, test = (
        TextSplit([whole.texts[row] for row in rows], [whole.labels[row] for row in rows])
        for rows in (sorted(order[count:].tolist()), sorted(order[:count].tolist()))
    )
    alone = sorted(set(test.labels) - set(train.labels))
    if alone:
        raise DataError(
            f"{path}: of {len(alone)} classes all texts were drawn to test on, none to train on; add texts of classes "
            "so rare, or name a file to test on"
        )
    return train, test


def _read(path: Path, text: Sequence[str], label: str) -> tuple[list[str], list[str], dict[str, str]]:
    """The texts of a file; the label of each, as a word; and where each label stands first."""
    if not is_file(path.name):
        raise DataError(f"{path}: expected a name that ends in .csv or .jsonl, or in one of them with .gz")
    texts: list[str] = []
    labels: list[str] = []
    found: dict[str, str] = {}
    records = _of_csv if path.name.lower().endswith((".csv", ".csv.gz")) else _of_jsonl
    for where, record in records(path, (*text, label)):
        parts = [record[column] for column in text]
        strange = next((column for column, part in zip(text, parts, strict=True) if not isinstance(part, str)), None)
        if strange is not None:
            raise DataError(f"{where}: {strange} is {_short(record[strange])}, wanted a text in quotes")
        joined = " ".join(parts).strip()
        if not joined:
            raise DataError(
                f"{where}: {' and '.join(text)} {'is' if len(text) == 1 else 'are'} empty; fill in or delete it"
            )
        texts.append(joined)
        # One object for all rows of a label: beside short texts, one for each would be half of what is held.
        labels.append(intern(_label(record[label], f"{where}: {label}")))
        found.setdefault(labels[-1], where)
    if not texts:
        raise DataError(f"{path}: holds no texts; wanted one in each row{', under a header' * (records is _of_csv)}")
    return texts, labels, found


def _label(value: object, what: str) -> str:
    # A label that is missing is NaN to Python's json, as it comes from pandas.
    is_number = isinstance(value, int) or (isinstance(value, float) and isfinite(value))
    word = value.strip() if isinstance(value, str) else json.dumps(value) if is_number else None
    if word is None:
        raise DataError(f"{what} is {_short(value)}, wanted a word or a number")
    if not word:
        raise DataError(f"{what} is empty; fill in or delete it")
    return word


def _of_csv(path: Path, wanted: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows = csv_rows(path)
    where, header = next(rows, (f"{path}, line 1", []))
    header = [name.strip() for name in header]
    for column in wanted:
        if header.count(column) != 1:
            found = f"{header.count(column)} columns {column!r}" if column in header else f"no column {column!r}"
            raise DataError(f"{where}: {found} in the header, {_listed(header)}; {_NAME_THEM}")
    for where, row in rows:
        if len(row) != len(header):
            raise DataError(f"{where}: {len(row)} columns, wanted {len(header)} as in the header ({_listed(header)})")
        yield where, dict(zip(header, row, strict=True))


def _of_jsonl(path: Path, wanted: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(read_lines(path, old_ends=True), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: no JSON ({error}); wanted an object such as {_example(wanted)}") from error
        if "\\u" in line and not _is_text(record):
            raise DataError(f"{where}: half of a character (\\ud800 to \\udfff); wanted whole ones, in pairs")
        if not isinstance(record, dict):
            raise DataError(f"{where}: {_short(record)}; wanted an object such as {_example(wanted)}")
        for key in wanted:
            if key not in record:
                raise DataError(f"{where}: no key {key!r}, it has {_listed(list(record))}; {_NAME_THEM}")
        yield where, record


def _is_text(record: object) -> bool:
    """Whether all that was read can be written again."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


_NAME_THEM = "name the columns with --text-column and --label-column (data.columns)"


def _example(wanted: Sequence[str]) -> str:
    return json.dumps(dict.fromkeys(wanted, "…"), ensure_ascii=False)


def _whole_numbers_first(word: str) -> tuple[int, int, str]:
    """Whole numbers by value, and after them words by letters.

    >>> sorted(["10", "9", "b", "a"], key=_whole_numbers_first)
    ['9', '10', 'a', 'b']
    """
    is_number = re.fullmatch(r"[-+]?[0-9]{1,18}", word) is not None
    return (0, int(word), word) if is_number else (1, 0, word)


def _listed(names: Sequence[str]) -> str:
    return listed([*map(_short, names)], _SHOWN) or "which is empty"


def _short(value: object) -> str:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(shown[:60]) if isinstance(value, str) else shown[:60]
