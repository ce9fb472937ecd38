"""How the tests of commands run them: in this process, as a user's shell would see them."""

from __future__ import annotations

import click
import pytest

from pipeal.cli import entry


def run_command(command: click.Command, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    with pytest.raises(SystemExit) as end:
        entry.run(command, list(arguments))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err
