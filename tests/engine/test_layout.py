"""The best layout: never beaten by trying everything, whatever devices, memory, links and replicas there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeal import PlacementError
from pipeal.engine.schedule import SCHEDULES, Action
from pipeal.planning.pure.device_sets import device_sets
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.layout import Layout, best_layout
from pipeal.planning.pure.simulate import Hop, simulate
from pipeal.planning.pure.stage_cost import Averaging

from .cases import cuts

# Whole numbers, and speeds and replicas that are powers of 2: every sum and quotient is exact.
layer_costs = st.builds(
    LayerCost,
    forward_s=st.integers(0, 8),
    backward_s=st.integers(0, 16),
    update_s=st.integers(0, 4),
    out_bytes=st.integers(0, 64),
    parameter_bytes=st.integers(0, 8),
    optimizer_bytes=st.integers(0, 16),
    activation_bytes=st.integers(0, 32),
    mean_out_bytes=st.integers(0, 64),
)
devices = st.builds(
    PlannedDevice,
    kind=st.sampled_from(["cpu", "gpu"]),
    speed=st.sampled_from([0.5, 1.0, 2.0]),
    memory_bytes=st.sampled_from([None, 60, 150]),
)
links = st.sampled_from([Link(), Link(4.0, 1.0), Link(1.0, 0.0)])
averagings = st.builds(Averaging, down=st.booleans(), parts=st.sampled_from([1, 2]), alone=st.booleans())


def on(count: int, **more: object) -> Setup:
    return Setup(devices=(PlannedDevice(),) * count, **more)  # type: ignore[arg-type]


def ways(used: Sequence[int], stages: int, most: int, any_order: bool) -> Iterator[list[tuple[int, ...]]]:
    """Every way to give each of some stages its own devices, in any order of devices or in the order given."""
    orders = permutations(used) if any_order else [tuple(used)]
    for order in orders:
        for sizes in cuts(len(order), stages) if stages <= len(order) else []:
            if max(sizes) <= most:
                starts = [sum(sizes[:stage]) for stage in range(stages)]
                yield [order[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def subsets(count: int) -> Iterator[list[int]]:
    for chosen in range(1, 2**count):
        yield [number for number in range(count) if chosen >> number & 1]


def learning_s(
    row: Sequence[LayerCost], device: PlannedDevice, count: int, together: int, link: Link, averaging: Averaging
) -> float:
    """From a stage's first backward to its last update, written down plainly."""
    order = row[::-1] if averaging.down else row
    gone = sum(cost.backward_s for cost in row) / count / device.speed * (1 - 1 / averaging.parts)
    averaged, there = 0.0, []
    for cost in order:
        gone += cost.backward_s / count / device.speed / averaging.parts
        size = cost.parameter_bytes / together / link.bytes_per_s + link.latency_s
        averaged = max(averaged, gone) + 2 * (together - 1) * size
        there.append(averaged)
    if averaging.alone:
        gone += sum(
            2 * (together - 1) * (c.parameter_bytes / together / link.bytes_per_s + link.latency_s) for c in row
        )
        return gone + sum(cost.update_s for cost in row) / device.speed
    for cost, ready in zip(order, there, strict=True):
        gone = max(gone, ready) + cost.update_s / device.speed
    return gone


