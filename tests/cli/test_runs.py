"""``pipeal runs``: every run with how it stands."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path

import pytest

from pipeal.cli import runs
from tests.cli.running import run_command, told_one_line
from tests.training.run_folders import held, make_run, tell


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of each row."""
    code, out, err = run_command(runs.command, capsys, str(folder))
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_run_is_listed_with_how_it_stands_the_latest_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (name, done, status) in enumerate(
        [("c", 3, "finished"), ("b", 1, "interrupted"), ("e", 2, "failed"), ("a", 1, "running"), ("d", 0, "running")]
    ):
        tell(make_run(tmp_path / name, done=done), status, started=f"2026-03-0{number + 1}T12:00:00+00:00")
    (tmp_path / "not a run").mkdir()
    (tmp_path / "file").touch()
    with held(tmp_path / "d" / "run.lock"):
        rows = listed(tmp_path, capsys)
    assert [row[:2] for row in rows] == [
        ["c", "finished"],
        ["b", "interrupted"],
        ["e", "failed"],
        ["a", "died"],
        ["d", "running"],
    ]
    assert [row[5] for row in rows] == ["3/3", "1/3", "2/3", "1/3", "0/3"]
    assert rows[0][2:5] == ["agnews", "transformer", "AL"]
    assert rows[0][6:8] == ["0.5600", "0.7600"], "of the epoch that is best on held-out samples, and of the last"
    assert rows[4][6:8] == ["-", "-"]
    assert re.fullmatch(r"2026-03-0\d \d\d:\d\d", rows[0][8])
    assert float(rows[0][9]) > float(rows[4][9]) > 0


def test_when_a_run_began_is_told_by_the_clock_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``status.json`` has it in UTC, and so had the list and the page, without saying so: hours off elsewhere."""
    tell(make_run(tmp_path / "run"), "finished", started="2026-03-01T20:30:00+00:00")
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC-9")  # of POSIX: nine hours before UTC
        time.tzset()
        rows = listed(tmp_path, capsys)
    time.tzset()
    assert rows[0][8] == "2026-03-02 05:30"


def test_a_comparison_has_a_line_for_each_form_and_turns_are_counted_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run" / "al", turns=2)
    make_run(tmp_path / "run" / "bp", mode="bp", done=1)
    rows = listed(tmp_path, capsys)
    assert sorted((row[0], row[1], row[4], row[5]) for row in rows) == [
        ("run/al", "finished", "AL", "6/6"),
        ("run/bp", "unknown", "BP", "1/3"),
    ]
    assert listed(tmp_path / "run", capsys) == rows


def test_forms_are_listed_in_the_order_of_their_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("al", "bp", "greedy"):
        make_run(tmp_path / "run" / name, mode=name)
    tell(tmp_path / "run", "finished")
    (tmp_path / "run" / "asked.yaml").write_text("train: {mode: compare, methods: [greedy, bp, al]}")
    assert [row[0] for row in listed(tmp_path, capsys)] == ["run/greedy", "run/bp", "run/al"]


def test_why_a_run_failed_is_said_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell(make_run(tmp_path / "run", done=0), "failed", "DataError: line 3\nis broken")
    _, out, _ = run_command(runs.command, capsys, str(tmp_path))
    assert out.splitlines()[-1] == "run: DataError: line 3 is broken"


def test_why_a_comparison_ended_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: forms that had not begun were told to be interrupted after batch 42, as that which had."""
    for name in ("al", "bp"):
        make_run(tmp_path / "run" / name, mode=name)
    tell(tmp_path / "run", "interrupted", "interrupted after batch 42 of epoch 1, and saved")
    _, out, _ = run_command(runs.command, capsys, str(tmp_path))
    assert [line for line in out.splitlines() if "batch 42" in line] == [
        "run: interrupted after batch 42 of epoch 1, and saved"
    ]


def test_a_folder_without_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(runs.command, capsys, str(tmp_path)) == (0, f"no runs in {tmp_path}\n", "")


@pytest.mark.parametrize(
    ("folder", "line"), [("none", "none: no such folder"), ("", "expected the name of a file or folder")]
)
def test_a_mistake_is_told_in_one_line(
    folder: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told_one_line(line, *run_command(runs.command, capsys, folder))


def test_a_run_that_cannot_be_looked_into_is_named_and_the_others_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        tell(make_run(tmp_path / name), "finished")
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "theirs":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    code, out, err = run_command(runs.command, capsys, str(tmp_path))
    assert (code, err) == (0, f"pipeal: {tmp_path / 'theirs'}: cannot be read: Permission denied\n")
    assert "| mine" in out
    assert "theirs" not in out


def test_files_that_may_not_be_looked_at_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run whose folder of checkpoints only tells names ended the list of all runs with a traceback."""
    run = make_run(tmp_path / "run")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "hidden").touch()
    lstat = os.lstat

    def refused(path: str) -> os.stat_result:
        if os.path.basename(path) == "hidden":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return lstat(path)

    monkeypatch.setattr("pipeal.reporting.page.run.os.lstat", refused)
    code, out, err = run_command(runs.command, capsys, str(tmp_path))
    assert (code, err) == (0, "")
    assert "| run" in out
