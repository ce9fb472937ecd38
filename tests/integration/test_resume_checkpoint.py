"""``--resume RUN/checkpoints/step-N``: the run goes on from that one, and those that came after it are of the past."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeal.cli import text
from pipeal.training.checkpoint.store import CheckpointStore
from tests.cli.running import told_one_line
from tests.cli.test_text import leaves, varied
from tests.integration.test_resume import SMALL, Stopping, assert_same, run, stopping

__all__ = ["stopping"]


@pytest.mark.slow
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
    assert f"--resume {folder} goes on from there" in err
    err = run(text.command, capsys, 0, *arguments, f"--resume={named}")
    assert "it has gone on from step-000000004 already: its newest checkpoint is taken" in err
    assert "AL goes on after batch 6 of epoch 1" in err
    assert_same(untouched, folder)

    stopping.at = [(1, 4)]  # before anything is saved again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeal.training.checkpoint.policy.CheckpointPolicy._save", kill)
        with pytest.raises(Killed):
            text.command.main([*arguments, f"--resume={named}"], standalone_mode=False)
    newest = CheckpointStore(folder / "checkpoints").newest(pytest.fail)
    assert newest is not None
    assert newest.step == 4, "to which a number that is not finite would send it back"
    err = run(text.command, capsys, 0, *arguments)
    assert "AL goes on after batch 4 of epoch 1" in err
    assert_same(untouched, folder)

    (folder / "checkpoints" / "step-000000008" / "manifest.json").unlink()
    for name, line in {
        "step-000000008": "manifest.json is missing",
        "step-000000999": "there is no checkpoint .*step-000000999; .*: step-0",
    }.items():
        told_one_line(line, *leaves(capsys, *arguments, f"--resume={folder / 'checkpoints' / name}"))


@pytest.mark.slow
def test_a_run_does_not_go_on_to_fewer_epochs_than_are_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    """Symptom: its next turn began with the batches of the turn before, and its checkpoints were refused."""
    arguments = ("agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), *SMALL, "--devices=cpu", "-r", "2")
    out = f"--out={tmp_path / 'runs'}"
    stopping.at = [(1, 16)]
    run(text.command, capsys, 130, *arguments, out)
    folder = tmp_path / "runs" / "agnews-lstm-al-001"
    line = r"was taken after batch \d of epoch 2, the run has 1; raise train.epochs, or start over"
    told_one_line(line, *leaves(capsys, *arguments, f"--resume={folder}", "--epochs=1"))
    run(text.command, capsys, 0, *arguments, out)


@pytest.mark.slow
def test_the_same_command_given_again_goes_on_and_does_not_go_back_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    """Symptom: a job that a batch system ended and put back into its queue went back to step 4 each time."""
    arguments = (
        "agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), *SMALL, "--devices=cpu",
        f"--out={tmp_path / 'runs'}",
    )  # fmt: skip
    folder = tmp_path / "runs" / "agnews-lstm-al-001"
    stopping.at = [(1, 6)]
    err = run(text.command, capsys, 130, *arguments, "--resume=never")
    assert f"and saved; --resume {folder} goes on from there" in err, "the same command begins anew"
    named = folder / "checkpoints" / "step-000000004"
    stopping.at = [(1, 7), (1, 11)]
    err = run(text.command, capsys, 130, *arguments, f"--resume={named}")
    assert "AL goes on after batch 4 of epoch 1" in err
    assert f"and saved; --resume {folder} goes on from there" in err
    err = run(text.command, capsys, 130, *arguments, f"--resume={named}")
    assert "AL goes on after batch 7 of epoch 1" in err
    assert not named.exists(), "only two are kept"
    assert f"it has gone on from {named.name} already: its newest checkpoint is taken" in err
    run(text.command, capsys, 0, *arguments, f"--resume={named}")

    newest = max((folder / "checkpoints").glob("step-*"))
    # It has come to its end: to go back once more is what is meant.
    told_one_line("there is no checkpoint .*: step-0", *leaves(capsys, *arguments, f"--resume={named}"))
    assert "AL goes on" in run(text.command, capsys, 0, *arguments, f"--resume={newest}")


class Killed(BaseException):
    """As good as ``kill -9``."""


def kill(*_: object, **__: object) -> None:
    raise Killed
