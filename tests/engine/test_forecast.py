"""Forecasts against closed forms: what theory says of equal layers, replicas, links, memory, and long runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeal import ConfigError, PlacementError
from pipeal.engine.schedule import SCHEDULES, Action, Schedule
from pipeal.engine.sizes import layers_of_stages
from pipeal.planning.pure.backprop_layout import backprop_layout
from pipeal.planning.pure.backprop_schedules import BackpropSchedule, one_f_one_b
from pipeal.planning.pure.candidates import alone_s
from pipeal.planning.pure.forecast import METHODS, RIVALS, Forecast, Model, best_forecast, forecast, on_fewer
from pipeal.planning.pure.hardware import Contention, Group, Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.layout import Layout, PlannedStage, best_layout
from pipeal.planning.pure.simulate import Hop, simulate
from pipeal.planning.pure.stage_cost import Averaging, LayerSums, task_seconds

from .cases import cuts
from .test_layout import on, ways

EQUAL = LayerCost(1.0, 2.0, 0.0, 100, 1000, optimizer_bytes=2000, activation_bytes=800, mean_out_bytes=100)


def equal(layers: int) -> dict[str, list[LayerCost]]:
    return {"cpu": [EQUAL] * layers}


def shared(cost: LayerCost, micro_batches: int) -> LayerCost:
    """A micro-batch that costs its share."""
    return replace(
        cost,
        forward_s=cost.forward_s / micro_batches,
        backward_s=cost.backward_s / micro_batches,
        out_bytes=cost.out_bytes // micro_batches,
        activation_bytes=cost.activation_bytes // micro_batches,
        mean_out_bytes=cost.mean_out_bytes // micro_batches,
    )


def of(method: str, layers: int, setup: Setup, micro_batches: tuple[int, ...] = (1, 8)) -> Forecast:
    bp = {number: {"cpu": [shared(EQUAL, number)] * layers} for number in micro_batches}
    return best_forecast(method, Model(equal(layers), bp), setup)


@pytest.mark.parametrize(("devices", "at_least"), [(4, 3.8), (6, 5.6)])
def test_twelve_equal_layers_gain_nearly_as_many_times_as_there_are_devices(devices: int, at_least: float) -> None:
    found = of("AL pipelined", 12, on(devices))
    assert alone_s(equal(12), [PlannedDevice()]) / found.batch_s >= at_least
    assert found.bubble < 0.05


@given(layers=st.integers(1, 6), batches=st.integers(1, 200))
def test_equal_layers_have_a_closed_form_however_long_the_run(layers: int, batches: int) -> None:
    setup = on(layers, batches=batches)
    whole = {
        "AL sequential": 3 * layers * batches,
        "AL backward-overlap": (layers + 2) * batches,
        "AL al-fm": (layers + 2) * batches,
        "AL pipelined": layers - 1 + 3 * batches,
        "BP naive": 3 * layers * batches,
        "BP gpipe": 3 * (8 + layers - 1) / 8 * batches,
        "BP 1f1b": 3 * (8 + layers - 1) / 8 * batches,
    }
    for method, seconds in whole.items():
        found = of(method, layers, setup)
        assert found.batch_s * batches == pytest.approx(seconds)
        assert found.busy == pytest.approx([3 * batches / seconds] * layers)


@given(rows=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=6), queue_depth=st.integers(1, 3))
def test_a_long_run_goes_on_at_the_pace_it_has_reached(rows: list[tuple[int, int, int]], queue_depth: int) -> None:
    """What is not simulated is what simulating it would give, however uneven the stages."""
    costs = [LayerCost(forward, backward, update) for forward, backward, update in rows]
    setup = on(len(rows), batches=150, queue_depth=queue_depth)
    found = forecast("AL pipelined", SCHEDULES["pipelined"], {"cpu": costs}, setup)
    durations = [
        task_seconds([costs[n].durations() for n in stage.layers], by_layer=True) for stage in found.layout.stages
    ]
    whole = simulate(SCHEDULES["pipelined"], durations, 150, queue_depth=queue_depth).makespan_s
    assert found.batch_s * 150 == pytest.approx(whole)


def test_each_schedule_has_a_layout_of_its_own() -> None:
    """al-fm ends a batch with the update of the last stage, so that early stages may have more to do."""
    found = of("AL al-fm", 12, on(4))
    assert found.layout.sizes[-1] == 2
    assert found.batch_s == pytest.approx(16)
    even = forecast("", SCHEDULES["al-fm"], equal(12), on(4), best_layout(equal(12), on(4)))
    assert even.batch_s == pytest.approx(18)
    assert of("AL pipelined", 12, on(4)).layout.sizes == [3, 3, 3, 3]


def test_backpropagation_takes_the_micro_batches_that_are_best_for_it() -> None:
    """Small ones leave less idle, but cost more than their share: here 0.5 s each, forward and backward."""

    def costs(micro_batches: int) -> dict[str, list[LayerCost]]:
        return {"cpu": [LayerCost(0.5 + 1 / micro_batches, 0.5 + 2 / micro_batches)] * 4}

    model = Model(equal(4), {number: costs(number) for number in (1, 2, 4, 8, 16)})
    for method in ("BP gpipe", "BP 1f1b"):
        found = best_forecast(method, model, on(4))
        wanted = {number: (number + 3) * (1 + 3 / number) for number in model.bp}
        assert found.batch_s == pytest.approx(min(wanted.values()))
        assert found.micro_batches == min(wanted, key=wanted.__getitem__) == 4
    assert best_forecast("BP naive", model, on(4)).micro_batches == 1
    with pytest.raises(PlacementError, match="not measured"):
        best_forecast("BP naive", Model(equal(4)), on(4))


def test_alone_is_on_the_device_that_is_fastest() -> None:
    costs = {"slow": [LayerCost(3.0, 3.0)] * 2, "fast": [LayerCost(1.0, 1.0)] * 2}
    devices = [PlannedDevice("slow"), PlannedDevice("fast"), PlannedDevice("fast", speed=2.0)]
    assert alone_s(costs, devices) == 2


def test_replicas_do_as_many_batches_at_once_and_average_their_gradients() -> None:
    link = Link(bytes_per_s=1000.0)
    one, two = of("AL pipelined", 4, on(4, link=link)), of("AL pipelined", 4, on(8, link=link, replicas=2))
    assert (one.devices, two.devices) == (4, 8)
    assert one.batch_s == pytest.approx(3, rel=0.01)
    assert two.batch_s == pytest.approx((3 + 1) / 2, rel=0.01)  # 2 (n - 1) / n of 1000 bytes at 1000 bytes/s
    assert of("AL pipelined", 4, on(8, replicas=2)).batch_s == pytest.approx(3 / 2, rel=0.01)


def test_replicas_that_cannot_share_the_devices_are_told() -> None:
    with pytest.raises(PlacementError, match="3 replicas cannot share 4 devices"):
        of("AL pipelined", 4, on(4, replicas=3))
    mixed = (PlannedDevice(), PlannedDevice(), PlannedDevice(), PlannedDevice(speed=2.0))
    with pytest.raises(PlacementError, match="of each kind"):
        of("AL pipelined", 4, Setup(mixed, replicas=2))


def test_one_stage_of_replicas_is_data_parallel_training() -> None:
    link = Link(bytes_per_s=4000.0, latency_s=0.125)
    found = of("AL sequential", 2, on(4, link=link, replicas=4))
    assert len(found.layout.stages) == 1
    all_reduce = 2 * 3 * (1000 / 4 / 4000 + 0.125)  # of the second layer: that of the first is over by then
    assert found.batch_s == pytest.approx((2 * 3 + all_reduce) / 4)


def test_gradients_are_averaged_while_other_layers_go_backward() -> None:
    """As a run does it. All of a stage's were once charged after its last backward, and with one latency."""
    setup = on(2, link=Link(bytes_per_s=1000.0), replicas=2)
    heavy = {"cpu": [LayerCost(1.0, 2.0, parameter_bytes=1000), LayerCost(1.0, 2.0, 0.5)]}
    model = Model(heavy, {1: heavy})
    assert best_forecast("AL sequential", model, setup).batch_s == pytest.approx(6.5 / 2)
    # Backpropagation comes to the first layer last, and then updates: the second meanwhile.
    assert best_forecast("BP naive", model, setup).batch_s == pytest.approx(7 / 2)
    # Where averaging is work of the cores that all share, there is no meanwhile.
    shared = replace(setup, contention=lambda _: 1.0)
    assert best_forecast("AL sequential", model, shared).batch_s == pytest.approx(7.5 / 2)
    slow = replace(setup, link=Link(latency_s=5.0))
    assert best_forecast("AL sequential", model, slow).batch_s == pytest.approx((2 + 2 + 2 * 2 * 5 + 0.5) / 2)


