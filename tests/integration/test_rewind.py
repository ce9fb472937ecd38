"""A run that meets a poisonous batch goes back, leaves it out, and ends as one that knew of it from the start."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeal.cli import text
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.position import Position
from pipeal.training.rewind import MOST_LEFT_OUT
from tests.cli.test_text import leaves, varied
from tests.integration.processes import held
from tests.integration.test_resume import ROOT, SMALL, Stopping, assert_same, run, stopping

__all__ = ["stopping"]

REWIND = "--set=train.on_non_finite=stop-and-rewind"
NAME = "agnews-transformer-al-001"
POISON = """
import torch
from torch import nn

lookup = nn.Embedding.forward

def forward(self, x):
    found = lookup(self, x)
    return found * torch.nan if self.training and bool((x == 100).any()) else found
"""


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom layer that cannot bear one word, which stands in one text: in one batch of each epoch."""
    names: dict[str, Any] = {}
    exec(POISON, names)
    monkeypatch.setattr(torch.nn.Embedding, "forward", names["forward"])


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[str, ...]:
    return (
        "agnews", "transformer", "--data-root", str(varied(tmp_path / "data")), "--devices=cpu*2", *SMALL, REWIND,
    )  # fmt: skip


def left_out(folder: Path) -> set[tuple[int, int]]:
    saved = CheckpointStore(folder / "checkpoints").newest(pytest.fail)
    assert saved is not None
    return Position.of(saved.state["training"], []).totals.left_out


@pytest.mark.usefixtures("poison")
@pytest.mark.slow
def test_the_batch_is_left_out_wherever_the_run_is_stopped_or_killed(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    err = run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'untouched'}")
    told = re.findall(
        r"layer 0 has a loss that is not finite on batch (\d+) of turn 1, which is left out from now", err
    )
    folder = tmp_path / "untouched" / NAME
    assert left_out(folder) == {(1, int(batch)) for batch in told}
    assert len(told) == 2  # one in each epoch
    assert len(re.findall(r"going back to where it stood after (?:batch \d+ of )?epoch \d$", err, re.MULTILINE)) == 2
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["batches_left_out"] == 2
    assert summary["non_finite_updates_skipped"] == 0
    assert "nan" not in (folder / "epochs.csv").read_text()
    assert not list(folder.glob("non-finite-batch-*"))

    first, second = sorted(map(int, told))
    stopping.at = [(1, first + 1), (1, first + 2), (1, second)]
    for code in (130, 130, 130, 0):
        run(text.command, capsys, code, *arguments, f"--out={tmp_path / 'stopped'}")
    assert_same(folder, tmp_path / "stopped" / NAME)
    assert left_out(tmp_path / "stopped" / NAME) == left_out(folder)

    in_time = held(tmp_path / "never", epoch=1)  # to be killed
    poisoned = f"{POISON}\nnn.Embedding.forward = forward\n{in_time}\nfrom pipeal.cli.text import main\nmain()"
    command = [sys.executable, "-c", poisoned, *arguments, f"--out={tmp_path / 'k'}"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "going back to where" in line:
                break
        else:
            pytest.fail("it ended without going back")
    finally:
        process.kill()
        process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'k'}")
    assert_same(folder, tmp_path / "k" / NAME)


@pytest.mark.slow
@pytest.mark.usefixtures("poison")
def test_offloaded_layers_go_back_as_others_do(
    arguments: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stopping: Stopping,
) -> None:
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'plain'}")
    batch = min(batch for _, batch in left_out(tmp_path / "plain" / NAME))
    monkeypatch.setattr("pipeal.engine.state.mapped_file._SMALL", 1)
    stopping.at = [(1, batch + 2)]
    offload, folder = "--set=engine.offload=disk", tmp_path / "offloaded"
    err = [run(text.command, capsys, code, *arguments, offload, f"--out={folder}") for code in (130, 0)]
    assert err[1].count("going back to where it stood") == 2
    assert_same(tmp_path / "plain" / NAME, folder / NAME)


@pytest.mark.slow
@pytest.mark.usefixtures("poison")
def test_it_is_as_if_the_batch_had_been_passed_over_from_the_start(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'found'}")
    known = left_out(tmp_path / "found" / NAME)
    begin = Position.__init__

    def knowing(self: Position, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.totals.left_out |= known

    monkeypatch.setattr(Position, "__init__", knowing)
    err = run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'known'}")
    assert "going back" not in err
    assert_same(*(tmp_path / out / NAME for out in ("found", "known")))


def test_a_run_that_diverges_goes_back_so_often_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No batch is to blame for a learning rate."""
    code, _, err = leaves(
        capsys, "agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), "--devices=cpu", *SMALL, REWIND,
        "--set=train.lr.base=1e38", "--set=train.lr.warmup=0", f"--out={tmp_path}",
    )  # fmt: skip
    folder = tmp_path / "agnews-lstm-al-001"
    assert code == 1
    assert err.count("which is left out from now on") == MOST_LEFT_OUT
    assert err.count("going back to where it stood after batch 0 of epoch 1") <= 2 * MOST_LEFT_OUT + 1
    (kept,) = folder.glob("non-finite-batch-*.pt")
    assert f"the batch is kept in {kept}" in err
    assert "8 batches of this epoch were left out before, the most there may be: the model diverges" in err
    assert "stop-and-rewind" not in err, "which it was told already"
    assert "Traceback" not in err
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"
