"""A disk that takes no more stops no training, is told, and leaves nothing half-written; the same command mends it."""

from __future__ import annotations

import csv
import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeal.cli import text
from pipeal.training.checkpoint import store as checkpoint
from tests.cli.running import run_command
from tests.cli.test_text import varied
from tests.integration.test_resume import ROOT, SMALL

pytestmark = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="this system has no prlimit")

FILES = ("epochs.csv", "epochs.jsonl", "status.json", "summary.json", "curves.png", "batches.png")


def short_run(tmp_path: Path, epochs: int) -> list[str]:
    """A command of so many epochs, which leaves its run in ``runs``."""
    data = f"--data-root={varied(tmp_path / 'data')}"
    return ["agnews", "lstm", data, *SMALL, f"--epochs={epochs}", "--devices=cpu", f"--out={tmp_path / 'runs'}"]


def lines_of(folder: Path) -> int:
    with (folder / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row.values() and None not in row for row in rows)
    assert len((folder / "epochs.jsonl").read_text().splitlines()) == len(rows)
    return len(rows)


LIMITED = """
import resource
from pipeal.cli import entry, text
from pipeal.reporting.recorders import JsonLinesRecorder
write = JsonLinesRecorder.write
def and_fill(recorder, row):
    write(recorder, row)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
JsonLinesRecorder.write = and_fill
entry.run(text.command)
"""
"""From the row of the first epoch on no file grows any more."""


@pytest.mark.slow
def test_files_that_cannot_grow_any_more_after_the_first_epoch(tmp_path: Path) -> None:
    """The run ended in a traceback at the end of its second epoch, its third was not trained."""
    arguments = short_run(tmp_path, epochs=3)
    folder = tmp_path / "runs" / "agnews-lstm-al-001"
    full = command("-c", LIMITED, *arguments)
    said = full.stderr
    assert full.returncode == 1, said
    assert "Traceback" not in said
    assert "epoch 3/3" in said
    assert f"cannot write {folder / 'timeline.png'}, " in said
    assert f"{folder / 'epochs.csv'}, " in said
    assert "(File too large); the training goes on" in said
    last = said.splitlines()[-1]
    assert last.startswith("pipeal: training came to its end, but could not write ")
    assert "the same command writes what is missing, but for timeline.png and trace.json: no batch is left" in last
    assert "; not every checkpoint was written: " in last
    assert "test acc at best held-out" in full.stdout
    assert lines_of(folder) == 1
    assert json.loads((folder / "status.json").read_text())["status"] == "running"
    assert not list(folder.rglob("*.aside"))

    again = command("nlpmain.py", *arguments)
    assert again.returncode == 0, again.stderr
    assert "AL goes on after " in again.stderr
    assert lines_of(folder) == 3
    assert all((folder / name).stat().st_size for name in FILES)
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["epoch"], status["resumes"]) == ("finished", 3, 1)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_a_timeline_that_could_not_be_drawn_is_lost_and_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command was said to write what is missing, and named it, but had no batch to trace."""
    arguments = short_run(tmp_path, epochs=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("pipeal.run.turns.draw_timeline", full)
        code, out, err = run_command(text.command, capsys, *arguments)
    assert code == 1
    last = err.splitlines()[-1]
    assert last.endswith("the same command writes what is missing, but for timeline.png: no batch is left to trace")
    assert "timeline:" not in out
    code, out, err = run_command(text.command, capsys, *arguments)
    assert (code, "timeline:" in out, "curves:" in out) == (0, False, True), err


@pytest.mark.slow
def test_a_run_of_which_one_checkpoint_failed_is_not_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: the exit code was 1, and whoever gives the command again for that trained all of it once more."""
    arguments = short_run(tmp_path, epochs=2)
    write, asked = checkpoint.write_layer, []

    def full_at_first(path: Path, layer: Any) -> tuple[int, int]:
        asked.append(path)
        if len(asked) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, layer)

    monkeypatch.setattr(checkpoint, "write_layer", full_at_first)
    code, _, err = run_command(text.command, capsys, *arguments)
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("pipeal: training came to its end, but not every checkpoint was written: ")
    assert last.endswith("; the same command completes the run")
    folder = tmp_path / "runs" / "agnews-lstm-al-001"
    rows = (folder / "epochs.csv").read_text()
    code, _, err = run_command(text.command, capsys, *arguments)
    assert (code, "AL goes on after epoch 2" in err) == (0, True), err
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert (folder / "epochs.csv").read_text() == rows
    assert json.loads((folder / "status.json").read_text())["status"] == "finished"
