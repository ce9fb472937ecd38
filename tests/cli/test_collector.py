"""Libraries are left out of Python's garbage collections while layers learn.

A full collection looks at all that torch is made of: every stage of a process stood still for 0.1 to 0.2 s, and stages
after it had nothing to do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from pipeal import Pipeline
from pipeal.cli.text import command
from pipeal.engine.execution.collector import libraries_left_out
from tests.cli.running import run_command
from tests.line.lines import built_in_turn, run_line
from tests.line.test_line_exactness import text_line

__all__ = ["built_in_turn"]


@pytest.fixture
def nothing_left_out() -> Iterator[None]:
    """As in a process of its own; the test session leaves out what was imported before it."""
    gc.unfreeze()
    try:
        yield
    finally:
        gc.freeze()


pytestmark = pytest.mark.usefixtures("nothing_left_out", "one_thread")


def test_what_others_leave_out_stays_left_out() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with libraries_left_out():
        pass
    assert gc.get_freeze_count() == before
    gc.unfreeze()
    with suppress(ValueError), libraries_left_out():
        assert gc.get_freeze_count() > 0
        raise ValueError
    assert gc.get_freeze_count() == 0


def test_a_command_leaves_them_out_while_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def run(pipe: Pipeline, *given: Any, **named: Any) -> Any:
        seen.append(gc.get_freeze_count())
        return submit(pipe, *given, **named)

    submit = Pipeline.submit
    monkeypatch.setattr(Pipeline, "submit", run)
    options = ["--epochs=1", "--devices=cpu", "--set=model.x_hid=8", "--set=model.y_hid=8", f"--out={tmp_path}"]
    code, _, err = run_command(command, capsys, "toynews", "lstm", *options)
    assert code == 0, err
    assert median(seen) > 100_000  # trials before it make batches as well
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("built_in_turn")
def test_a_stage_of_a_line_leaves_them_out(tmp_path: Path) -> None:
    seen: list[int] = []

    def reached(_: int, place: str) -> None:
        if place == "amid batch":
            seen.append(gc.get_freeze_count())

    run_line(text_line(tmp_path, "lstm", 2), reached)
    assert min(seen) > 100_000
    assert gc.get_freeze_count() == 0
