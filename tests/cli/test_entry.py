"""How commands end when the machine, not the user, is at fault: one line, exit code 1."""

from __future__ import annotations

import errno
import os
import re

import click
import pytest

from tests.cli.running import run_command


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files.*lower data.workers"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "Cannot allocate memory.*lower data.workers"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/b"), "a/b: No space left.*another --out"),
        (MemoryError("72.8 TiB"), r"out of memory \(72.8 TiB\)"),
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


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command
    def command() -> None:
        raise OSError(errno.EBADF, "a bug")

    with pytest.raises(OSError, match="a bug"):
        run_command(command, capsys)
