"""How the tests of commands run them: in this process, as a user's shell would see them."""

from __future__ import annotations

import re

import click
import pytest

from pipeal.cli import entry


def run_command(command: click.Command, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    with pytest.raises(SystemExit) as end:
        entry.run(command, list(arguments))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def told_one_line(line: str, code: int, out: str, err: str) -> None:
    """A user's mistake: exit code 2, no output, and one line that matches the pattern ``line``."""
    assert code == 2
    assert out == ""
    told = [said for said in err.splitlines() if said.startswith("pipeal: ")]
    assert len(told) == 1
    assert re.search(line, told[0])
    assert "Traceback" not in err
