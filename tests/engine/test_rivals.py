"""Pipelined backpropagation by calculation: the bubbles and the memory that its papers give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal.engine import Action
from pipeal.planning import simulate
from pipeal.planning.pure.backprop_schedules import BackpropSchedule, gpipe, naive, one_f_one_b
from pipeal.planning.pure.simulate import Hop, Simulation

F, B, U = Action.FORWARD, Action.BACKWARD, Action.UPDATE

Make = Callable[[int], BackpropSchedule]

stage_counts, micro_counts, batch_counts = st.integers(1, 8), st.integers(1, 10), st.integers(1, 3)
pipelines = st.sampled_from([gpipe, one_f_one_b])


def run(schedule: BackpropSchedule, stages: int, batches: int, hops: list[Hop] | None = None) -> Simulation:
    """Stages that take 1 s forward and 2 s backward for a micro-batch."""
    cost = {F: 1.0, B: 2.0, U: 0.0}
    numbers = batches * schedule.micro_batches
    return simulate(schedule, [cost] * stages, numbers, queue_depth=numbers, hops=hops)


@given(make=pipelines, stages=stage_counts, micro=micro_counts, batches=batch_counts)
def test_the_bubble_is_that_of_the_papers(make: Make, stages: int, micro: int, batches: int) -> None:
    found = run(make(micro), stages, batches)
    assert found.makespan_s == batches * 3 * (micro + stages - 1)
    idle = (stages - 1) / (micro + stages - 1)
    assert [1 - share for share in found.busy] == pytest.approx([idle] * stages)


@given(stages=stage_counts, batches=batch_counts)
def test_without_micro_batches_one_stage_works_at_a_time(stages: int, batches: int) -> None:
    found = run(naive(), stages, batches)
    assert found.makespan_s == batches * stages * 3
    assert found.held == [1] * stages


@given(stages=stage_counts, micro=micro_counts, batches=batch_counts)
def test_how_many_graphs_a_stage_holds(stages: int, micro: int, batches: int) -> None:
    assert run(gpipe(micro), stages, batches).held == [micro] * stages
    assert run(one_f_one_b(micro), stages, batches).held == [min(stages - s, micro) for s in range(stages)]


@given(make=pipelines, stages=st.integers(2, 6), micro=micro_counts)
def test_gradients_come_back_over_the_links(make: Make, stages: int, micro: int) -> None:
    """The first micro-batch climbs over all links and its gradient comes down over them."""
    slow = run(make(micro), stages, 1, [Hop(0.0, 0.5)] * (stages - 1))
    assert slow.makespan_s >= run(make(micro), stages, 1).makespan_s + 2 * 0.5 * (stages - 1)


@given(make=pipelines, stages=stage_counts, micro=micro_counts, batches=batch_counts)
def test_each_stage_does_each_task_once_and_updates_last(make: Make, stages: int, micro: int, batches: int) -> None:
    tasks = list(make(micro).order(stages, batches * micro))
    assert len(tasks) == len(set(tasks)) == stages * batches * (2 * micro + 1)
    for stage in range(stages):
        own = [task for task in tasks if task.stage == stage]
        place = {task: number for number, task in enumerate(own)}
        for task in own:
            if task.action is B:
                assert place[task] > place[next(t for t in own if t.action is F and t.batch == task.batch)]
            if task.action is U:
                earlier = [t for t in own if t.action is B and t.batch <= task.batch]
                assert all(place[t] < place[task] for t in earlier)
                assert len(earlier) == task.batch + 1
