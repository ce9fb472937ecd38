"""Which batches are traced, what is said of checkpoints that are not there, what is computed once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pipeal.config import TextConfig
from pipeal.core.errors import ConfigError, CountingError, first_line
from pipeal.engine import Window
from pipeal.reporting import batches as batches_module
from pipeal.reporting.batches import Batches
from pipeal.run.find_run import find_run, new_run
from pipeal.run.forms import Form
from pipeal.run.opening import window_of
from pipeal.run.training import _costs, _newest, require_same_length
from pipeal.run.turns import Turns
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.position import Part, Position
from pipeal.training.row import EpochRow


class Epochs:
    """Epochs of so many batches each."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.epoch = lengths, 0

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.lengths[self.epoch]


@pytest.mark.parametrize(
    ("epoch", "done", "window"),
    [
        (0, 0, Window(10, 24)),  # a new run: the pipeline is full by then
        (0, 40, Window(10, 24)),  # enough is left of the epoch
        (0, 95, Window(5 + 10, 24)),  # not here: in the next epoch
        (0, 100, Window(10, 24)),  # trained, but not evaluated
        (1, 60, Window(0, 20)),  # the last epoch: what is left of it
        (1, 80, None),
        (2, 0, None),
        (3, 0, None),  # asked for fewer epochs than it has had
    ],
)
def test_the_traced_batches_are_still_to_come(epoch: int, done: int, window: Window | None) -> None:
    """A run taken up near an epoch's end had an empty timeline, and kept it."""
    asked = TextConfig(dataset="toynews")
    config = replace(asked, train=replace(asked.train, epochs=5), engine=replace(asked.engine, trace_batches=24))
    batches: Any = Epochs(100, *[80] * 4)
    position = Position(epoch=epoch if epoch == 0 else 4 + epoch - 1, part=Part(batches=done))
    assert window_of(config, batches, position) == window


def test_a_run_without_a_good_checkpoint_says_that_it_starts_over(tmp_path: Path, said: list[str]) -> None:
    with CheckpointStore(tmp_path / "checkpoints") as store:
        assert _newest(store, "AL") is None
        assert said == [f"there is no checkpoint in {store.folder} yet: AL begins at its first batch"]
        for step in (1, 2):
            store.save(step, {0: {"w": 1}}, {}, {})
            (store.folder / f"step-{step:09d}" / "layer-000.safetensors").write_bytes(b"")
        said.clear()
        assert _newest(store, "AL") is None
    assert len(said) == 3
    assert said[-1] == f"no checkpoint in {store.folder} is as it was written: AL starts over in the same folder"


def test_a_run_in_its_second_turn_keeps_its_epochs(tmp_path: Path) -> None:
    """Symptom: one turn of one epoch and one of two, under one mean of last epochs, which was of the second alone."""
    asked = TextConfig(dataset="toynews", out=str(tmp_path))
    asked = replace(asked, train=replace(asked.train, epochs=1, repeat=2))
    longer = replace(asked, train=replace(asked.train, epochs=2))
    with new_run(asked) as run:
        path = run.path
    positions = [Position(), Position(2, rows=[EpochRow(1, 1, 0.5, 0.5, 2.0, 2.0, 6.0, 30.0)])]
    with CheckpointStore(path / "checkpoints") as store:
        saved = [
            store.save(step, {0: {"w": 1}}, {}, {"training": position.state(), "data": {}}, epoch={"losses": []})
            for step, position in enumerate(positions, 1)
        ]

    def goes_on(config: TextConfig, resume: Path) -> None:
        found = find_run(config, str(resume))
        assert found is not None
        with found:
            require_same_length(found, Form("al", "AL", "al", config))

    goes_on(asked, path)
    goes_on(longer, saved[0])
    told = r"train.epochs: found 2, but .*-001 is in turn 2 of 2, and those before had 1, .*; give 1, or --resume never"
    with pytest.raises(ConfigError, match=told):
        goes_on(longer, path)
    found = find_run(longer, str(saved[0]))
    assert found is not None
    with found:
        found.keep_asked()  # and it ends before its next checkpoint
    with pytest.raises(ConfigError, match=told):
        goes_on(longer, path)
    goes_on(asked, path)


def not_countable() -> CountingError:
    error = CountingError("FLOPs cannot be counted: KeyError: 'way'")
    error.__cause__ = KeyError("way")
    return error


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), torch.OutOfMemoryError("no room"), not_countable(), RuntimeError("a bug")]
)
def test_costs_that_are_not_counted_fail_no_run(
    error: Exception, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """All epochs were behind it, and a column of its table failed it."""
    monkeypatch.setattr("pipeal.run.training.form_costs", Mock(side_effect=error))
    form = Form("al", "AL", "al", TextConfig(dataset="toynews"))
    if str(error) == "a bug":
        with pytest.raises(RuntimeError, match="a bug"):
            _costs(Mock(), form)
        return
    assert _costs(Mock(), form) is None
    assert said == [f"the costs of AL are not counted: {first_line(error)}"]


def test_exits_whose_costs_cannot_be_counted_fail_no_run(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr("pipeal.run.turns.calibrate", Mock(side_effect=not_countable()))
    monkeypatch.setattr("pipeal.run.turns.first_batches", Mock(return_value=[]))
    turns = Mock()
    turns.outcome.config, turns.outcome.experiment.criterion = TextConfig(dataset="toynews"), None
    assert Turns._measure_exits(turns, Mock()) is None
    assert said[-1] == "exits are not measured: FLOPs cannot be counted: KeyError: 'way'"


def test_random_batches_are_made_once_to_compare_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    share = batches_module.padding_share
    monkeypatch.setattr(batches_module, "padding_share", lambda *args: calls.append(1) or share(*args))
    batches = Batches(Counter({(4, 7): 3}), np.array([1, 7, 3, 5]))
    batches.summary()
    batches.draw(tmp_path / "x.png", "", 0.1)
    assert batches.padding_of_random > 0
    assert len(calls) == 1
