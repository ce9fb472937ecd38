"""What a run left behind, to be compared with what another one left; and a run's process with all that it started."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pipeal.training.checkpoint.store import CheckpointStore

ROOT = Path(__file__).parents[1]
TIMES = ("train_time", "epoch_time", "samples_per_s", "tokens_per_s")
"""Columns of ``epochs.csv`` that are those of a clock."""


def start(arguments: list[str], out: Path) -> subprocess.Popen[bytes]:
    """A command in a session of its own; what it says goes to ``log.txt`` in the folder of runs ``out``."""
    with (out / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *arguments, f"--out={out}"], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def written(out: Path) -> set[tuple[str, int]]:
    """The checkpoints there; one that took the place of another of its step is another one."""
    found = set()
    for path in (*out.glob("*/checkpoints/step-*"), *out.glob("*/*/checkpoints/step-*")):
        with suppress(FileNotFoundError):
            found.add((str(path.relative_to(out)), path.stat().st_ino))
    return found


def left_behind(folder: Path) -> tuple[dict[int, Any], list[dict[str, str]]]:
    """The last checkpoint's layers, and the rows without their times, of the run in a folder."""
    saved = CheckpointStore(folder / "checkpoints").newest(print)
    assert saved is not None, f"{folder} has no good checkpoint"
    with (folder / "epochs.csv").open() as file:
        rows = [{key: value for key, value in row.items() if key not in TIMES} for row in csv.DictReader(file)]
    return dict(saved.layers()), rows


def same(one: Any, other: Any) -> bool:
    """Whether two nested states hold the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
