"""Folders as runs leave them, made without training."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeal.config import dump_config, load_config
from pipeal.config.text import TextConfig
from pipeal.engine.schedule import Action
from pipeal.engine.trace import Span
from pipeal.reporting.recorders import CsvRecorder
from pipeal.reporting.timeline import draw_timeline
from pipeal.training.row import EpochRow


def config(mode: str = "al", epochs: int = 3, **train: Any) -> str:
    return dump_config(
        load_config(
            TextConfig,
            values={
                "dataset": "agnews",
                "model": {"name": "transformer", "x_hid": 48},
                "train": {"mode": mode, "epochs": epochs, **train},
                "engine": {"devices": ["cpu", "cpu"]},
            },
        )
    )


def rows(epochs: int = 3, turns: int = 1, layers: int = 2, parts: int = 2) -> list[EpochRow]:
    return [
        EpochRow(
            turn, epoch, 0.5 + 0.1 * epoch, 0.45 + 0.1 * epoch + 0.01 * turn, 10.0 * epoch, 10.0, 200.0, 5000.0,
            tuple(tuple((layer + 1.0) / epoch / 10**part for part in range(parts)) for layer in range(layers)),
            held_acc=0.9 - 0.1 * epoch,
        )
        for turn in range(1, turns + 1)
        for epoch in range(1, epochs + 1)
    ]  # fmt: skip


SUMMARY: dict[str, Any] = {
    "dataset": "agnews",
    "model": "transformer",
    "form": "AL",
    "test_accuracy_at_best_held_out": 0.56,
    "last_test_accuracy": 0.76,
    "seconds_per_epoch": 10.0,
    "samples_per_s": 200.0,
    "tokens_per_s": 5000.0,
    "padding_share": 0.0125,
    "batches_per_epoch": 50.0,
    "batches": {
        "shapes": 7,
        "samples": {"least": 3, "median": 40.5, "most": 64},
        "padded_length": {"least": 5, "median": 20.0, "most": 61},
        "padded_lengths": 5,
        "padding_share_of_random_batches": 0.4321,
    },
    "schedule": "pipelined",
    "devices": ["cpu", "cpu"],
    "sizes": [1, 2],
    "stages": [
        {
            "busy_share": 0.5,
            "busy_s": {"F": 6.0, "B": 8.0, "U": 1.0},
            "waiting_s": {"input": 3.0, "space": 9.0, "join": 0.0},
        },
        {
            "busy_share": 0.9,
            "busy_s": {"F": 12.0, "B": 13.0, "U": 2.0},
            "waiting_s": {"input": 1.5, "space": 0.0, "join": 0.6},
        },
    ],
    "training_parameters": 131346,
    "inference_parameters": 123456,
    "environment": {"torch": "2.15.0", "cores": 2, "gpus": []},
}

SPANS = [
    Span(stage, stage, action, batch, batch + begin + stage, batch + begin + stage + 0.3)
    for batch in range(5)
    for stage in range(2)
    for action, begin in ((Action.FORWARD, 0.0), (Action.BACKWARD, 0.3), (Action.UPDATE, 0.6))
]


@cache
def timeline() -> bytes:
    with TemporaryDirectory() as folder:
        draw_timeline(SPANS, Path(folder, "timeline.png"), title="a timeline", devices=["cpu", "cpu"])
        return Path(folder, "timeline.png").read_bytes()


def write_rows(folder: Path, made: list[EpochRow]) -> None:
    with CsvRecorder(folder / "epochs.csv") as recorder:
        for row in made:
            recorder.write(row)


def make_run(folder: Path, *, mode: str = "al", epochs: int = 3, done: int = 3, turns: int = 1) -> Path:
    """A run of so many epochs, of which some are done; one that is done has its summary and pictures."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config(mode, epochs, repeat=turns))
    layers, parts = (2, 2) if mode == "al" else (1, 1)
    if done:
        write_rows(folder, rows(done, turns, layers, parts))
        (folder / "timeline.png").write_bytes(timeline())
    if done == epochs:
        (folder / "summary.json").write_text(json.dumps(SUMMARY | {"form": mode.upper()}))
    return folder


def tell(folder: Path, status: str, message: str = "", started: str = "2026-03-01T12:00:00+00:00") -> None:
    (folder / "status.json").write_text(
        json.dumps({"status": status, "message": message, "epoch": 1, "epochs": 3, "started": started, "updated": ""})
    )


_HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Another process holds the lock; at the end it is killed."""
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(lock)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield
        finally:
            process.kill()