def test_stages_are_laid_out_for_gradients_that_are_averaged_meanwhile() -> None:
    """Layouts were once searched for as if all gradients were averaged after the last backward: the first layer, whose
    3 s of averaging pass while the second goes backward, got a stage of its own, and training was a quarter slower."""
    rows = [LayerCost(1, 3, parameter_bytes=size) for size in (3000, 0, 2000)]
    setup = on(4, link=Link(bytes_per_s=1000.0), replicas=2)
    found = best_forecast("AL pipelined", Model({"cpu": rows}), setup)
    assert [(stage.layers, stage.seconds) for stage in found.layout.stages] == [(range(2), 8), (range(2, 3), 6)]
    assert found.batch_s == pytest.approx(8 / 2, rel=0.01)
    # On cores that stages share there is no meanwhile, and what the plan shows says so.
    shared = forecast("", SCHEDULES["pipelined"], {"cpu": rows}, replace(setup, contention=lambda _: 1.0))
    assert [(stage.layers, stage.seconds) for stage in shared.layout.stages] == [(range(1), 7), (range(1, 3), 10)]
    assert shared.batch_s == pytest.approx(10 / 2, rel=0.01)


@pytest.mark.parametrize("name", ["BP gpipe", "BP 1f1b"])
def test_what_backpropagation_does_once_per_batch_may_pass_while_others_still_work(name: str) -> None:
    """The 4 s that averages of a first block take were once weighed like 4 s of work on micro-batches: it got a stage
    of its own, beside one of three blocks, and a step took a fifth longer."""
    first, other = LayerCost(0.25, 0.5, parameter_bytes=4000), LayerCost(0.25, 0.5)
    setup = on(4, link=Link(bytes_per_s=1000.0), replicas=2)
    found = best_forecast(name, Model(equal(4), {4: {"cpu": [first, other, other, other]}}), setup)
    assert found.layout.sizes == [2, 2]
    assert found.layout.stages[0].seconds == 4 * 1.5 + 4  # all of it is shown
    assert found.batch_s == pytest.approx((5 * 1.5 + 4) / 2)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=5),
    count=st.integers(1, 4),
    replicas=st.integers(2, 3),
    stage_replicas=st.integers(1, 2),
    latency=st.sampled_from([0.0, 0.5]),
)
def test_no_stages_of_replicas_are_forecast_to_be_faster(
    rows: list[tuple[int, int, int, int]], count: int, replicas: int, stage_replicas: int, latency: float
) -> None:
    """Every layout is simulated, in a run so long that its beginning and end count for little."""
    costs = {"cpu": [LayerCost(1 + f, 1 + b, u, parameter_bytes=12 * size) for f, b, u, size in rows]}
    setup = on(
        count * replicas, link=Link(4.0, latency), replicas=replicas, stage_replicas=stage_replicas, batches=2000
    )
    found = forecast("", SCHEDULES["pipelined"], costs, setup)
    for stages in range(1, min(count, len(rows)) + 1):
        for sizes in cuts(len(rows), stages):
            for groups in ways(range(count), stages, stage_replicas, any_order=False):
                own = zip(layers_of_stages(sizes), groups, strict=True)
                laid = [PlannedStage(layers, group, PlannedDevice(), 0.0, 0.0, 0) for layers, group in own]
                other = forecast("", SCHEDULES["pipelined"], costs, setup, Layout(tuple(laid), any_order=True))
                assert found.batch_s <= 1.005 * other.batch_s


