"""How commands end when the machine, not the user, is at fault: one line, exit code 1."""

from __future__ import annotations

import errno
import logging
import os
import re
import runpy
import signal
import sys
from io import StringIO
from pathlib import Path

import click
import pytest
from rich.console import Console
from rich.live import Live

from pipeal.cli import entry, main
from pipeal.core.atomic import replacing
from pipeal.core.errors import (
    ConfigError,
    NonFiniteError,
    OutOfMemoryError,
    SaveError,
    StallError,
    WorkerError,
    add_note,
)
from pipeal.engine.distributed.remote_errors import rebuilt, told
from tests.cli.running import run_command


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files.*lower data.workers"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "Cannot allocate memory.*lower data.workers"),
        (RuntimeError("Caught it in a worker:\n  can't start new thread"), "can't start new thread: .*raise its limit"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/b"), "a/b: No space left.*another --out"),
        (OSError(errno.EISDIR, os.strerror(errno.EISDIR), "a/epochs.jsonl"), "a/epochs.jsonl: Is a directory; move it"),
        (
            RuntimeError("could not create a primitive"),
            "oneDNN could not .*, as it does where memory runs out; lower the sizes",
        ),
        (MemoryError("72.8 TiB"), r"out of memory \(72.8 TiB\)"),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes"
            ),
            r"out of memory \(2.00 GiB wanted\); lower the sizes",
        ),
    ],
)
def test_what_the_machine_lacks_is_told_in_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command
    def command() -> None:
        raise error

    code, _, err = run_command(command, capsys)
    assert code == 1
    assert re.fullmatch(f"pipeal: .*{line}.*\n", err)


@pytest.mark.parametrize(
    "error",
    [
        NonFiniteError("layer 1: the loss is nan", 1, 7, (float("nan"),)),
        OutOfMemoryError("out of memory in stage 1", 1, 2, 7),
        SaveError("not every checkpoint was written"),
        WorkerError("a worker process died"),
        StallError("stage 1 stands still:\n  its stack"),
    ],
)
def test_what_is_nobodys_mistake_is_told_with_its_notes(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory that ran out in a stage was a user's mistake; of a stall it was not said what could not be written."""
    add_note(error, "a note")

    @click.command
    def command() -> None:
        raise error

    code, _, err = run_command(command, capsys)
    assert code == 1
    between = "\n" if isinstance(error, StallError) else "; "
    assert err == f"pipeal: {error}{between}a note\n"


def test_a_full_disk_is_no_mistake_and_a_folder_that_may_not_be_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for number, wanted in ((errno.ENOSPC, 1), (errno.EFBIG, 1), (None, 2)):

        @click.command
        def command(number: int | None = number) -> None:
            path = tmp_path / "x" if number else tmp_path / "file" / "x"
            with replacing(path):
                raise OSError(number, os.strerror(number or 0))

        code, _, err = run_command(command, capsys)
        assert (code, err.count("\n")) == (wanted, 1)
        assert err.startswith(f"pipeal: cannot write {tmp_path}")


def test_what_a_user_typed_neither_breaks_nor_paints_nor_floods_the_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command
    def command() -> None:
        raise ConfigError("found 'a\nb\x1b[31m\u2028\udcff', and " + 5_000 * "x")

    code, _, err = run_command(command, capsys)
    assert code == 2
    assert err.startswith(r"pipeal: found 'a b\x1b[31m \udcff', and xxx")
    assert len(err.splitlines()) == 1
    assert len(err) < 1_100


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "a bug"), RuntimeError("a bug")])
def test_a_bug_keeps_its_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command
    def command() -> None:
        raise error

    with pytest.raises(type(error), match="a bug"):
        run_command(command, capsys)


def test_the_group_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: all of the help as the "one line" of a mistake, with some versions of click only."""
    code, out, err = run_command(main.command, capsys)
    assert (code, err) == (0, "")
    assert "train-text" in out


def test_the_package_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m pipeal``, where the folder of commands is not on the path."""
    monkeypatch.setattr(sys, "argv", ["pipeal", "train-txt"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("pipeal", run_name="__main__")
    assert "train-text" in capsys.readouterr().err


def test_a_name_that_is_no_text_is_shown_all_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    """Symptom: `pipeal report --out` wrote a page, then ended in a UnicodeEncodeError when it named the page."""

    @click.command
    def command() -> None:
        click.echo("\udcff.html")

    assert run_command(command, capfd)[:2] == (0, "\\udcff.html\n")


def test_sigterm_is_told_as_ctrl_c_is(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command
    def command() -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run_command(command, capsys) == (143, "", "pipeal: interrupted\n")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_of_another_process_is_one_line_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: the stack that a follower's error brings along, squeezed into the one line."""

    @click.command
    def command() -> None:
        error = rebuilt(told(NonFiniteError("the loss is nan", 1, 2, (float("nan"),))), "rank 3 (stage 3) on there")
        raise error

    assert run_command(command, capsys) == (1, "", "pipeal: the loss is nan; on rank 3 (stage 3) on there\n")


def test_what_is_logged_goes_to_standard_error_as_it_is_while_a_command_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries say nothing by themselves; a command shows every line, and of many processes rank 0 does."""
    logger = logging.getLogger("pipeal.run.anything")

    @click.command
    def command() -> None:
        logger.info("reading 100% of it")
        logger.warning("left out\n2 rows")
        logger.debug("below INFO")

    assert run_command(command, capsys) == (0, "", "reading 100% of it\nleft out\n2 rows\n")
    logger.warning("after it")
    assert capsys.readouterr() == ("", "")
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert run_command(command, capsys) == (0, "", "")


def test_what_is_logged_is_written_above_a_live_line() -> None:
    """A handler with a stream of its own would write through the line, as the stream was before it came."""
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=60)

    @click.command
    def command() -> None:
        with Live("a live line", console=console, redirect_stdout=False, auto_refresh=False):
            logging.getLogger("pipeal").info("a word")

    with pytest.raises(SystemExit):
        entry.run(command, [])
    assert "a word\n" in screen.getvalue().replace("\x1b[0m", "")
