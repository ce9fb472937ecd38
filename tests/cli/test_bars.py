"""What is shown before training: in a terminal it moves by itself, elsewhere it is a line for each step or nothing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeal.reporting import bars


def test_without_a_terminal_only_trials_have_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Bars that never began printed an empty line as they ended."""
    with bars.downloads() as fetching, bars.decodings() as decoding:
        fetching.begin("reading it")
        fetching.close()
        del decoding
    with bars.Steps("reading") as reading:
        reading("a file")
    assert capsys.readouterr().err == ""
    with bars.trials("choosing devices") as step:
        step("trying cpu × 2", 1.0, 20.0)
    assert capsys.readouterr().err == "  trying cpu × 2\n"


def test_in_a_terminal_steps_are_one_line_that_goes() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with bars.Steps("choosing devices", console=console) as step:
        step("trying cpu × 2", 1.0, 20.0)
    assert "choosing devices: trying cpu × 2" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[2K")  # erased