@given(
    rows=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=5),
    together=st.integers(2, 4),
    down=st.booleans(),
)
def test_averaging_takes_no_longer_beside_other_work_than_after_it(
    rows: list[tuple[int, int, int]], together: int, down: bool
) -> None:
    sums = LayerSums([LayerCost(1, own_s, update_s, parameter_bytes=12 * size) for own_s, update_s, size in rows])
    layers = range(len(rows))
    link = Link(bytes_per_s=4.0, latency_s=1.0)
    order = layers[::-1] if down else layers
    beside, after = (
        sums.durations(layers, Group(PlannedDevice()), Setup((), link, replicas=together), how)
        for how in (Averaging(down=down), Averaging(alone=True))
    )
    update_s = sum(own_s for _, own_s, _ in rows)
    averages = [link.all_reduce_s(12 * size, together) for _, _, size in rows]
    assert after[Action.UPDATE] == pytest.approx(update_s + sum(averages))
    least_s = max(update_s, averages[order[-1]] + rows[order[-1]][1], sum(averages) - beside[Action.BACKWARD])
    assert least_s - 1e-9 <= beside[Action.UPDATE] <= after[Action.UPDATE] + 1e-9


def test_backpropagation_waits_for_its_links_and_pipelined_al_does_not() -> None:
    link = Link(bytes_per_s=100.0, latency_s=0.5)
    al, slow_al = (of("AL pipelined", 4, on(4, link=one)) for one in (Link(), link))
    bp, slow_bp = (of("BP 1f1b", 4, on(4, link=one)) for one in (Link(), link))
    assert slow_al.batch_s == pytest.approx(al.batch_s, rel=0.01)
    assert slow_bp.batch_s > 1.2 * bp.batch_s


