"""A stage's own snapshots: what it goes on with, and what it says of those that it cannot."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from pipeal.line.snapshots import Snapshots


def written(folder: Path, items: int) -> None:
    with Snapshots(folder, "a line", 1) as snapshots:
        snapshots.save(items, {0: {"module": {"weight": torch.ones(2)}}}, {}, {}, lambda _: None)
        snapshots.settle(must=True)


def cut(folder: Path) -> None:
    """Ends each file of a snapshot amid its bytes."""
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])


def test_a_damaged_one_is_passed_over_and_a_stage_without_any_says_where_it_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Snapshots(tmp_path, "a line", 1) as snapshots:
        assert snapshots.newest() is None
        assert not caplog.messages  # a stage that is new has nothing to say
    for items in (3, 5):
        written(tmp_path, items)
    older, newer = sorted(tmp_path.glob("step-*"))
    cut(newer)
    with Snapshots(tmp_path, "a line", 1) as snapshots:
        assert snapshots.newest() is not None
        assert snapshots.saved == 3
        (told,) = caplog.messages
        assert told.startswith(f"the checkpoint {newer} is bad")
        assert told.endswith("is skipped")
    caplog.clear()
    cut(older)
    with Snapshots(tmp_path, "a line", 1) as snapshots:
        assert snapshots.newest() is None
        assert snapshots.saved is None
    *each, last = caplog.messages
    assert len(each) == 2
    assert last == "stage 1 has no whole snapshot left, and begins at its first item"


def test_a_thread_that_may_not_be_started_is_the_error_and_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: the end of the stage told that it had waited for a thread that never was."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        written(tmp_path, 3)
