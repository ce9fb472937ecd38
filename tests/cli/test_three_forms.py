"""A comparison on several devices has the published baseline as well: backpropagation spread over the same ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeal.cli.text import command
from pipeal.config import TextConfig
from pipeal.run.experiment import _check_taken_up
from pipeal.run.find_run import new_run
from pipeal.run.forms import Form
from tests.cli.running import run_command
from tests.cli.test_text import agnews

SMALL = (
    "agnews", "lstm", "--mode=compare", "--epochs=2", "--set=engine.threads=1", "--set=model.embedding_dim=4",
    "--set=model.x_hid=4", "--set=model.y_hid=4", "--set=train.train_accuracy_samples=50",
)  # fmt: skip

TIMED = ("train_time", "epoch_time", "samples_per_s", "tokens_per_s")


def rows(path: Path) -> list[dict[str, str]]:
    """Without what differs from run to run."""
    return [
        {key: value for key, value in row.items() if key not in TIMED}
        for row in csv.DictReader((path / "epochs.csv").open())
    ]


def test_backpropagation_over_the_devices_is_a_third_row_with_the_figures_of_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = agnews(tmp_path / "data", count=100)
    options = (*SMALL, f"--data-root={root}", f"--out={tmp_path / 'runs'}")
    code, out, err = run_command(command, capsys, *options, "--devices=cpu,cpu")
    assert code == 0, err
    folder = tmp_path / "runs" / "agnews-lstm-compare-001"
    assert rows(folder / "bp-spread") == rows(folder / "bp") != rows(folder / "al")
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary) == ["AL", "BP", "BP over 2"]
    assert [len(summary[form]["devices"]) for form in summary] == [2, 1, 2]
    assert [len(summary[form]["stages"]) for form in summary] == [2, 1, 2]  # busy shares, one for each device
    assert "| BP over 2 |      2 |" in out
    assert "speed-up over BP\n" in out


def test_a_row_that_goes_on_no_more_is_told(tmp_path: Path, said: list[str]) -> None:
    """It had gone from the tables, without a word."""
    with new_run(TextConfig(out=str(tmp_path))) as run:
        for name in ("al", "bp", "bp-spread"):
            (run.path / name).mkdir()
            (run.path / name / "config.yaml").touch()
        forms = [Form(name, name, name, TextConfig(), is_compared=True) for name in ("al", "bp")]  # type: ignore[arg-type]
        _check_taken_up(SimpleNamespace(facts={}), forms, run)  # type: ignore[arg-type]
    (line,) = (one for one in said if "bp" in one)
    assert line.startswith(f"{run.path / 'bp-spread'} is left as it stands: a form over several devices goes on where")


@pytest.mark.parametrize("arguments", [("--devices=cpu",), ("--devices=auto",)])
def test_on_one_device_or_those_found_by_trial_there_are_two(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = agnews(tmp_path / "data", count=100)
    code, out, err = run_command(command, capsys, *SMALL, f"--data-root={root}", f"--out={tmp_path}", *arguments)
    assert code == 0, err
    assert "BP over" not in out
