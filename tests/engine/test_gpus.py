"""Several GPUs of unequal kinds and memory: what is measured becomes a layout, and the trials have the last word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench.virtual import VirtualLayer

from pipeal import PlacementError
from pipeal.core.options import EngineOptions
from pipeal.engine.schedule import SCHEDULES
from pipeal.planning import planner
from pipeal.planning.measure import gpus
from pipeal.planning.placement import Placement
from pipeal.planning.planner import place
from pipeal.planning.pure.forecast import Model, best_forecast
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.layout import Layout, PlannedStage
from pipeal.planning.search import Search

GIB = 2**30


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two fast ones, of which one is half full, and a slow one; returns where was measured."""
    measured: list[str] = []

    def measure(layers: Any, batches: Any, _: Any, *, device: str, **options: Any) -> tuple[LayerCost, ...]:
        measured.append(device)
        seconds = 1.0 if device == "cuda:0" else 4.0
        return tuple(LayerCost(seconds, 2 * seconds, parameter_bytes=GIB) for _ in layers)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: ["fast", "slow", "fast"][int(gpu[5:])])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: ([16, 16, 6][int(gpu[5:])] * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpus, "measure", measure)
    monkeypatch.setattr(gpus, "measure_link", lambda source, target: Link())
    return measured


def test_each_kind_is_measured_once_and_memory_and_speed_decide(three_gpus: list[str]) -> None:
    names, schedule = ["cuda:0", "cuda:1", "cuda:2"], SCHEDULES["pipelined"]
    layout = gpus.layout_on_gpus([VirtualLayer(0, 0)] * 7, [], names, schedule)
    assert three_gpus == ["cuda:0", "cuda:1"]
    # Of 5.4 GiB that may be filled, two layers with their gradients take 4; the slow one is as fast with one layer as
    # the fast one with four.
    assert {stage.devices: len(stage.layers) for stage in layout.stages} == {(0,): 4, (2,): 2, (1,): 1}


def test_only_the_gpus_named_are_used_and_the_layout_is_that_for_the_schedule(
    three_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layouts were always those of a pipeline without joins, and always of all GPUs."""
    monkeypatch.setattr(Search, "_measure", lambda _, candidate, __: 1.0 / len(candidate.devices))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (24 * GIB, 24 * GIB))
    layers = [VirtualLayer(0, 0) for _ in range(8)]
    named: list[str] = ["cuda:0", "cuda:2"]
    even, joined = (place(layers, [None] * 3, schedule, devices=named) for schedule in ("pipelined", "al-fm"))
    assert three_gpus == ["cuda:0"] * 2
    assert (even.devices, even.sizes) == (["cuda:0", "cuda:2"], [4, 4])
    assert joined.sizes == [5, 3]  # a batch ends with the last stage, which starts late
    with pytest.raises(PlacementError, match=r"found the devices \['cpu', 'cuda:1'\]"):
        place(layers, [None] * 3, "pipelined", devices=["cpu", "cuda:1"])


@pytest.mark.parametrize(("name", "stages"), [("al-fm", 2), ("backward-overlap", 2), ("pipelined", 3)])
def test_slow_links_ask_for_as_many_stages_as_in_a_plan(
    name: str, stages: int, three_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a join a layout was taken that counts no link, on all GPUs; a plan simulates fewer, which were faster."""
    link = Link(latency_s=4.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "fast")
    monkeypatch.setattr(gpus, "measure_link", lambda source, target: link)
    names = ["cuda:0", "cuda:1", "cuda:2"]
    layout = gpus.layout_on_gpus([VirtualLayer(0, 0)] * 6, [], names, SCHEDULES[name], EngineOptions(queue_depth=3))
    assert len(three_gpus) == 1
    devices = tuple(PlannedDevice("fast", memory_bytes=int(0.9 * size) * GIB) for size in (16, 16, 6))
    layers = [LayerCost(1.0, 2.0, parameter_bytes=GIB)] * 6
    plan = best_forecast(f"AL {name}", Model({"fast": layers}), Setup(devices, link, queue_depth=3))
    assert layout.sizes == plan.layout.sizes
    assert len(layout.stages) == stages


@pytest.mark.parametrize("layers", [1, 3])
def test_one_stage_on_a_faster_gpu_than_the_first_is_tried(
    layers: int, three_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout of one stage was thrown away as if it were the one on the first GPU; a model of one layer, such as any
    for backpropagation, went there unmeasured."""
    stage = PlannedStage(range(layers), (1,), PlannedDevice(), 3.0, 0.0, 0)
    monkeypatch.setattr(planner, "layout_on_gpus", lambda *_, **__: Layout((stage,), any_order=True))
    monkeypatch.setattr(Search, "_measure", lambda _, candidate, __: 2.0 - (candidate.devices == ["cuda:1"]))
    tried: list[Placement] = []
    taken = place([VirtualLayer(0, 0)] * layers, [None] * 3, "pipelined", on_trial=tried.append)
    assert [trial.devices for trial in tried] == [["cuda:0"], ["cuda:1"]]
    assert taken.devices == ["cuda:1"]


def test_the_layout_is_tried_against_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [
        PlannedStage(range(3), (1,), PlannedDevice(), 3.0, 0.0, 0),
        PlannedStage(range(3, 4), (0,), PlannedDevice(), 2.0, 0.0, 0),
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(planner, "layout_on_gpus", lambda *_, **__: Layout(tuple(stages), any_order=True))
    monkeypatch.setattr(Search, "_measure", lambda _, candidate, __: 1.0 / len(candidate.devices))
    tried: list[Placement] = []
    taken = place([VirtualLayer(0, 0) for _ in range(4)], [(None, None)] * 3, "pipelined", on_trial=tried.append)
    assert [(trial.devices, trial.sizes) for trial in tried] == [(["cuda:0"], [4]), (["cuda:1", "cuda:0"], [3, 1])]
    assert (taken.devices, taken.stage_s) == (["cuda:1", "cuda:0"], (3.0, 2.0))


def nothing_fits(*_: Any, **__: Any) -> Layout:
    raise PlacementError("no layout fits")


@pytest.mark.parametrize("layers", [1, 2])
def test_where_one_kind_of_gpu_is_too_small_to_measure_on_the_other_is_tried(
    three_gpus: list[str], monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """A model of one layer, as any in BP form, was only tried on the first GPU, which was the small one."""

    def trial(_: Any, candidate: Placement, __: Any) -> float:
        if candidate.devices != ["cuda:1"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0

    monkeypatch.setattr(planner, "layout_on_gpus", nothing_fits)
    monkeypatch.setattr(Search, "_measure", trial)
    taken = place([VirtualLayer(0, 0) for _ in range(layers)], [(None, None)] * 3, "pipelined")
    assert (taken.devices, taken.sizes) == (["cuda:1"], [layers])
    assert three_gpus == []


def test_where_nothing_fits_by_counting_the_trials_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "alike")
    monkeypatch.setattr(planner, "layout_on_gpus", nothing_fits)
    monkeypatch.setattr(Search, "_measure", lambda _, candidate, __: 1.0 / len(candidate.devices))
    taken = place([VirtualLayer(0, 0) for _ in range(4)], [(None, None)] * 3, "pipelined")
    assert (taken.devices, taken.sizes) == (["cuda:0", "cuda:1"], [2, 2])


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_link_between_two_gpus_is_measured() -> None:
    link = gpus.measure_link("cuda:0", "cuda:1")
    assert 1e8 < link.bytes_per_s < 1e13
    assert 0 < link.latency_s < 1e-2
