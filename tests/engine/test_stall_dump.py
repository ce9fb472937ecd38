"""What the watchdog leaves in a file when nothing moves, and that it says so where it cannot."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.virtual import VirtualLayer
from torch import Tensor

from pipeal import Pipeline, StallError
from pipeal.engine import SCHEDULES
from pipeal.engine.execution.watchdog import write_dump

from .traps import STALL_S, Gate, Trap, nothing, quick

THREADED = [name for name, schedule in SCHEDULES.items() if not schedule.serial]


@contextmanager
def a_thread_of_the_users(gate: Gate) -> Iterator[None]:
    """Such as a loader's: not one of the engine's."""
    thread = threading.Thread(target=gate.stand_still_here, name="users-loader")
    thread.start()
    assert gate.reached.wait(120)
    try:
        yield
    finally:
        gate.open()
        thread.join(120)


def stalled(folder: Path | None, schedule: str = "pipelined", action: str = "B") -> StallError:
    """The error of a pipeline whose middle stage stands still on its third batch."""
    gate = Gate()
    layers = [*quick(1), Trap(action, 2, gate.stand_still_here), *quick(1)]
    opened = Pipeline(layers, schedule=schedule, stall_timeout_s=STALL_S, queue_depth=1, dump_folder=folder)
    with gate.alone(), pytest.raises(StallError) as caught, opened as pipe:  # noqa: PT012  the gate opens before the way out
        try:
            pipe.run(nothing(30))
        finally:
            gate.open()
    return caught.value


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=pytest.mark.slow) if name != "pipelined" else name for name in THREADED]
)
def test_the_file_has_all_threads_the_queues_and_how_far_each_stage_is(schedule: str, tmp_path: Path) -> None:
    with a_thread_of_the_users(Gate()):
        error = stalled(tmp_path / "runs" / "one", schedule)
    (path,) = (tmp_path / "runs" / "one").iterdir()
    assert path.match("stall-*-*.txt")
    assert f"the stacks of all threads are in {path}" in str(error).splitlines()[0]
    text = path.read_text(encoding="utf-8")
    assert "stage 1 stands still: B2@s1 for " in text
    assert "stage 0: waiting for " in text
    assert "1 waiting\n" in text or schedule != "pipelined"  # the queue before the stage is full
    assert f"schedule {schedule}; " in text
    assert "stage 1 has ended F of 3, B of 2, U of 2 batches, and passed 0 snapshots" in text
    for name in ("MainThread", "users-loader", "pipeal-stage-0", "pipeal-stage-1", "pipeal-stage-2"):
        assert f", {name}:\n" in text
    assert text.count("in stand_still_here") == 2


def test_without_a_folder_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "the stacks of all threads" not in str(stalled(None))
    assert list(tmp_path.iterdir()) == []


def test_two_stalls_leave_two_files(tmp_path: Path) -> None:
    found = {write_dump(tmp_path, "twice in a second") for _ in range(3)}
    assert found == set(tmp_path.iterdir())
    assert len(found) == 3


def test_a_folder_that_cannot_be_had_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    first, *rest = str(stalled(tmp_path / "file" / "dumps")).splitlines()
    assert first.startswith("stage 1 stands still: B2@s1 for ")
    assert f"could not be written to {tmp_path / 'file' / 'dumps'}: NotADirectoryError" in first
    assert any("in stand_still_here" in line for line in rest)


@contextmanager
def no_room_for_files() -> Iterator[None]:
    """What a full disk does to a write: it fails half-way. Nothing else may write meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_hides_nothing_and_keeps_nothing_half_written(tmp_path: Path) -> None:
    with no_room_for_files():
        error = stalled(tmp_path)
    assert f"could not be written to {tmp_path}: OSError: " in str(error).splitlines()[0]
    assert list(tmp_path.iterdir()) == []


class Sticks(VirtualLayer):
    """Stands still in an inference."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(0, 0)
        self.gate = gate

    def inference(self, x: Any, path: Any) -> Tensor:
        self.gate.stand_still_here()
        return torch.zeros(1)


def test_a_prediction_that_stands_still_leaves_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.engine.execution.executors.STOP_S", 0.2)
    gate = Gate()
    pipe = Pipeline([*quick(1), Sticks(gate)], stall_timeout_s=STALL_S, dump_folder=str(tmp_path))
    answers = pipe.predict_each([torch.zeros(1)] * 3)
    try:
        with gate.alone(), pytest.raises(StallError, match="stage 1 stands still"):
            list(answers)
    finally:
        gate.open()
    (path,) = tmp_path.iterdir()
    text = path.read_text(encoding="utf-8")
    assert "pipeal-inference-1:\n" in text
    assert "in stand_still_here" in text
