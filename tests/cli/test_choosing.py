"""The best epoch and checkpoint of a run, from end to end: by held-out samples, whatever the test set says."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pipeal.cli.text import command
from pipeal.run import turns
from pipeal.training.checkpoint.manifest import read_manifest
from tests.cli.running import run_command
from tests.cli.test_text import agnews

SMALL = (
    "--set=model.embedding_dim=4", "--set=model.x_hid=4", "--set=model.y_hid=4", "--set=engine.threads=1",
    "--set=train.train_accuracy_samples=50", "--set=train.checkpoint.keep=1", "--devices=cpu", "--epochs=3",
)  # fmt: skip

HELD, TEST = (0.5, 0.9, 0.6), (0.99, 0.1, 0.7)
"""What is told of each epoch: on the test set, the one that is to be chosen is the worst."""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations that tell the split by its size: 380 texts to train on, 20 held out, 400 to test."""
    told: dict[int, int] = {}

    def accuracy(_: Any, batches: Iterable[Any]) -> float:
        samples = sum(map(len, batches))
        told[samples] = told.get(samples, 0) + 1
        return {20: HELD, 400: TEST, 50: (0.2, 0.3, 0.4)}[samples][(told[samples] - 1) % 3]

    monkeypatch.setattr(turns, "accuracy", accuracy)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("mode", ["al", "bp"])
def test_a_run_reports_the_test_set_at_the_epoch_that_held_out_samples_chose(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = agnews(tmp_path / "data", count=100)
    code, out, err = run_command(
        command, capsys, "agnews", "lstm", f"--mode={mode}", *SMALL, f"--data-root={root}", f"--out={tmp_path}"
    )
    assert code == 0, err
    folder = tmp_path / f"agnews-lstm-{mode}-001"
    rows = list(csv.DictReader((folder / "epochs.csv").open()))
    assert [(float(row["held_acc"]), float(row["test_acc"])) for row in rows] == list(zip(HELD, TEST, strict=True))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["test_accuracy_at_best_held_out"], summary["last_test_accuracy"]) == (0.1, 0.7)
    assert (summary["best_epochs"], summary["best_chosen_by"]) == ([2], "held-out accuracy")
    assert summary["data"]["held_out_samples"] == 20
    for key in ("training_flops_per_sample", "inference_flops_per_sample"):
        assert summary[key] > 0
    assert summary["training_flops_per_sample"] > 2 * summary["inference_flops_per_sample"]
    counted = summary["counted_memory_bytes"]
    assert counted.pop("all") == sum(counted.values())
    assert counted["weights_bytes"] == 4 * summary["training_parameters"]
    # Layer by layer, those of the largest one are there at once.
    assert (counted["gradients_bytes"] < counted["weights_bytes"]) == (mode == "al")
    assert re.search(rf"^\| {mode.upper()} +\|.* 0.1000 +\| +0.7000 +\|", out, re.MULTILINE)
    saved = [read_manifest(path) for path in sorted((folder / "checkpoints").glob("step-*"))]
    assert [(one.position["epoch"], one.best) for one in saved] == [(2, True), (3, False)]


def test_with_nothing_held_out_only_the_last_epoch_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = agnews(tmp_path / "data", count=20)
    code, out, err = run_command(
        command, capsys, "agnews", "lstm", *SMALL, "--set=data.held_out=0", f"--data-root={root}", f"--out={tmp_path}"
    )
    assert code == 0, err
    assert "chosen:   no epoch, since nothing is held out to choose by (data.held_out is 0)" in out
    folder = tmp_path / "agnews-lstm-al-001"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test_accuracy_at_best_held_out"] is None
    assert 0 <= summary["last_test_accuracy"] <= 1
    assert "held_acc" not in (folder / "epochs.csv").read_text()
    assert [read_manifest(path).best for path in (folder / "checkpoints").glob("step-*")] == [False]
