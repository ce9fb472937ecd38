"""Who writes in the run's folder of a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeal.config import TextConfig, load_config
from pipeal.core.errors import ConfigError, DataError
from pipeal.line.top import Top
from pipeal.reporting.page import read_runs
from pipeal.run.find_run import find_run

CONFIG = load_config(TextConfig, values={"dataset": "agnews", "train": {"mode": "al"}})


def top(folder: Path) -> Top:
    return Top(folder, "the line", CONFIG, {}, None)


def begun(folder: Path) -> Top:
    found = top(folder)
    found.begin(CONFIG, {})
    return found


def state_of(folder: Path) -> str:
    (run,) = read_runs(folder)
    return run.status.state


def by_one_process(folder: Path) -> None:
    """Takes the run up, and ends at once."""
    run = find_run(CONFIG, str(folder))
    assert run is not None
    with run:
        run.begin()


def test_no_process_takes_up_the_run_of_a_line_at_work(tmp_path: Path) -> None:
    """Symptom: it was let in, both wrote there, and the line found its run gone when it was started again. Of the line
    at work `pipeal runs` said that it had died."""
    first = begun(tmp_path)
    assert state_of(tmp_path) == "running"
    with pytest.raises(ConfigError, match="another process works at this run; wait for it, or end it"):
        by_one_process(tmp_path)
    first.close()
    assert state_of(tmp_path) == "died"
    again = top(tmp_path)
    again.go_on(first.state(), ended=False)
    assert state_of(tmp_path) == "running"
    again.close()
    by_one_process(tmp_path)


def test_a_line_waits_for_no_process_that_works_at_its_run(tmp_path: Path) -> None:
    first = begun(tmp_path)
    first.close()
    run = find_run(CONFIG, str(tmp_path))
    assert run is not None
    with run:
        for go_on in (lambda one: one.go_on(first.state(), ended=False), lambda one: one.begin(CONFIG, {})):
            with pytest.raises(DataError, match="another process works at this run"):
                go_on(top(tmp_path))
        top(tmp_path).go_on(first.state(), ended=True)  # it writes no more


def test_a_line_is_told_that_one_process_has_gone_on_with_its_run(tmp_path: Path) -> None:
    """Symptom: the run was to be put back, though it was there."""
    first = begun(tmp_path)
    first.close()
    by_one_process(tmp_path)
    again = top(tmp_path)
    with pytest.raises(
        DataError, match=r"as this line left it: .* one process has gone on with it, .*pipeal line init --resume "
    ):
        again.go_on(first.state(), ended=False)
    again.close()
    by_one_process(tmp_path)


def test_a_run_that_is_whole_is_for_others_while_the_stage_waits_for_its_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_: Any) -> None:
        """Without layers there is no checkpoint."""

    monkeypatch.setattr(Top, "_save", nothing)
    last = begun(tmp_path)
    last.save(ended=False)
    assert state_of(tmp_path) == "running"
    last.save(ended=True)
    by_one_process(tmp_path)
    last.close()