def slowest(
    costs: dict[str, list[LayerCost]],
    given_devices: list[PlannedDevice],
    link: Link,
    sizes: Sequence[int],
    groups: Sequence[tuple[int, ...]],
    replicas: int,
    queue_depth: int,
    any_order: bool,
    averaging: Averaging,
) -> float | None:
    """What a layout takes, written down plainly; None where it does not fit."""
    worst, start = 0.0, 0
    for size, group in zip(sizes, groups, strict=True):
        kinds = {given_devices[number] for number in group}
        if len(kinds) > 1 or (not any_order and list(group) != list(range(group[0], group[-1] + 1))):
            return None
        device, count = kinds.pop(), len(group)
        row = costs[device.kind][start : start + size]
        seconds = sum(cost.forward_s for cost in row) / count / device.speed
        seconds += learning_s(row, device, count, count * replicas, link, averaging)
        held = sum(cost.activation_bytes for cost in row)
        last = start + size == len(costs[device.kind])
        held += 0 if last else queue_depth * row[-1].out_bytes
        memory = sum(2 * cost.parameter_bytes + cost.optimizer_bytes for cost in row) + -(-held // count)
        if device.memory_bytes is not None and memory > device.memory_bytes:
            return None
        sends = 0.0 if last else row[-1].mean_out_bytes / link.bytes_per_s
        if queue_depth and not last:
            sends = max(sends, (sends + link.latency_s) / queue_depth)
        worst = max(worst, seconds, sends)
        start += size
    return worst


def best_of_all(
    costs: dict[str, list[LayerCost]],
    given_devices: list[PlannedDevice],
    link: Link,
    most: int,
    replicas: int,
    queue_depth: int,
    any_order: bool,
    averaging: Averaging,
) -> float | None:
    layers = len(costs["cpu"])
    found = [
        slowest(costs, given_devices, link, sizes, groups, replicas, queue_depth, any_order, averaging)
        for used in subsets(len(given_devices))
        for stages in range(1, min(layers, len(used)) + 1)
        for groups in ways(used, stages, most, any_order)
        for sizes in cuts(layers, stages)
    ]
    return min((seconds for seconds in found if seconds is not None), default=None)


@pytest.mark.parametrize("any_order", [True, False], ids=["in any order", "in the order given"])
@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(layer_costs, st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=5),
    given_devices=st.lists(devices, min_size=1, max_size=4),
    link=links,
    most=st.sampled_from([1, 2]),
    replicas=st.sampled_from([1, 2]),
    queue_depth=st.integers(0, 2),
    averaging=averagings,
)
def test_no_layout_is_faster(
    any_order: bool,
    rows: list[tuple[LayerCost, float]],
    given_devices: list[PlannedDevice],
    link: Link,
    most: int,
    replicas: int,
    queue_depth: int,
    averaging: Averaging,
) -> None:
    """Averages of gradients included, which were once charged as if nothing else were done meanwhile."""
    costs = {
        "cpu": [cost for cost, _ in rows],
        "gpu": [replace(cost, forward_s=cost.forward_s * times, backward_s=cost.backward_s) for cost, times in rows],
    }
    with pytest.MonkeyPatch.context() as patch:
        if not any_order:
            patch.setattr("pipeal.planning.pure.device_sets.MOST_MOVES", 0)
            any_order = len(set(given_devices)) == 1
        wanted = best_of_all(costs, given_devices, link, most, replicas, queue_depth, any_order, averaging)
        setup = Setup((), link, replicas, most, queue_depth=queue_depth)
        if wanted is None:
            with pytest.raises(PlacementError, match="no layout fits"):
                best_layout(costs, setup, given_devices, averaging=averaging)
            return
        layout = best_layout(costs, setup, given_devices, averaging=averaging)
    assert layout.bottleneck_s == pytest.approx(wanted, rel=1e-12)
    holds_together(layout, given_devices, most, len(rows))
    groups = [stage.devices for stage in layout.stages]
    again = slowest(costs, given_devices, link, layout.sizes, groups, replicas, queue_depth, any_order, averaging)
    assert layout.bottleneck_s == pytest.approx(again, rel=1e-12)


@pytest.mark.parametrize("name", list(SCHEDULES))
@settings(max_examples=60)
@given(rows=st.lists(layer_costs, min_size=1, max_size=6), count=st.integers(1, 4))
def test_each_schedule_gets_the_layout_that_suits_it(name: str, rows: list[LayerCost], count: int) -> None:
    """On equal devices no other cut is faster once it runs, joins and all; what has no joins is meant to run long."""
    schedule = SCHEDULES[name]

    def pace_s(sizes: Sequence[int]) -> float:
        starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
        stages = [
            {action: sum(cost.durations()[action] for cost in rows[start : start + size]) for action in Action}
            for start, size in zip(starts, sizes, strict=True)
        ]
        if not schedule.joins:
            return max(sum(stage.values()) for stage in stages)
        return simulate(schedule, stages, 1).makespan_s

    found = best_layout({"cpu": rows}, on(count), schedule=schedule)
    every = [sizes for stages in range(1, min(count, len(rows)) + 1) for sizes in cuts(len(rows), stages)]
    assert pace_s(found.sizes) == min(map(pace_s, every))


def test_what_a_kind_of_device_holds_and_sends_is_what_was_measured_on_it() -> None:
    """Bytes differ with precision: a fp32 layer of 100 bytes of graph was once weighed as its bf16 twin of 50."""
    narrow, wide = (LayerCost(1, 2, out_bytes=size, activation_bytes=size, mean_out_bytes=size) for size in (50, 100))
    costs = {"gpu": [narrow] * 4, "cpu": [wide] * 4}
    two = [PlannedDevice("gpu"), PlannedDevice("cpu", memory_bytes=350)]
    for given_devices in (two, two[::-1]):
        stages = {
            stage.device.kind: stage for stage in best_layout(costs, Setup(tuple(given_devices), Link(100.0))).stages
        }
        assert stages["cpu"].layers == range(2, 4)  # last, where no packets wait behind it
        assert stages["gpu"].sends_s == 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeal.planning.pure.device_sets.MOST_MOVES", 0)
        cpu, gpu = best_layout(costs, Setup((two[1], two[0]), Link(100.0))).stages
    assert (cpu.device.kind, cpu.layers, cpu.sends_s) == ("cpu", range(1), 1.0)
    assert cpu.memory_bytes == 100 + 2 * 100  # of 350: with its packets, not two layers
    assert gpu.layers == range(1, 4)