def test_memory_is_that_of_weights_graphs_and_waiting_packets() -> None:
    resident = 2 * 1000 + 2000
    setup = on(4)
    assert of("AL pipelined", 4, setup).memory_bytes == (*[resident + 800 + 2 * 100] * 3, resident + 800)
    assert of("BP gpipe", 4, setup).memory_bytes == (resident + 800,) * 4
    assert of("BP 1f1b", 4, setup).memory_bytes == tuple(resident + held * 100 for held in (4, 3, 2, 1))


def test_1f1b_fits_where_gpipe_does_not() -> None:
    """Layouts for it were once refused for the graphs of all micro-batches, of which stage s of S holds S - s."""
    costs = {1: equal(4), 8: {"cpu": [shared(EQUAL, 8)] * 4}}
    resident = 2 * 1000 + 2000
    enough_for_four = Setup((PlannedDevice(memory_bytes=resident + 4 * 100),) * 4)
    model = Model(equal(4), {8: costs[8]})
    with pytest.raises(PlacementError, match="no layout fits"):
        best_forecast("BP gpipe", model, enough_for_four)
    found = best_forecast("BP 1f1b", model, enough_for_four)
    assert found.layout.sizes == [1, 1, 1, 1]
    assert found.memory_bytes == tuple(resident + held * 100 for held in (4, 3, 2, 1))
    with pytest.raises(PlacementError, match="no layout fits"):
        best_forecast("BP 1f1b", model, Setup((PlannedDevice(memory_bytes=resident + 4 * 100 - 1),) * 4))


