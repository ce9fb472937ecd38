"""``--resume RUN/checkpoints/step-N``: the run goes on from that one, and those that came after it are of the past."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeal.cli import text
from tests.cli.running import told_one_line
from tests.cli.test_text import leaves, varied
from tests.integration.test_resume import SMALL, Stopping, assert_same, run, stopping

__all__ = ["stopping"]


def test_a_run_goes_on_from_the_checkpoint_that_is_named_and_not_from_later_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    arguments = (
        "agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), *SMALL, "--devices=cpu",
        f"--out={tmp_path / 'runs'}", "--set=train.checkpoint.keep=50",
    )  # fmt: skip
    run(text.command, capsys, 0, *arguments)
    folder, untouched = tmp_path / "runs" / "agnews-lstm-al-001", tmp_path / "untouched"
    shutil.copytree(folder, untouched)

    stopping.at = [(1, 6)]
    named = folder / "checkpoints" / "step-000000004"
    err = run(text.command, capsys, 130, *arguments, f"--resume={named}")
    assert "AL goes on after batch 4 of epoch 1" in err
    err = run(text.command, capsys, 0, *arguments)
    assert "AL goes on after batch 6 of epoch 1" in err
    assert_same(untouched, folder)

    stopping.at = [(1, 4)]  # before anything is saved again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeal.train.keeper.CheckpointKeeper._save", kill)
        with pytest.raises(Killed):
            text.command.main([*arguments, f"--resume={named}"], standalone_mode=False)
    err = run(text.command, capsys, 0, *arguments)
    assert "AL goes on after batch 4 of epoch 1" in err
    assert_same(untouched, folder)

    (folder / "checkpoints" / "step-000000008" / "manifest.json").unlink()
    for name, line in {
        "step-000000008": "manifest.json is missing",
        "step-000000999": "manifest.json is missing",
    }.items():
        told_one_line(line, *leaves(capsys, *arguments, f"--resume={folder / 'checkpoints' / name}"))


class Killed(BaseException):
    """As good as ``kill -9``."""


def kill(*_: object, **__: object) -> None:
    raise Killed
