"""Layouts for 1F1B where memory is short: each stage has room for its own graphs, and nothing that fits is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeal import PlacementError
from pipeal.planning.pure.backprop_layout import backprop_layout
from pipeal.planning.pure.backprop_schedules import one_f_one_b
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.stage_cost import Averaging

from .cases import cuts
from .test_layout import learning_s, subsets, ways

small, large = PlannedDevice(memory_bytes=100), PlannedDevice(memory_bytes=200)


@pytest.mark.parametrize("devices", [[small, large], [large, small]], ids=["small first", "large first"])
def test_the_larger_device_comes_first_in_whatever_order_they_are_given(devices: list[PlannedDevice]) -> None:
    """Every stage was once weighed with as many graphs as the first one holds, two here: of those the small device has
    no room for the last layer's, and no layout was said to fit."""
    costs = {"cpu": [LayerCost(1, 2, activation_bytes=100)] * 2}
    layout = backprop_layout(costs, Setup(()), one_f_one_b(4), devices)
    assert [stage.device for stage in layout.stages] == [large, small]
    assert [devices[number] for stage in layout.stages for number in stage.devices] == [large, small]


def test_what_does_not_fit_is_said_to_lack_room_for_graphs() -> None:
    costs = {"cpu": [LayerCost(1, 2, activation_bytes=100)] * 2}
    with pytest.raises(PlacementError, match="the 2 devices do not have the memory for the graphs"):
        backprop_layout(costs, Setup(()), one_f_one_b(4), [small, PlannedDevice(memory_bytes=199)])


@pytest.mark.parametrize("any_order", [True, False], ids=["in any order", "in the order given"])
@settings(max_examples=150)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), *[st.integers(0, 9)] * 3), min_size=1, max_size=5),
    devices=st.lists(
        st.builds(
            PlannedDevice, speed=st.sampled_from([1.0, 2.0]), memory_bytes=st.integers(0, 12).map(lambda n: 6 * n)
        ),
        min_size=1,
        max_size=4,
    ),
    link=st.sampled_from([Link(), Link(bytes_per_s=1.0)]),
    most=st.integers(1, 2),
    micro_batches=st.integers(1, 5),
    replicas=st.integers(1, 2),
    alone=st.booleans(),
)
def test_no_layout_that_fits_is_faster_on_any_devices(
    any_order: bool,
    rows: list[tuple[int, int, int, int]],
    devices: list[PlannedDevice],
    link: Link,
    most: int,
    micro_batches: int,
    replicas: int,
    alone: bool,
) -> None:
    """Gradients are averaged while blocks go backward with the last micro-batch, the last block first."""
    row = [LayerCost(s, s, 1.0, 0, size, 0, kept, sent) for s, sent, kept, size in rows]
    costs, averaging = {"cpu": row}, Averaging(down=True, parts=micro_batches, alone=alone)
    setup = Setup((), link, replicas, most, contention=float if alone else None)

    def takes_s(sizes: list[int], groups: list[tuple[int, ...]]) -> float | None:
        worst, start = 0.0, 0
        for number, (size, group) in enumerate(zip(sizes, groups, strict=True)):
            alike = {devices[one] for one in group}
            if len(alike) > 1 or (not any_order and list(group) != list(range(group[0], group[-1] + 1))):
                return None
            device, part = alike.pop(), row[start : start + size]
            held = min(len(sizes) - number, micro_batches) * sum(cost.activation_bytes for cost in part)
            if sum(cost.resident_bytes for cost in part) - (-held // len(group)) > (device.memory_bytes or 0):
                return None
            start += size
            whole = [replace(cost, backward_s=micro_batches * cost.backward_s) for cost in part]
            seconds = micro_batches * sum(cost.forward_s for cost in part) / len(group) / device.speed
            seconds += learning_s(whole, device, len(group), len(group) * replicas, link, averaging)
            sends_s = micro_batches * part[-1].mean_out_bytes / link.bytes_per_s if start < len(rows) else 0.0
            worst = max(worst, seconds, sends_s)
        return worst

    with pytest.MonkeyPatch.context() as patch:
        if not any_order:
            patch.setattr("pipeal.planning.pure.device_sets.MOST_MOVES", 0)
            any_order = len(set(devices)) == 1
        every = [
            takes_s(sizes, groups)
            for used in subsets(len(devices))
            for stages in range(1, min(len(rows), len(used)) + 1)
            for groups in ways(used, stages, most, any_order)
            for sizes in cuts(len(rows), stages)
        ]
        fitting = [seconds for seconds in every if seconds is not None]
        if not fitting:
            with pytest.raises(PlacementError, match="no layout fits"):
                backprop_layout(costs, setup, one_f_one_b(micro_batches), devices)
            return
        layout = backprop_layout(costs, setup, one_f_one_b(micro_batches), devices)
    assert layout.bottleneck_s == pytest.approx(min(fitting), rel=1e-12)
    assert takes_s(layout.sizes, [stage.devices for stage in layout.stages]) == pytest.approx(layout.bottleneck_s)