@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5),
    memory=st.integers(0, 40),
    devices=st.integers(1, 4),
    micro_batches=st.integers(1, 5),
    name=st.sampled_from(["gpipe", "1f1b"]),
)
def test_no_layout_for_backpropagation_that_fits_is_faster(
    rows: list[tuple[int, int]], memory: int, devices: int, micro_batches: int, name: str
) -> None:
    """Every way to cut the layers is tried, and what it holds is looked up in its simulation."""
    costs = {"cpu": [LayerCost(seconds, seconds, activation_bytes=kept) for seconds, kept in rows]}
    schedule = RIVALS[f"BP {name}"](micro_batches)
    setup = Setup((PlannedDevice(memory_bytes=memory),) * devices, batches=1)
    slowest = []
    for stages in range(1, min(devices, len(rows)) + 1):
        for sizes in cuts(len(rows), stages):
            own = [rows[layers.start : layers.stop] for layers in layers_of_stages(sizes)]
            taken = [sum(seconds for seconds, _ in part) for part in own]
            durations = [{Action.FORWARD: s, Action.BACKWARD: s, Action.UPDATE: 0.0} for s in taken]
            held = simulate(schedule, durations, micro_batches, queue_depth=micro_batches).held
            if all(n * sum(kept for _, kept in part) <= memory for n, part in zip(held, own, strict=True)):
                slowest.append(2 * micro_batches * max(taken))
    if not slowest:
        with pytest.raises(PlacementError, match="no layout fits"):
            forecast("", schedule, costs, setup)
        return
    found = forecast("", schedule, costs, setup)
    assert found.layout.bottleneck_s == min(slowest)
    assert max(found.memory_bytes) <= memory


@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5),
    memory=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    stage_replicas=st.integers(1, 2),
)
def test_on_any_devices_1f1b_holds_no_more_than_there_is(
    rows: list[tuple[int, int]], memory: list[int], stage_replicas: int
) -> None:
    costs = {"cpu": [LayerCost(seconds, seconds, activation_bytes=kept) for seconds, kept in rows]}
    devices = tuple(PlannedDevice(memory_bytes=size) for size in memory)
    try:
        found = forecast("", one_f_one_b(4), costs, Setup(devices, stage_replicas=stage_replicas, batches=1))
    except PlacementError:  # test_backprop_layout.py tells when it may be raised
        return
    for stage, held in zip(found.layout.stages, found.memory_bytes, strict=True):
        assert held <= (stage.device.memory_bytes or 0)


def test_faster_devices_and_shared_stages_count() -> None:
    fast = Setup((PlannedDevice(speed=2.0),) * 2)
    assert of("AL pipelined", 2, fast).batch_s == pytest.approx(1.5, rel=0.01)
    shared = of("AL pipelined", 2, on(4, stage_replicas=2))
    assert shared.batch_s == pytest.approx(1.5, rel=0.01)
    assert shared.devices == 4


def test_stages_that_share_cores_get_no_more_than_those() -> None:
    two_cores = replace(on(4), contention=lambda at_once: max(1.0, at_once / 2))
    assert of("AL pipelined", 4, two_cores).batch_s == pytest.approx(6, rel=0.01)


def test_replicas_on_shared_cores_get_no_more_than_those_either() -> None:
    """Of two replicas only one was once counted as at work on the cores that both share, and of a stage on two
    devices only one of them: forecasts of twice what the cores can do."""

    def two_cores(at_once: int) -> float:
        return max(1.0, at_once / 2)

    # 12 s of work for each batch of 4 layers, on two cores.
    assert of("AL pipelined", 4, on(4, contention=two_cores)).batch_s == pytest.approx(6, rel=0.01)
    assert of("AL pipelined", 4, on(8, contention=two_cores, replicas=2)).batch_s == pytest.approx(6, rel=0.01)
    assert of("AL sequential", 4, on(4, contention=two_cores, replicas=4)).batch_s == pytest.approx(6)
    # 6 s of work for each batch of 2 layers, each of which two devices share.
    setup = on(4, contention=two_cores, stage_replicas=2)
    shared = best_layout(equal(2), setup)
    assert [len(stage.devices) for stage in shared.stages] == [2, 2]
    both = forecast("", SCHEDULES["pipelined"], equal(2), setup, shared)
    assert both.batch_s == pytest.approx(3, rel=0.01)
    carried = on(8, contention=two_cores, replicas=2, link=Link(bytes_per_s=100.0))
    costs = {"cpu": [replace(EQUAL, parameter_bytes=0)] * 4}
    four_stages = best_layout(costs, carried)
    assert len(four_stages.stages) == 4
    found = forecast("", SCHEDULES["pipelined"], costs, carried, four_stages)
    assert found.batch_s == pytest.approx(7.5, rel=0.01)