def holds_together(layout: Layout, given_devices: list[PlannedDevice], most: int, layers: int) -> None:
    assert [layer for stage in layout.stages for layer in stage.layers] == list(range(layers))
    used = [number for stage in layout.stages for number in stage.devices]
    assert len(used) == len(set(used))
    for stage in layout.stages:
        assert 1 <= len(stage.devices) <= most
        assert all(given_devices[number] == stage.device for number in stage.devices)
        assert stage.device.memory_bytes is None or stage.memory_bytes <= stage.device.memory_bytes
    if not layout.any_order:
        assert used == sorted(used)


def flat(seconds: Sequence[float], **more: int) -> dict[str, list[LayerCost]]:
    return {"cpu": [LayerCost(one / 3, 2 * one / 3, **more) for one in seconds]}


def test_devices_that_would_only_slow_it_down_are_left_out() -> None:
    layout = best_layout(flat([3, 3, 3]), Setup((PlannedDevice(speed=0.01), *[PlannedDevice()] * 3)))
    assert [stage.devices for stage in layout.stages] == [(1,), (2,), (3,)]


def test_a_slow_layer_is_shared_by_several_devices() -> None:
    layout = best_layout(flat([3, 12, 3]), on(6, stage_replicas=4))
    assert layout.bottleneck_s == 3
    assert [len(stage.devices) for stage in layout.stages] == [1, 4, 1]


def test_as_few_devices_as_do_as_well() -> None:
    assert best_layout(flat([1] * 5), on(4)).sizes == [2, 2, 1]


def test_a_cut_is_not_made_where_the_packet_is_too_large_for_the_link() -> None:
    costs = [LayerCost(1, 2, mean_out_bytes=size) for size in (1, 900, 1, 1)]
    layout = best_layout({"cpu": costs}, on(2, link=Link(bytes_per_s=100)))
    assert layout.sizes in ([1, 3], [3, 1])
    assert best_layout({"cpu": costs}, on(2)).sizes == [2, 2]


@pytest.mark.parametrize(("queue_depth", "sizes", "pace_s"), [(30, [1, 1], 3.0), (10, [1, 1], 5.1), (2, [2], 6.0)])
def test_a_latency_passes_while_as_many_packets_as_may_wait_are_on_their_way(
    queue_depth: int, sizes: list[int], pace_s: float
) -> None:
    """A cut was once avoided for any latency; then none was, and two stages on a slow network had half the speed of
    one, because no more than two packets may be on their way."""
    costs = {"cpu": [LayerCost(1, 2, mean_out_bytes=100)] * 2}
    layout = best_layout(costs, on(2, link=Link(100, latency_s=50), queue_depth=queue_depth))
    assert (layout.sizes, layout.bottleneck_s) == (sizes, pace_s)


@settings(max_examples=100)
@given(
    rows=st.lists(layer_costs, min_size=1, max_size=6),
    count=st.integers(1, 4),
    latency=st.integers(0, 60),
    queue_depth=st.integers(1, 4),
)
def test_a_long_run_keeps_the_pace_of_its_layout(
    rows: list[LayerCost], count: int, latency: int, queue_depth: int
) -> None:
    """Whatever the queues, the links and their latency: the simulation fills its stages, and then is as fast."""
    link = Link(4.0, float(latency))
    layout = best_layout({"cpu": rows}, on(count, link=link, queue_depth=queue_depth))
    parts = [rows[stage.layers.start : stage.layers.stop] for stage in layout.stages]
    stages = [{action: sum(cost.durations()[action] for cost in part) for action in Action} for part in parts]
    hops = [Hop(part[-1].mean_out_bytes / link.bytes_per_s, link.latency_s) for part in parts[:-1]]
    fill_s = sum(sum(stage.values()) for stage in stages) + sum(hop.busy_s + hop.latency_s for hop in hops)
    batches = 40
    found = simulate(SCHEDULES["pipelined"], stages, batches, queue_depth=queue_depth, hops=hops).makespan_s
    pace_s = layout.bottleneck_s
    assert (batches - queue_depth) * pace_s <= found + 1e-9
    assert found <= (batches - 1) * pace_s + fill_s + 1e-9


def test_a_link_has_to_carry_packets_of_mean_size_and_memory_to_hold_the_largest() -> None:
    """Links were once charged for the largest batch with every batch."""
    costs = {"cpu": [LayerCost(1, 2, out_bytes=800, mean_out_bytes=100)] * 2}
    stage = best_layout(costs, on(2, link=Link(bytes_per_s=100), queue_depth=3)).stages[0]
    assert (stage.sends_s, stage.memory_bytes) == (1.0, 3 * 800)


