"""What is kept and shown of a run that came to its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from pipeal.cli.outcome import Outcome, show
from pipeal.config import TextConfig
from pipeal.train.position import Totals
from pipeal.train.recorders import EpochRow


def outcome(folder: Path, **totals: object) -> Outcome:
    config = TextConfig(dataset="toynews")
    config = replace(config, engine=replace(config.engine, devices=("cpu",)))
    known = Totals(seconds=2.0, batches=4, samples=12, tokens=60, padded=70, shapes=Counter({(4, 10): 3}))
    row = EpochRow(1, 1, 0.5, 0.5, 2.0, 2.0, 6.0, 30.0)
    return Outcome(config, [row], replace(known, **totals), {}, None, (1, 1), folder)  # type: ignore[arg-type]


def test_a_batch_that_was_left_out_makes_the_others_no_smaller(tmp_path: Path) -> None:
    """Its samples were not counted, and it was."""
    summary = outcome(tmp_path, left_out={(1, 2)}).summary()
    assert (summary["samples_per_batch"], summary["batches_left_out"]) == (4.0, 1)


def test_only_pictures_that_are_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path of a timeline was printed that a full disk had kept from being drawn."""
    one = replace(outcome(tmp_path), lengths=None)
    (tmp_path / "curves.png").touch()
    one.totals.tokens = 0
    show([one], tmp_path)
    out = capsys.readouterr().out
    assert f"files:    {tmp_path}\ncurves:   {tmp_path / 'curves.png'}\n" in out
    assert "timeline" not in out
    (tmp_path / "timeline.png").touch()
    show([one], tmp_path)
    assert f"timeline: {tmp_path / 'timeline.png'}\n" in capsys.readouterr().out