def test_stages_are_as_many_as_the_cores_they_share_can_use() -> None:
    """As many stages as devices were once made, each as if on its own core, and forecast to be slower than one."""

    def worse_and_worse(at_once: int) -> float:
        return {1: 1.0, 2: 1.2}.get(at_once, float(at_once))

    setup = on(4, contention=worse_and_worse)
    found = of("AL pipelined", 4, setup)
    assert found.layout.sizes == [2, 2]
    assert found.batch_s == pytest.approx(6 * 1.2, rel=0.01)
    assert forecast("", SCHEDULES["pipelined"], equal(4), setup, best_layout(equal(4), setup)).batch_s > 11
    assert len(of("BP 1f1b", 4, setup).layout.stages) == 2


def test_under_a_join_links_may_ask_for_fewer_stages() -> None:
    """Each batch waits for every link; layouts for that were once made as if links took no time."""
    setup = on(4, link=Link(bytes_per_s=100.0, latency_s=5.0))
    for name, stages in (("AL al-fm", 1), ("AL pipelined", 4)):
        found = of(name, 4, setup)
        assert len(found.layout.stages) == stages
        tried = [forecast("", SCHEDULES[name[3:]], equal(4), setup, best_layout(equal(4), on(n))) for n in (1, 2, 3, 4)]
        assert found.batch_s == min(one.batch_s for one in tried)


@pytest.mark.parametrize("name", ["BP gpipe", "BP 1f1b"])
def test_a_pipeline_of_whole_batches_takes_fewer_devices_where_links_are_slow(name: str) -> None:
    """Symptom: over slow links 1F1B was forecast to take two micro-batches on one device, and longer than without.
    Cause: with one micro-batch, fewer devices than there are were not tried."""
    setup = on(4, link=Link(bytes_per_s=100.0, latency_s=50.0))
    found = of(name, 4, setup, micro_batches=(1, 2))
    assert (found.micro_batches, len(found.layout.stages)) == (1, 1)
    assert found.batch_s == pytest.approx(12)
    assert len(of("BP naive", 4, setup).layout.stages) == 4  # which shares the memory of all


def test_of_unlike_devices_the_fastest_are_left_where_fewer_are_better() -> None:
    devices = (PlannedDevice(), PlannedDevice(speed=4.0), PlannedDevice(speed=2.0))
    found = of("AL al-fm", 4, Setup(devices, link=Link(latency_s=5.0)))
    assert [stage.devices for stage in found.layout.stages] == [(1,)]
    assert found.batch_s == pytest.approx(3)


def test_carrying_packets_is_work_of_shared_cores() -> None:
    """A packet of a second over each of 3 links, 12 s of work: 15 s on two cores are 7.5; two stages have one link."""
    two_cores = replace(on(4, link=Link(bytes_per_s=100.0)), contention=lambda at_once: max(1.0, at_once / 2))
    four = forecast("", SCHEDULES["pipelined"], equal(4), two_cores, best_layout(equal(4), two_cores))
    assert four.batch_s == pytest.approx(7.5, rel=0.01)
    assert of("AL pipelined", 4, two_cores).batch_s == pytest.approx(6.5, rel=0.01)
    assert of("AL pipelined", 4, on(4, link=Link(bytes_per_s=100.0))).batch_s == pytest.approx(3, rel=0.02)


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    update_s=st.integers(0, 4),
    micro_batches=st.integers(1, 3),
    name=st.sampled_from(["AL al-fm", "AL backward-overlap", "BP gpipe", "BP 1f1b"]),
    latency=st.integers(0, 3),
    shares=st.booleans(),
)
def test_of_batches_that_begin_after_the_one_before_all_take_what_one_takes(
    rows: list[tuple[int, int]], update_s: int, micro_batches: int, name: str, latency: int, shares: bool
) -> None:
    """Only one of them is simulated; once it was three, and two again."""
    costs = [LayerCost(forward_s, backward_s, update_s, mean_out_bytes=forward_s) for forward_s, backward_s in rows]
    stages = tuple(PlannedStage(range(n, n + 1), (n,), PlannedDevice(), 0.0, 0.0, 0) for n in range(len(rows)))
    contention: Contention | None = (lambda at_once: max(1.0, at_once / 2)) if shares else None
    setup = on(len(rows), batches=12, link=Link(2.0, latency), contention=contention)
    schedule: Schedule | BackpropSchedule = RIVALS[name](micro_batches) if name in RIVALS else SCHEDULES[name[3:]]
    parts = micro_batches if name in RIVALS else 1
    found = forecast(name, schedule, {"cpu": costs}, setup, Layout(stages, any_order=True))
    whole = simulate(
        schedule,
        [cost.durations() for cost in costs],
        12 * parts,
        queue_depth=parts if name in RIVALS else 2,
        hops=[Hop(cost.mean_out_bytes / 2.0, latency) for cost in costs[:-1]],
        contention=contention,
    )
    assert found.batch_s * 12 == pytest.approx(whole.makespan_s)
    assert found.busy == pytest.approx(whole.busy)


