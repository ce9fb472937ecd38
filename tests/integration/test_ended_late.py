"""A first signal asks, wherever a run is: also when its last epoch is behind, or no epoch is under way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeal.cli import text
from pipeal.run import turns
from pipeal.training.checkpoint.writer import PATIENCE_S, CheckpointWriter
from pipeal.training.position import Position
from tests.cli.test_text import varied
from tests.integration.test_resume import SMALL, assert_same, run

PLACES = [
    (Position, "next_turn", "interrupted; the same command goes on from the last checkpoint"),
    (turns, "calibrate", "interrupted after epoch 2, and saved; the same command goes on from there"),
    (turns, "draw_exits", "interrupted after the last epoch, and saved; the same command goes on from there"),
    (CheckpointWriter, "close", "interrupted after the last epoch, and saved; the same command goes on from there"),
]


@pytest.mark.slow
def test_a_first_signal_drops_nothing_and_the_last_checkpoint_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: between two turns, and from the last epoch on, it ended the run at once, without what waited."""
    arguments = (
        "agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), *SMALL, "--devices=cpu", "-r", "2",
        "--set=data.held_out=0.2",  # to calibrate the exits on
    )  # fmt: skip
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'untouched'}")
    patience = []
    for owner, name, told in PLACES:
        call = getattr(owner, name)

        def and_signal(*args: Any, call: Any = call, name: str = name, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            if name == "close":
                patience.append(args[0]._patience_s)
            return call(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, and_signal)
            err = run(text.command, capsys, 143, *arguments, f"--out={tmp_path / 'stopped'}")
        assert told in err
    assert patience == [PATIENCE_S]
    err = run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'stopped'}")
    assert "AL goes on after epoch 2" in err
    assert_same(*(tmp_path / out / "agnews-lstm-al-001" for out in ("untouched", "stopped")))
