"""The rows of ``epochs.csv``, read back."""

from __future__ import annotations

import csv
import errno
import os
import re
import stat
from collections.abc import Mapping
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
    return EpochRow(
        turn=int(line["turn"]),
        epoch=int(line["epoch"]),
        train_acc=float(line["train_acc"]),
        test_acc=float(line["test_acc"]),
        train_time=float(line["train_time"]),
        epoch_time=float(line["epoch_time"]),
        samples_per_s=float(line["samples_per_s"]),
        tokens_per_s=float(line["tokens_per_s"]),
        losses=tuple(tuple(losses[layer]) for layer in sorted(losses)),
        train_loss=_if_there(line, "train_loss"),
        test_loss=_if_there(line, "test_loss"),
        held_acc=_if_there(line, "held_acc"),
        held_loss=_if_there(line, "held_loss"),
    )


def _if_there(line: Mapping[str, str], column: str) -> float | None:
    return None if line.get(column, "") == "" else float(line[column])
