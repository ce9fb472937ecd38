"""Data parallel training is held against one process that takes the same batches to the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipeal import BP, ALPackage
from tests.benches import Benches


def verses(tmp_path: Path) -> str:
    (tmp_path / "shakespeare.txt").write_text("so it goes, and so it went.\n" * 60, encoding="utf-8")
    return str(tmp_path)


@pytest.mark.slow
def test_two_processes_come_to_the_weights_of_one(bench: Benches, tmp_path: Path) -> None:
    order = {"model": "charlm", "form": "bp", "precision": "fp32", "compile": "none", "batches": [3]}
    (row,) = bench["replicas"].hold({**order, "steps": 2, "turns": 1, "root": verses(tmp_path)}, 2)
    assert row.batch == 3
    assert len(row.alone) == len(row.beside) == len(row.many) == len(row.stolen) == len(row.gains) == 1
    assert row.ceiling == row.alone[0].step / row.beside[0]
    for turn in (*row.alone, *row.many):
        assert 0 < turn.forward + turn.backward + turn.update < turn.step
    assert row.alone[0].averaging == 0 < row.many[0].averaging
    assert 0 < row.apart < 0.02  # Adam's first steps are as long for a gradient of rounding as for any other


def test_how_far_weights_are_apart_is_told_as_a_share_of_their_way(bench: Benches) -> None:
    def package(weight: float) -> ALPackage:
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, weight)
        nn.init.zeros_(model.bias)
        return ALPackage([BP(model)])

    assert bench["replicas"].apart(package(1.0), package(3.0), package(3.5)) == pytest.approx(0.25)


def test_a_setting_says_how_many_samples_a_batch_has(bench: Benches, tmp_path: Path) -> None:
    task = bench["rung_data"].task_of("charlm", torch.device("cpu"), verses(tmp_path))
    setting = bench["rungs"].Setting
    sizes = [len(next(task.batches(setting("bp", batch=batch), 0))) for batch in (None, 5)]
    assert sizes == [task.experiment.config.data.batch_size, 5]


def test_processes_are_held_against_one_with_batches_of_the_same_size(
    bench: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of charlm's usual batch takes nearly as long as all of it: processes could not be faster."""
    monkeypatch.setattr(bench["rungs"], "cores", lambda: 2)
    for model, batch in (("charlm", 64), ("resnet", None)):
        alone, many = bench["rungs"].rungs_of(model, "bp", torch.device("cpu"))[-2:]
        assert (alone.setting.threads, many.setting.processes) == (1, 2)
        assert alone.setting.batch == many.setting.batch == batch
        assert ("batches of 64" in alone.name) == ("batches of 64" in many.name) == (batch is not None)