@settings(max_examples=500)
@example(
    rows=[LayerCost(s / 3, 2 * s / 3, mean_out_bytes=n) for s, n in ((9, 1), (2, 1), (9, 64), (9, 1))],
    each=[Link(), Link(1.0, 0.0), Link()],
)
@given(rows=st.lists(layer_costs, min_size=1, max_size=5), each=st.lists(links, min_size=1, max_size=3))
def test_no_layout_is_faster_where_links_differ(rows: list[LayerCost], each: list[Link]) -> None:
    """Every link was once taken for the slowest: with a slow one in the midst a plan for four devices was slower than
    one for the first two, and its table had the slow link behind every stage. Then stages that got furthest were kept
    alone, of which the next could not always send: such a plan took twice the time."""
    worst = Link(min(one.bytes_per_s for one in each), max(one.latency_s for one in each))
    layout = best_layout({"cpu": rows}, replace(on(len(each) + 1, link=worst, queue_depth=2), links=tuple(each)))
    paces = []
    for sizes in (way for stages in range(1, min(len(rows), len(each) + 1) + 1) for way in cuts(len(rows), stages)):
        ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
        stages = [sum(row.seconds for row in rows[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        sends = [link.packet_s(rows[end - 1].mean_out_bytes, 2) for link, end in zip(each, ends[:-1], strict=False)]
        paces.append(max(*stages, *sends, 0.0))
        if tuple(sizes) == tuple(layout.sizes):
            assert [stage.sends_s for stage in layout.stages] == [*sends, 0.0]
    assert layout.bottleneck_s == pytest.approx(min(paces), rel=1e-12)


@pytest.mark.parametrize("memory_bytes", [280, 279])
def test_a_device_may_be_filled_to_the_last_byte(memory_bytes: int) -> None:
    row = [LayerCost(1.0, 2.0, parameter_bytes=100, optimizer_bytes=50, activation_bytes=30)]
    setup = Setup((PlannedDevice(memory_bytes=memory_bytes),))
    if memory_bytes < 280:
        with pytest.raises(PlacementError, match="no layout fits"):
            best_layout({"cpu": row}, setup)
    else:
        assert [stage.memory_bytes for stage in best_layout({"cpu": row}, setup).stages] == [280]


def test_memory_decides_before_time_does() -> None:
    costs = flat([3, 3, 3, 3], parameter_bytes=2**20, optimizer_bytes=2**21)
    small = PlannedDevice(speed=9.0, memory_bytes=5 * 2**20)
    layout = best_layout(costs, Setup((small, PlannedDevice())))
    assert sorted(layout.sizes) == [1, 3]
    with pytest.raises(PlacementError, match="the 4 layers need 16 MiB in all and the largest, layer 0, 4 MiB"):
        best_layout(costs, Setup((small,)))


@pytest.mark.parametrize(
    ("costs", "devices", "message"),
    [
        (flat([1, 2]), [PlannedDevice("tpu")], "no costs of a device of kind 'tpu'; measured kinds: cpu"),
        (flat([]), [PlannedDevice()], "no costs of a device"),
        (
            {**flat([1]), "gpu": [LayerCost(1, 1)] * 2},
            [PlannedDevice(), PlannedDevice("gpu")],
            "different numbers of layers",
        ),
    ],
)
def test_what_cannot_be_laid_out(costs: dict[str, list[LayerCost]], devices: list[PlannedDevice], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        best_layout(costs, Setup(tuple(devices)))


@given(given_devices=st.lists(devices, min_size=1, max_size=6), most=st.integers(1, 3))
def test_every_move_leads_to_a_later_set(given_devices: list[PlannedDevice], most: int) -> None:
    sets = device_sets(given_devices, most)
    assert sets.used[0] == 0
    assert max(sets.used) == len(given_devices)
    for number, moves in enumerate(sets.moves):
        for after, group in moves:
            assert number < after
            assert sets.used[after] - sets.used[number] == (1 if group is None else group.count)


def test_more_devices_than_can_be_of_use_cost_no_time() -> None:
    layout = best_layout(flat([3, 12, 3]), on(60_000, stage_replicas=4))
    assert [stage.devices for stage in layout.stages] == [(0,), (1, 2, 3, 4), (5,)]


def test_too_many_kinds_for_every_order_are_used_in_the_order_given() -> None:
    many = tuple(PlannedDevice(speed=1 + number / 16) for number in range(16))
    layout = best_layout(flat([2.0] * 40), Setup(many))
    assert not layout.any_order
    assert max(layout.sizes) > min(layout.sizes)
