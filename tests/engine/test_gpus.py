"""Several GPUs of unequal kinds and memory: what is measured becomes a layout, and the trials have the last word."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeal import PlacementError
from pipeal.engine import costs, gpus
from pipeal.engine.costs import Placement, place
from pipeal.engine.hardware import Link, PlannedDevice
from pipeal.engine.layercost import LayerCost
from pipeal.engine.layout import Layout, PlannedStage
from pipeal.engine.virtual import VirtualLayer

GIB = 2**30


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two fast ones, of which one is half full, and a slow one; returns where was measured."""
    measured: list[str] = []

    def measure(layers: Any, batches: Any, *, device: str, **options: Any) -> tuple[LayerCost, ...]:
        measured.append(device)
        seconds = 1.0 if device == "cuda:0" else 4.0
        return tuple(LayerCost(seconds, 2 * seconds, parameter_bytes=GIB) for _ in layers)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: ["fast", "slow", "fast"][number])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: ([16, 16, 6][number] * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpus, "measure", measure)
    monkeypatch.setattr(gpus, "measure_link", Link)
    return measured


def test_each_kind_is_measured_once_and_memory_and_speed_decide(three_gpus: list[str]) -> None:
    layout = gpus.layout_on_gpus([VirtualLayer(0, 0)] * 7, [], 3)
    assert three_gpus == ["cuda:0", "cuda:1"]
    # Of 5.4 GiB that may be filled, two layers with their gradients take 4; the slow one is as fast with one layer as
    # the fast one with four.
    assert {stage.devices: len(stage.layers) for stage in layout.stages} == {(0,): 4, (2,): 2, (1,): 1}


def test_the_layout_is_tried_against_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [
        PlannedStage(range(3), (1,), PlannedDevice(), 3.0, 0.0, 0),
        PlannedStage(range(3, 4), (0,), PlannedDevice(), 2.0, 0.0, 0),
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(costs, "layout_on_gpus", lambda *_, **__: Layout(tuple(stages), any_order=True))
    monkeypatch.setattr(costs, "_trial", lambda _, __, ___, candidate, *____: 1.0 / len(candidate.devices))
    tried: list[Placement] = []
    taken = place([VirtualLayer(0, 0) for _ in range(4)], [(None, None)] * 3, "pipelined", on_trial=tried.append)
    assert [(trial.devices, trial.sizes) for trial in tried] == [(["cuda:0"], [4]), (["cuda:1", "cuda:0"], [3, 1])]
    assert (taken.devices, taken.stage_s) == (["cuda:1", "cuda:0"], (3.0, 2.0))


def test_where_nothing_fits_by_counting_the_trials_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_fits(*_: Any, **__: Any) -> Layout:
        raise PlacementError("no layout fits")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(costs, "layout_on_gpus", nothing_fits)
    monkeypatch.setattr(costs, "_trial", lambda _, __, ___, candidate, *____: 1.0 / len(candidate.devices))
    taken = place([VirtualLayer(0, 0) for _ in range(4)], [(None, None)] * 3, "pipelined")
    assert (taken.devices, taken.sizes) == (["cuda:0", "cuda:1"], [2, 2])


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_link_between_two_gpus_is_measured() -> None:
    link = gpus.measure_link()
    assert 1e8 < link.bytes_per_s < 1e13
    assert 0 < link.latency_s < 1e-2
