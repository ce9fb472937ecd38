"""Measured costs and the placement they lead to."""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from bench.virtual import VirtualLayer
from torch import nn

from pipeal import AE, AL, ENC, ALPackage, Pipeline, PlacementError
from pipeal.core.errors import OutOfMemoryError, first_line
from pipeal.core.options import EngineOptions
from pipeal.engine import SCHEDULES, Action
from pipeal.engine.runner.split import SplitWarning
from pipeal.engine.sizes import layers_of_stages
from pipeal.planning import simulate
from pipeal.planning.measure.layers import WARM_UP, layer_costs
from pipeal.planning.placement import Placement
from pipeal.planning.planner import fit, place
from pipeal.planning.search import _in_the_long_run


@pytest.fixture(autouse=True)
def no_omp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine's own environment says of threads, and how busy it is, is not what is tested here."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("pipeal.planning.planner.is_busy", lambda: False)


@pytest.mark.usefixtures("counted_clock")
def test_costs_are_those_of_the_layers() -> None:
    layers = [VirtualLayer(2.0, 4.0), VirtualLayer(6.0, 1.0, 0.5)]
    found = layer_costs(layers, [(None, None)] * (WARM_UP + 3))
    assert [[cost[action] for action in Action] for cost in found] == [[2.0, 4.0, 0.0], [6.0, 1.0, 0.5]]


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(PlacementError, match=f"{WARM_UP} batches"):
        layer_costs([VirtualLayer(0, 0)], [(None, None)] * WARM_UP)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the candidates are a CPU's")
def test_layers_that_overlap_get_several_stages_and_lopsided_ones_are_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.planning.planner.cores", lambda: 2)
    times = [(1.0, 2.0)] * 3 + [(3.0, 6.0)]
    costs = [dict(zip(Action, (*own, 0.0), strict=True)) for own in times]

    def trial(search: Any, candidate: Placement, _: Any) -> float:
        if search.costs is None:
            assert candidate.sizes == [4]
            search.costs = costs
        stages = [
            {action: sum(costs[layer][action] for layer in own) for action in Action}
            for own in layers_of_stages(candidate.sizes)
        ]
        return simulate(SCHEDULES["pipelined"], stages, 8).makespan_s / 8_000

    monkeypatch.setattr("pipeal.planning.search.Search._measure", trial)
    layers = [VirtualLayer(*own) for own in times]
    tried: list[Placement] = []
    chosen = place(layers, [(None, None)] * 8, "pipelined", on_trial=tried.append)
    assert [(len(trial.devices), trial.threads) for trial in tried] == [(1, 2), (1, 1), (2, 1), (3, 1), (4, 1)]
    assert len(chosen.devices) > 1
    assert tried[2].sizes == [3, 1]
    assert chosen.seconds_per_batch == min(trial.seconds_per_batch or 0 for trial in tried)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the candidates are a CPU's")
def test_what_is_tried_is_what_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials had queues of two packets and a share of the cores each, whatever the run was to have."""
    monkeypatch.setattr("pipeal.planning.planner.cores", lambda: 2)
    opened: list[tuple[int, Any, Any]] = []

    class Told(Pipeline):
        def __init__(self, layers: Any, devices: Any, *arguments: Any, **options: Any) -> None:
            opened.append((len(devices), options["options"].threads, options["options"].queue_depth))
            super().__init__(layers, devices, *arguments, **options)

    monkeypatch.setattr("pipeal.planning.search.Pipeline", Told)
    layers, batches = [VirtualLayer(0, 0), VirtualLayer(0, 0)], [(None, None)] * 4
    chosen = place(layers, batches, "pipelined", EngineOptions(threads=3, queue_depth=5), devices=["cpu"], rounds=1)
    assert (opened, chosen.threads) == ([(1, 3, 5), (2, 3, 5)], 3)
    opened.clear()
    place(layers, batches, "pipelined", rounds=1)
    assert opened == [(1, 2, 2), (2, 1, 2), (1, 1, 2)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the candidates are a CPU's")
def test_one_layer_is_tried_on_fewer_threads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had all cores, unasked: a small model on many of them mostly waits for threads."""
    monkeypatch.setattr("pipeal.planning.planner.cores", lambda: 12)
    took = {12: 3.0, 6: 2.0, 3: 1.0, 1: 1.5}
    monkeypatch.setattr("pipeal.planning.search.Search._measure", lambda _, candidate, __: took[candidate.threads])
    tried: list[Placement] = []
    chosen = place([VirtualLayer(0, 0)], [(None, None)] * 4, "sequential", on_trial=tried.append)
    assert {trial.threads: trial.seconds_per_batch for trial in tried} == took
    assert (chosen.devices, chosen.threads) == (["cpu"], 3)
    assert place([VirtualLayer(0, 0)], [], "sequential", EngineOptions(threads=4)).threads == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="the candidates are a CPU's")
