"""What cannot be written is told now and then, and named in the end; on a disk that really is full, or read-only."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeal.reporting.attempts import Attempts

MOUNTED = """
import logging, subprocess, sys
from dataclasses import replace
from pathlib import Path
from pipeal.reporting.attempts import Attempts
from pipeal.reporting.recorders import CsvRecorder
from pipeal.training.row import EpochRow
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk], check=True)
print("mounted")
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
attempts, recorder = Attempts(), CsvRecorder(disk / "x.csv")
def epoch(number):
    attempts.make(recorder.path, lambda: recorder.write(EpochRow(1, number, *6 * (0.5,))))
    attempts.tell()
    print(number, recorder.path.read_text().count("\\n") - 1, len(list(disk.iterdir())))
epoch(1)
try:
    (disk / "filler").write_bytes(bytes(1 << 16))
except OSError:
    epoch(2)
(disk / "filler").unlink()
epoch(3)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
epoch(4)
subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
epoch(5)
"""


@pytest.mark.slow
def test_a_disk_that_is_full_and_then_read_only(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    command = ["unshare", "-rm", sys.executable, "-c", MOUNTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if "mounted" not in done.stdout:
        pytest.skip("nothing may be mounted here")
    assert done.returncode == 0, done.stderr
    again = "what could not be written is written now"
    assert done.stdout.splitlines() == [
        "mounted",
        "1 1 1",
        f"cannot write {tmp_path / 'x.csv'} (No space left on device); the training goes on",
        "2 1 2",
        again,
        "3 3 1",
        f"cannot write {tmp_path / 'x.csv'} (Read-only file system); the training goes on",
        "4 3 1",
        again,
        "5 5 1",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_warning_repeats_more_and_more_rarely(said: list[str]) -> None:
    attempts = Attempts()

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for _ in range(9):
        assert not attempts.make(Path("a"), fail)
        attempts.tell()
    assert [line.partition("goes on")[2] for line in said] == [
        "", *(f" ({times} times in a row now)" for times in (2, 4, 8))
    ]  # fmt: skip
    assert attempts.make(Path("a"), lambda: None)
    attempts.tell()
    assert said[-1] == "what could not be written is written now"
    assert not attempts.missing


def test_a_bug_is_no_full_disk() -> None:
    def bug() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        Attempts().make(Path("a"), bug)
