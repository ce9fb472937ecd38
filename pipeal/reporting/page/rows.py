"""The rows of ``epochs.csv``, read back."""

from __future__ import annotations

import csv
import errno
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from pipeal.training.row import EpochRow

_LOSS = re.compile(r"loss_(\d{1,6})(?:_\w+)?")


def read_rows(path: Path) -> tuple[list[EpochRow], int]:
    """Reads what :class:`pipeal.reporting.recorders.CsvRecorder` wrote.

    Returns:
        The rows, and how many lines are none: cut off, or not of numbers.

    Raises:
        OSError: The file is not there or cannot be read.
    """
    require_file(path)
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        try:
            columns, lines = reader.fieldnames, list(reader)
        except csv.Error:
            return [], 1
    if columns and "turn" not in columns:
        return [], 1 + len(lines)  # another kind of file
    rows: list[EpochRow] = []
    for line in lines:
        try:
            rows.append(_row(line))
        except (ValueError, KeyError, TypeError, OverflowError):  # what a cut or foreign line leads to
            continue
    return rows, len(lines) - len(rows)


def require_file(path: Path) -> None:
    """Refuses what a reader might wait for without end: a pipe, a socket, a device.

    Raises:
        OSError: It is there, but no file; or it cannot be looked at.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _row(line: Mapping[str, str]) -> EpochRow:
    losses: dict[int, list[float]] = {}
    for column, value in line.items():
        if match := _LOSS.fullmatch(column):
            losses.setdefault(int(match[1]), []).append(float(value))
    # Those without a default are in every file. A blank cell is of an older run, a missing one of a line that was cut.
    figures = {
        field.name: float(line[field.name])
        for field in fields(EpochRow)
        if field.name not in ("turn", "epoch", "losses")
        and (field.default is MISSING or line.get(field.name, "") != "")
    }
    by_layer = tuple(tuple(losses[layer]) for layer in sorted(losses))
    return EpochRow(turn=int(line["turn"]), epoch=int(line["epoch"]), losses=by_layer, **figures)
