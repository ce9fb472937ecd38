"""Measured costs and the placement they lead to."""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC, ALPackage, PlacementError
from pipeal.engine import Action
from pipeal.engine.costs import Placement, place
from pipeal.engine.measure import WARM_UP, layer_costs
from pipeal.engine.rescue import SplitWarning
from pipeal.engine.virtual import VirtualLayer
from pipeal.errors import OutOfMemoryError, first_line


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


class Crowded(VirtualLayer):
    """Fits only where no more than so many of its kind are on one device: on one thread, here."""

    def __init__(self, most: int) -> None:
        super().__init__(0.001, 0.001)
        self.most = most
        self.here: dict[int, int] = {}

    def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
        x = dict(x or {})
        own = threading.get_ident()
        x[own] = x.get(own, 0) + 1
        if x[own] > self.most:
            raise torch.OutOfMemoryError("Tried to allocate 4.00 GiB.")
        return x, y


@pytest.mark.skipif(torch.cuda.is_available(), reason="the candidates are a CPU's")
def test_a_candidate_that_does_not_fit_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the whole command, though other placements fit."""
    monkeypatch.setattr("pipeal.engine.costs.cores", lambda: 2)
    tried: list[Placement] = []
    without: list[str] = []
    chosen = place(
        [Crowded(2) for _ in range(4)],
        [(None, None)] * 6,
        "pipelined",
        on_trial=tried.append,
        on_left_out=lambda trial, error: without.append(f"{len(trial.devices)}: {first_line(error)}"),
    )
    assert [len(trial.devices) for trial in tried] == [2, 3, 4]
    assert chosen in tried
    assert len(without) == 1
    assert without[0].startswith("1: OutOfMemoryError: out of memory in the forward of stage 0, layer 2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the candidates are a CPU's")
def test_where_nothing_fits_that_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.engine.costs.cores", lambda: 2)
    with pytest.raises(OutOfMemoryError, match="in the forward of stage"):
        place([Crowded(0), Crowded(0)], [(None, None)] * 4, "pipelined")


def test_a_trial_neither_ends_for_a_loss_that_is_not_finite_nor_fails_where_the_run_would_split() -> None:
    """A copy's loss is nobody's concern, and a batch that the run learns from in parts fits."""
    package = ALPackage([AL(ENC(Tight(nn.Linear(4, 4)), nn.Linear(4, 2)), AE(nn.Linear(2, 2), nn.Linear(2, 2)))])
    batches = [(torch.full((4, 4), torch.nan), torch.randn(4, 2))] * 4
    with pytest.raises(OutOfMemoryError):
        layer_costs(package, batches)
    with pytest.warns(SplitWarning):
        assert layer_costs(package, batches, on_oom="split")[0][Action.FORWARD] > 0


class Tight(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:
            raise torch.OutOfMemoryError("Tried to allocate 4.00 GiB.")
        return self.inner(x)
