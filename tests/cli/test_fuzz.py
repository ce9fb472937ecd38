"""Sixteen of the random cases of ``scripts/fuzz_commands.py``; and that it would see what it looks for."""

from __future__ import annotations

import errno
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from pipeal.core.errors import NonFiniteError, OutOfMemoryError, SaveError, WorkerError, first_line

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.slow
def test_random_command_lines_run_or_are_told_off_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "fuzz_commands.py", "--count=16", "--seed=1", "--spoilt=0.9", f"--home={tmp_path}"],
        capture_output=True, text=True, check=False, errors="replace",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 of 16 cases" in done.stdout
    assert " × 0" in done.stdout, "some run"
    assert " × 2" in done.stdout, "some are mistakes"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("fuzz_commands")


SLEEPING: list[subprocess.Popen[bytes]] = []


def crash(folder: Path) -> None:
    raise RuntimeError("an unforeseen thing")


def mumble(folder: Path) -> None:
    print("so far so good")
    raise click.ClickException("no")


def begin(folder: Path) -> None:
    begin_run(folder, "ConfigError: too late")
    raise click.ClickException("too late")


def begin_run(folder: Path, message: str) -> None:
    run = folder / "runs" / "agnews-lstm-al-001"
    run.mkdir(parents=True)
    (run / "run.lock").touch()
    (run / "status.json").write_text(json.dumps({"status": "failed", "message": message}))


def begin_and_blame_the_user(folder: Path) -> None:
    begin_run(folder, "NonFiniteError: layer 1 has a loss that is not finite")
    raise click.ClickException("layer 1 has a loss that is not finite")


def forget(folder: Path) -> None:
    (folder / ".page.html.123.aside").touch()


def detach(folder: Path) -> None:
    SLEEPING.append(subprocess.Popen(["sleep", "60"]))


def leave(folder: Path) -> None:
    sys.exit(3)


@pytest.mark.parametrize(
    ("mischief", "found"),
    [
        (crash, "RuntimeError: an unforeseen thing"),
        (mumble, "a mistake, but something on standard output"),
        (begin, "a mistake told when the run was under way"),
        (begin_and_blame_the_user, "a mistake told when the run was under way"),
        (forget, "half-written files: .page.html.123.aside"),
        (detach, r"left alive: process \d+: sleep"),
        (leave, "exit code 3"),
    ],
)
def test_what_a_command_must_not_do_is_found(
    mischief: Callable[[Path], None], found: str, fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "case"
    seen = observed(mischief, fuzz, folder, monkeypatch)
    assert seen.outcome() == "FAILURE"
    assert re.search(found, "\n".join(seen.wrong))


@pytest.mark.parametrize(
    "error",
    [
        NonFiniteError("layer 1 has a loss that is not finite on batch 3: nan", 1, 3, (float("nan"),)),
        SaveError("training came to its end, but could not write x.csv (No space left on device)"),
        SaveError("training came to its end, but not every checkpoint was written: No space left on device"),
        OutOfMemoryError("stage 0 is out of memory", 0, 1, 3),
        WorkerError("a worker process died"),
        OSError(errno.ENOSPC, "No space left on device", "x.csv"),
    ],
)
def test_what_is_nobodys_mistake_is_no_failure_of_a_command(
    error: Exception, fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that was not finite came with exit code 1, and was called a mistake."""

    def end(folder: Path) -> None:
        begin_run(folder, first_line(error))
        raise error

    seen = observed(end, fuzz, tmp_path / "case", monkeypatch)
    assert seen.wrong == []
    assert seen.outcome().startswith("1: ")


def observed(mischief: Callable[[Path], None], fuzz: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(fuzz, "GRACE_S", 0.1)
    monkeypatch.setitem(fuzz.COMMANDS, "pipeal", click.Command("pipeal", callback=lambda: mischief(folder)))
    seen = fuzz.observe("pipeal", [], folder, limit_s=60)
    for sleeper in SLEEPING:
        sleeper.kill()
        sleeper.wait()
    return seen