def test_on_a_busy_machine_one_thread_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads took 17 s for a batch there and one 0.3 s; there was nothing yet to drop them for."""
    monkeypatch.setattr("pipeal.planning.planner.cores", lambda: 4)
    monkeypatch.setattr("pipeal.planning.planner.is_busy", lambda: True)
    order: list[int] = []
    monkeypatch.setattr(
        "pipeal.planning.search.Search._measure", lambda _, candidate, __: order.append(candidate.threads) or 1.0
    )
    place([VirtualLayer(0, 0)], [(None, None)] * 4, "sequential")
    assert order[0] == 1


def test_devices_that_are_not_here_are_told() -> None:
    for devices in (["tpu"], ["cuda:999"], []):
        with pytest.raises(PlacementError):
            place([VirtualLayer(0, 0)], [(None, None)] * 4, "pipelined", devices=devices)


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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the candidates are a CPU's")
def test_a_candidate_that_does_not_fit_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the whole command, though other placements fit."""
    monkeypatch.setattr("pipeal.planning.planner.cores", lambda: 2)
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
    assert len(without) == 2  # one stage, with as many threads as there are cores, and with one
    told = "1: OutOfMemoryError: out of memory in the forward of stage 0, layer 2"
    assert all(text.startswith(told) for text in without)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the candidates are a CPU's")
def test_where_nothing_fits_that_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.planning.planner.cores", lambda: 2)
    with pytest.raises(OutOfMemoryError, match="in the forward of stage"):
        place([Crowded(0), Crowded(0)], [(None, None)] * 4, "pipelined")


def test_a_trial_neither_ends_for_a_loss_that_is_not_finite_nor_fails_where_the_run_would_split() -> None:
    """A copy's loss is nobody's concern, and a batch that the run learns from in parts fits."""
    package = ALPackage([AL(ENC(Tight(nn.Linear(4, 4)), nn.Linear(4, 2)), AE(nn.Linear(2, 2), nn.Linear(2, 2)))])
    batches = [(torch.full((4, 4), torch.nan), torch.randn(4, 2))] * 4
    with pytest.raises(OutOfMemoryError):
        layer_costs(package, batches)
    with pytest.warns(SplitWarning):
        assert layer_costs(package, batches, EngineOptions(on_oom="split"))[0][Action.FORWARD] > 0


def test_stages_by_number_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory did not suffice to measure layers, and they were divided by number without a word."""
    monkeypatch.setattr("pipeal.planning.search.layer_costs", Mock(side_effect=MemoryError))
    steps: list[str] = []
    layers, batches = [VirtualLayer(0, 0) for _ in range(4)], [(None, None)] * 4
    taken = fit(
        layers, batches, "pipelined", ["cpu"] * 2, EngineOptions(threads=1), on_step=lambda step, *_: steps.append(step)
    )
    assert taken.sizes == [2, 2]
    assert steps[-1] == "layers are divided by number: memory does not suffice to measure them"


class Tight(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:
            raise torch.OutOfMemoryError("Tried to allocate 4.00 GiB.")
        return self.inner(x)


def test_a_trial_of_few_batches_is_reckoned_without_the_filling_of_its_stages() -> None:
    stage = {Action.FORWARD: 1.0, Action.BACKWARD: 2.0, Action.UPDATE: 0.0}
    # Four such stages take 3 s for each batch, and 3 s more until the first has come to the last of them.
    wanted = ((3 * 64 + 3) / 64) / ((3 * 2 + 3) / 2)
    assert _in_the_long_run(SCHEDULES["pipelined"], [stage] * 4, 2) == pytest.approx(wanted)
    assert _in_the_long_run(SCHEDULES["sequential"], [stage] * 4, 2) == 1
