"""What all methods share, shown by one that is not one of pipeal's: its layers, its losses, a run of a command."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeal.core.methods import METHODS, Loss
from tests.integration.test_resume import FEW, SMALL

ROOT = Path(__file__).parents[2]

TWIN = '''
"""A method with two losses: cross entropy, and how far features are from the mean of their class."""

import sys

import torch
from torch import nn

from pipeal.core import methods

methods.METHODS["twin-losses"] = methods.Method(
    "twin-losses", "Twin", "twin form (two losses)", (methods.Loss("cross entropy"), methods.Loss("class spread loss"))
)
methods.MODES = (*methods.METHODS, methods.COMPARE)
sys.modules["pipeal.methods.twin_losses"] = sys.modules[__name__]

from pipeal.core.protocols import TURN, UP
from pipeal.core.tree import detach
from pipeal.methods.layer import LocalLayer
from pipeal.methods.optimizers import one_rate, open_optimizer


class Twin(LocalLayer):
    def __init__(self, f, pool, head, lr, optimizer):
        super().__init__()
        self.f, self.pool, self.head = f, pool, head
        self.opt = open_optimizer(optimizer, self, lr)

    def forward(self, x, y):
        out = self.f(x)
        vectors = self.pool(out)
        same = nn.functional.one_hot(y).to(vectors.dtype)
        means = (same.t() @ vectors) / same.sum(0).clamp(min=1).unsqueeze(1)
        spread = 1000 + (vectors - means[y]).square().mean()  # so that no one takes it for the other
        self.keep(nn.functional.cross_entropy(self.head(vectors), y), spread)
        return detach(out), y

    def blocks(self):
        return {UP: self.f, TURN: nn.Sequential(self.pool, self.head)}


def make_layers(network, lr, optimizer):
    parts = ((part, nn.Linear(part.width, network.outputs)) for part in network.parts())
    return (Twin(part.f, part.pool, head, one_rate(lr, "twin"), optimizer) for part, head in parts)


if __name__ == "__main__":
    from pipeal.cli.main import main

    main()
'''


def test_columns_of_existing_folders_stay() -> None:
    assert [loss.column for loss in METHODS["al"].losses] == ["enc", "ae"]
    assert [loss.tag for loss in METHODS["al"].losses] == ["associated", "autoencoder"]
    assert [len(METHODS[name].losses) for name in ("bp", "greedy")] == [1, 1]  # without a name: loss_1
    assert Loss("class spread loss").column == Loss("class spread loss").tag == "class_spread"


def test_losses_of_a_registered_method_go_by_its_names(tmp_path: Path) -> None:
    """A second method with two losses got the columns of AL, ``loss_1_enc`` and ``loss_1_ae``."""
    script = tmp_path / "twin.py"
    script.write_text(TWIN)
    folder = tmp_path / "toynews-lstm-twin-losses-001"

    def run(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stderr

    told = run(
        "train-text", "toynews", "lstm", "--mode=twin-losses", "--devices=cpu*2", *SMALL, *FEW, "--epochs=1",
        "--set=train.tensorboard=true", f"--out={tmp_path}",
    )  # fmt: skip
    assert "training the twin form (two losses) of lstm" in told
    (row,) = csv.DictReader((folder / "epochs.csv").open())
    losses = {name: float(value) for name, value in row.items() if name.startswith("loss_")}
    assert list(losses) == [f"loss_{n}_{part}" for n in range(1, 5) for part in ("cross_entropy", "class_spread")]
    assert all((loss > 999) == name.endswith("_class_spread") for name, loss in losses.items())
    run("report", str(folder), f"--out={tmp_path / 'page.html'}")
    page = (tmp_path / "page.html").read_text()
    assert "Cross entropy by layer" in page
    assert "Class spread loss by layer" in page
    assert "Associated loss" not in page

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder / "tensorboard" / "turn-1"))
    read.Reload()
    found = {tag for tag in read.Tags()["scalars"] if tag.startswith("loss/layer_")}
    assert found == {f"loss/layer_{n}/{part}" for n in range(1, 5) for part in ("cross_entropy", "class_spread")}
