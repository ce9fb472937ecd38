"""The simulated clock: closed forms, bounds and orders that hold for every schedule, and the real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from bench.virtual import VirtualLayer
from hypothesis import given
from hypothesis import strategies as st

from pipeal import Pipeline
from pipeal.engine import SCHEDULES, Action, Schedule, Task, schedule_named, violations
from pipeal.planning import simulate
from pipeal.planning.pure.simulate import Durations, Hop, Rules

from .cases import ORDERS

F, B, U = Action.FORWARD, Action.BACKWARD, Action.UPDATE


def costs_of(forward: float, backward: float, update: float = 0.0) -> Durations:
    return {F: float(forward), B: float(backward), U: float(update)}


# Whole numbers of seconds, so that every sum is exact.
seconds = st.integers(0, 20)
stage_costs = st.builds(costs_of, seconds, seconds, seconds)
rows_of_costs = st.lists(stage_costs, min_size=1, max_size=6)
batch_counts = st.integers(1, 8)
depths = st.integers(1, 4)
schedules = st.sampled_from(list(ORDERS.values()))


def makespan(schedule: str | Schedule, costs: Sequence[Durations], batches: int, queue_depth: int = 2) -> float:
    return simulate(schedule_named(schedule), costs, batches, queue_depth=queue_depth).makespan_s


ClosedForm = Callable[[int, int, float, float, float], float]

CLOSED_FORMS: dict[str, ClosedForm] = {
    "sequential": lambda s, t, f, b, u: t * s * (f + b + u),
    "backward-overlap": lambda s, t, f, b, u: t * (s * f + b + u),
    "al-fm": lambda s, t, f, b, u: t * (s * f + b + u),
    "pipelined": lambda s, t, f, b, u: (s - 1) * f + t * (f + b + u),
}


@given(
    name=st.sampled_from(list(SCHEDULES)),
    stages=st.integers(1, 8),
    batches=batch_counts,
    each=stage_costs,
    queue_depth=depths,
)
def test_equal_stages_have_a_closed_form(
    name: str, stages: int, batches: int, each: Durations, queue_depth: int
) -> None:
    wanted = CLOSED_FORMS[name](stages, batches, each[F], each[B], each[U])
    assert makespan(name, [each] * stages, batches, queue_depth) == wanted


@pytest.mark.parametrize("stages", [2, 4, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 64))])
def test_the_cap_of_al_fm_and_the_gain_of_pipelined(stages: int) -> None:
    each, batches = costs_of(5, 10), 200
    alone = makespan("sequential", [each] * stages, batches)
    assert alone / makespan("al-fm", [each] * stages, batches) == pytest.approx(3 * stages / (stages + 2))
    gain = alone / makespan("pipelined", [each] * stages, batches)
    assert gain == pytest.approx(stages / (1 + (stages - 1) / 3 / batches))


@given(costs=rows_of_costs, batches=batch_counts, queue_depth=depths)
def test_sequential_takes_the_sum_of_everything(costs: list[Durations], batches: int, queue_depth: int) -> None:
    assert makespan("sequential", costs, batches, queue_depth) == batches * sum(sum(c.values()) for c in costs)


@given(costs=rows_of_costs, batches=batch_counts, queue_depth=depths)
def test_fewer_rules_never_take_longer(costs: list[Durations], batches: int, queue_depth: int) -> None:
    names = ("pipelined", "al-fm", "backward-overlap", "sequential")
    spans = [makespan(name, costs, batches, queue_depth) for name in names]
    assert spans == sorted(spans)


@given(schedule=schedules, costs=rows_of_costs, batches=batch_counts, queue_depth=depths)
def test_no_run_ends_before_its_slowest_stage_or_its_critical_path(
    schedule: Schedule, costs: list[Durations], batches: int, queue_depth: int
) -> None:
    found = simulate(schedule, costs, batches, queue_depth=queue_depth).makespan_s
    for stage, own in enumerate(costs):
        climb = sum(before[F] for before in costs[:stage])
        assert found >= climb + batches * sum(own.values())
    # The last batch cannot start before the first stage has done with the others; the first climbs all stages.
    first = costs[0]
    climb = sum(c[F] for c in costs)
    assert found >= (batches - 1) * sum(first.values()) + climb + costs[-1][B] + costs[-1][U]


@given(costs=rows_of_costs, batches=batch_counts, deeper=st.integers(1, 3), queue_depth=depths)
def test_a_deeper_queue_never_costs_time(costs: list[Durations], batches: int, deeper: int, queue_depth: int) -> None:
    shallow = makespan("pipelined", costs, batches, queue_depth)
    assert makespan("pipelined", costs, batches, queue_depth + deeper) <= shallow


@given(costs=rows_of_costs, batches=batch_counts)
def test_a_queue_as_deep_as_the_run_leaves_the_recurrence_of_a_line_of_machines(
    costs: list[Durations], batches: int
) -> None:
    """``F(s, t) = max(F(s-1, t), free(s, t-1)) + f``: the permutation flow shop with blocking removed."""
    free = [0.0] * len(costs)
    for _ in range(batches):
        arrived = 0.0
        for stage, own in enumerate(costs):
            arrived = max(arrived, free[stage]) + own[F]
            free[stage] = arrived + own[B] + own[U]
    assert makespan("pipelined", costs, batches, batches) == max(free)


@given(schedule=schedules, costs=rows_of_costs, batches=batch_counts, queue_depth=depths)
def test_its_spans_keep_the_schedule_and_no_stage_does_two_things_at_once(
    schedule: Schedule, costs: list[Durations], batches: int, queue_depth: int
) -> None:
    found = simulate(schedule, costs, batches, queue_depth=queue_depth)
    assert len(found.spans) == 3 * len(costs) * batches
    assert violations(schedule, len(costs), found.spans) == []
    groups = [found.spans] if schedule.serial else [[s for s in found.spans if s.stage == i] for i in range(len(costs))]
    for spans in groups:
        ordered = sorted(spans, key=lambda span: (span.begin, span.end))
        assert all(one.end <= two.begin for one, two in pairwise(ordered))
    assert all(share <= 1 + 1e-12 for share in found.busy)


@given(costs=rows_of_costs, batches=batch_counts, queue_depth=depths)
def test_the_packets_between_two_stages_fit_the_queue(costs: list[Durations], batches: int, queue_depth: int) -> None:
    """A stage goes on (to B) only once its packet is in the queue, and the queue holds ``queue_depth``."""
    found = simulate(SCHEDULES["pipelined"], costs, batches, queue_depth=queue_depth)
    at = {(span.stage, span.batch, span.action): span for span in found.spans}
    for stage in range(len(costs) - 1):
        for batch in range(queue_depth, batches):
            assert at[stage, batch, B].begin >= at[stage + 1, batch - queue_depth, F].begin


@given(costs=rows_of_costs, batches=batch_counts, busy=st.integers(0, 6), latency=st.integers(0, 6), queue_depth=depths)
def test_a_link_delays_each_packet_and_carries_one_at_a_time(
    costs: list[Durations], batches: int, busy: int, latency: int, queue_depth: int
) -> None:
    hops = [Hop(float(busy), float(latency))] * (len(costs) - 1)
    found = simulate(SCHEDULES["pipelined"], costs, batches, queue_depth=queue_depth, hops=hops)
    at = {(span.stage, span.batch, span.action): span for span in found.spans}
    for stage in range(1, len(costs)):
        for batch in range(batches):
            sent = [at[stage - 1, earlier, F].end for earlier in range(batch + 1)]
            # Whichever packet found the link free last: from then on it was never free.
            passed = max(end + (batch - earlier + 1) * busy for earlier, end in enumerate(sent))
            assert at[stage, batch, F].begin >= passed + latency
    plain = makespan("pipelined", costs, batches, queue_depth)
    assert found.makespan_s >= plain
    if not busy + latency:
        assert found.makespan_s == plain


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_slow_link_sets_the_pace(schedule: str) -> None:
    costs, batches = [costs_of(1, 2)] * 3, 10
    found = simulate(SCHEDULES[schedule], costs, batches, hops=[Hop(7.0), Hop(1.0)]).makespan_s
    if schedule == "pipelined":
        assert found == 1 + 7 * batches + 1 + 1 + 3
    elif schedule == "sequential":  # a packet is on its way while its stage goes backward
        assert found == makespan(schedule, costs, batches) + 5 * batches
        by_stage = simulate(SCHEDULES[schedule].within("stage"), costs, batches, hops=[Hop(7.0), Hop(1.0)]).makespan_s
        assert by_stage == makespan(schedule, costs, batches) + 8 * batches
    else:
        assert found == makespan(schedule, costs, batches) + 8 * batches  # each batch waits for both links


@given(schedule=schedules, costs=rows_of_costs, batches=batch_counts, cores=st.integers(1, 4))
def test_stages_that_share_cores_do_no_more_than_the_cores_can(
    schedule: Schedule, costs: list[Durations], batches: int, cores: int
) -> None:
    found = simulate(schedule, costs, batches, contention=lambda at_once: max(1.0, at_once / cores))
    work = batches * sum(sum(own.values()) for own in costs)
    alone = makespan(schedule, costs, batches)
    slack = 1 + 1e-9
    assert max(alone, work / cores) <= found.makespan_s * slack
    assert found.makespan_s <= (work if cores == 1 or schedule.serial else alone + work / cores) * slack
    if cores >= len(costs):
        assert found.makespan_s == pytest.approx(alone)
    assert violations(schedule, len(costs), found.spans, slack_s=1e-9) == []


def test_a_crowd_slows_everyone_as_measured() -> None:
    """Two equal stages, of which each takes a fifth longer while the other works."""
    found = simulate(SCHEDULES["pipelined"], [costs_of(0, 10)] * 2, 10, contention=lambda n: 1.2 if n == 2 else 1.0)
    assert found.makespan_s == pytest.approx(120)
    assert found.busy == pytest.approx([1.0, 1.0])


@given(schedule=schedules, costs=rows_of_costs, batches=st.integers(1, 8))
def test_al_holds_one_graph_per_stage(schedule: Schedule, costs: list[Durations], batches: int) -> None:
    assert simulate(schedule, costs, batches).held == [1] * len(costs)


def test_rules_that_wait_in_a_circle_are_found_out() -> None:
    class Circular(Schedule):
        def after(self, task: Task, stages: int) -> tuple[Task, ...]:
            extra = (Task(task.batch, stages - 1, U),) if task.stage == 0 and task.action is F else ()
            return super().after(task, stages) + extra

    circular: Rules = Circular("circular", False, False, False)
    with pytest.raises(AssertionError, match="6 tasks wait for each other"):
        simulate(circular, [costs_of(1, 1)] * 2, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_to_do_takes_no_time(schedule: str) -> None:
    assert makespan(schedule, [costs_of(1, 2)] * 3, 0) == 0
    assert simulate(SCHEDULES[schedule], [costs_of(0, 0)] * 3, 4).busy == [0.0] * 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_engine_is_never_faster_than_the_simulation_and_not_much_slower(schedule: str) -> None:
    """The executors and the simulator carry out the same schedule: unequal stages, a short queue."""
    times = [(0.004, 0.006, 0.002), (0.002, 0.010, 0.0), (0.006, 0.002, 0.004)]
    costs = [dict(zip((F, B, U), own, strict=True)) for own in times]
    wanted = simulate(SCHEDULES[schedule], costs, 8, queue_depth=1).makespan_s
    with Pipeline([VirtualLayer(*own) for own in times], None, schedule, queue_depth=1, threads=1) as pipe:
        for _ in range(50):  # a busy machine wakes sleepers late, never early: one quiet moment of it is enough
            found = pipe.run([(None, None)] * 8).seconds
            assert wanted <= found
            if found <= 2 * wanted:
                break
    assert found <= 2 * wanted


def test_packets_that_shared_cores_carry_come_in_order_and_late() -> None:
    """One core: F0 of 1 s, then its packet of 2 s beside B0 and F1, at half the pace each; nothing is lost."""
    one_core = float
    found = simulate(
        SCHEDULES["pipelined"], [costs_of(1, 2), costs_of(1, 2)], 3, hops=[Hop(2.0, 0.5)], contention=one_core
    )
    assert not violations(SCHEDULES["pipelined"], 2, found.spans)
    assert found.makespan_s >= 2 * 3 * 3 + 3 * 2  # all of the work, and one thing at a time
    first = next(span for span in found.spans if (span.stage, span.batch, span.action) == (1, 0, F))
    assert first.begin == pytest.approx(1 + 2 * 2 + 0.5)