@pytest.mark.parametrize("shares", [False, True], ids=["links", "shared cores"])
def test_what_fewer_devices_ask_for_again_is_known(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for 64 devices took 20 s: for each number of them the same layouts were searched for and simulated."""
    costs = {"cpu": [LayerCost(1.0 + n / 8, 2.0, 0.5, mean_out_bytes=100) for n in range(8)]}
    model = Model(costs, dict.fromkeys((1, 4), costs))
    contention: Contention | None = (lambda at_once: max(1.0, at_once / 4)) if shares else None
    setup = on(24, link=Link(100.0, 0.5), contention=contention)
    asked: list[str] = []

    def counted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            asked.append(name)
            return work(*arguments, **options)

        return count

    for module, work in (("candidates", best_layout), ("candidates", backprop_layout), ("forecast", simulate)):
        monkeypatch.setattr(f"pipeal.planning.pure.{module}.{work.__name__}", counted(work.__name__, work))
    for method in METHODS:
        best_forecast(method, model, setup)
    for count in (12, 5):  # of no use are more than there are layers
        fewer = on_fewer(setup, count)
        for method in METHODS:
            asked.clear()
            found = best_forecast(method, model, fewer)
            assert not asked or count < len(costs["cpu"])
            assert found == best_forecast(method, Model(costs, model.bp), fewer)
            assert asked


def test_by_layer_a_stage_fits_where_its_graphs_together_do_not() -> None:
    """Four layers, each with a graph of 10 bytes, on one device that holds 20."""
    layers = {"cpu": [LayerCost(1, 2, activation_bytes=10)] * 4}
    small = Setup((PlannedDevice(memory_bytes=20),), queue_depth=1)
    found = best_forecast("AL pipelined", Model(layers), small)
    assert (found.layout.sizes, found.memory_bytes) == ([4], (10,))
    for setup, method in ((small, "AL al-fm"), (replace(small, within_stage="stage"), "AL pipelined")):
        with pytest.raises(PlacementError, match="no layout fits"):
            best_forecast(method, Model(layers), setup)
    with pytest.raises(ConfigError, match="under backward-overlap no layer goes backward before"):
        best_forecast("AL backward-overlap", Model(layers), replace(small, within_stage="layer"))


def test_by_layer_a_packet_leaves_later() -> None:
    """Two stages of two layers: the first one's packet leaves after F B U of its first layer and F of its second."""
    costs, setup = {"cpu": [LayerCost(1, 2, 1)] * 4}, Setup((PlannedDevice(),) * 2, batches=1)
    assert forecast("", SCHEDULES["pipelined"], costs, setup).batch_s == pytest.approx(5 + 8)
    assert forecast("", SCHEDULES["pipelined"].within("stage"), costs, setup).batch_s == pytest.approx(2 + 8)
    many = replace(setup, batches=50)
    by_layer, by_stage = (
        forecast("", schedule, costs, many).batch_s * 50
        for schedule in (SCHEDULES["pipelined"], SCHEDULES["pipelined"].within("stage"))
    )
    assert by_layer - by_stage == pytest.approx(3)  # the fill, once
