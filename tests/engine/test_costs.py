"""Measured costs and the placement they lead to."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC, ALPackage, PlacementError
from pipeal.engine import Action
from pipeal.engine.costs import WARM_UP, Placement, layer_costs, place
from pipeal.engine.virtual import VirtualLayer


def test_costs_are_those_of_the_layers() -> None:
    layers = [VirtualLayer(0.002, 0.004), VirtualLayer(0.006, 0.001)]
    first, second = layer_costs(layers, [(None, None)] * (WARM_UP + 3))
    assert 0.002 <= first[Action.FORWARD] < second[Action.FORWARD]
    assert second[Action.BACKWARD] < first[Action.BACKWARD]


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(PlacementError, match=f"{WARM_UP} batches"):
        layer_costs([VirtualLayer(0, 0)], [(None, None)] * WARM_UP)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the candidates are a CPU's")
def test_layers_that_overlap_get_several_stages_and_lopsided_ones_are_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.engine.costs.cores", lambda: 2)
    layers = [VirtualLayer(0.001, 0.002) for _ in range(3)] + [VirtualLayer(0.003, 0.006)]
    tried: list[Placement] = []
    chosen = place(layers, [(None, None)] * 8, "pipelined", on_trial=tried.append)
    assert [len(trial.devices) for trial in tried] == [1, 2, 3, 4]
    assert len(chosen.devices) > 1
    assert tried[1].sizes == [3, 1]
    assert chosen.seconds_per_batch == min(trial.seconds_per_batch or 0 for trial in tried)


def test_trials_leave_the_layers_as_they_were() -> None:
    package = ALPackage([AL(ENC(nn.Linear(4, 4), nn.Linear(4, 2)), AE(nn.Linear(2, 2), nn.Linear(2, 2)))] * 1)
    before = deepcopy(package.state_dict())
    place(package, [(torch.randn(3, 4), torch.randn(3, 2))] * 4, "pipelined")
    assert all(torch.equal(before[name], value) for name, value in package.state_dict().items())
