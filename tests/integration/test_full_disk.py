"""A disk that takes no more stops no training, is told, and leaves nothing half-written; the same command mends it."""

from __future__ import annotations

import csv
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_text import varied
from tests.integration.test_resume import ROOT, SMALL

pytestmark = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="this system has no prlimit")

FILES = ("epochs.csv", "epochs.jsonl", "status.json", "summary.json", "curves.png", "batches.png")


def lines_of(folder: Path) -> int:
    with (folder / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row.values() and None not in row for row in rows)
    assert len((folder / "epochs.jsonl").read_text().splitlines()) == len(rows)
    return len(rows)


def test_files_that_cannot_grow_any_more_after_the_first_epoch(tmp_path: Path) -> None:
    """The run ended in a traceback at the end of its second epoch, its third was not trained."""
    command = [
        sys.executable, "nlpmain.py", "agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), *SMALL,
        "--epochs=3", "--devices=cpu", f"--out={tmp_path / 'runs'}",
    ]  # fmt: skip
    folder = tmp_path / "runs" / "agnews-lstm-al-001"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            assert run.stderr is not None
            said = next(line for line in run.stderr if "epoch 2/3" in line)
            resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            out, said = run.communicate(timeout=200)
        finally:
            run.kill()
    assert run.returncode == 1, said
    assert "Traceback" not in said
    assert "epoch 3/3" in said
    assert f"cannot write {folder / 'epochs.csv'}, " in said
    assert "(File too large); the training goes on" in said
    last = said.splitlines()[-1]
    assert last.startswith("pipeal: training came to its end, but could not write ")
    assert "give the same command again: it writes what is missing" in last
    assert "best test acc" in out
    assert lines_of(folder) in (1, 2)
    assert json.loads((folder / "status.json").read_text())["status"] == "running"
    assert not list(folder.rglob("*.aside"))

    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert again.returncode == 0, again.stderr
    assert "goes on after batch" in again.stderr
    assert lines_of(folder) == 3
    assert all((folder / name).stat().st_size for name in FILES)
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["epoch"], status["resumes"]) == ("finished", 3, 1)
