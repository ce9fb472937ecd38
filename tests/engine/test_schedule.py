"""Law 2: a schedule is data. What it allows is proved in plain Python, and a recorded run is held against it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from threading import Event
from typing import Any

import pytest
from bench.virtual import VirtualLayer
from hypothesis import given
from hypothesis import strategies as st

from pipeal import ConfigError, Pipeline, Window
from pipeal.core.options import WithinStage
from pipeal.core.tree import Tree
from pipeal.engine import SCHEDULES, Action, Schedule, Task, schedule_named, violations
from pipeal.engine.distributed.rank import listeners

from .cases import ORDERS
from .traps import SOON_S, Gate, LookedAt, Trap, nothing

F, B, U = Action.FORWARD, Action.BACKWARD, Action.UPDATE

schedules = st.sampled_from(list(ORDERS.values()))
stage_counts = st.integers(1, 6)
batch_counts = st.integers(0, 8)


@given(schedule=schedules, stages=stage_counts, batches=batch_counts)
def test_its_order_is_complete_and_breaks_no_rule(schedule: Schedule, stages: int, batches: int) -> None:
    order = list(schedule.order(stages, batches))
    assert len(order) == len(set(order)) == 3 * stages * batches
    place = {task: number for number, task in enumerate(order)}
    for task in order:
        assert all(place[before] < place[task] for before in schedule.after(task, stages))


@given(schedule=schedules, stages=stage_counts, batches=st.integers(1, 4))
def test_no_task_waits_for_the_future_or_for_another_pipeline(schedule: Schedule, stages: int, batches: int) -> None:
    for task in schedule.order(stages, batches):
        for before in schedule.after(task, stages):
            assert 0 <= before.batch <= task.batch
            assert 0 <= before.stage < stages


@given(schedule=schedules, stages=stage_counts, batches=st.integers(1, 5))
def test_every_stage_works_in_the_order_f_b_u(schedule: Schedule, stages: int, batches: int) -> None:
    """Each task of a stage follows, directly or through others, the one before it on the same stage."""
    for stage in range(stages):
        own = [Task(batch, stage, action) for batch in range(batches) for action in (F, B, U)]
        for earlier, later in pairwise(own):
            assert earlier in schedule.after(later, stages)


@given(stages=st.integers(2, 6), batch=st.integers(1, 5))
def test_what_each_schedule_adds(stages: int, batch: int) -> None:
    def after(name: str, stage: int, action: Action) -> set[Task]:
        return set(SCHEDULES[name].after(Task(batch, stage, action), stages))

    everywhere = {Task(batch - 1, stage, U) for stage in range(stages)}
    assert after("pipelined", 0, F) == {Task(batch - 1, 0, U)}
    assert after("al-fm", 0, F) == everywhere
    assert after("al-fm", 0, B) == {Task(batch, 0, F)}
    assert after("backward-overlap", 0, B) == {Task(batch, 0, F), Task(batch, stages - 1, F)}
    assert Task(batch, 0, U) in after("sequential", 1, B)


class EverySecond(Schedule):
    """Joins before batches 2, 4, …."""

    def after(self, task: Task, stages: int) -> tuple[Task, ...]:
        return replace(SCHEDULES["pipelined"], joins=task.batch % 2 == 0).after(task, stages)


@pytest.mark.parametrize(
    "schedule",
    [*ORDERS.values(), EverySecond("every-second", False, False, False)],
    ids=lambda one: f"{one.name}/{one.within_stage}",
)
def test_stages_of_other_processes_are_told_whatever_they_wait_for(schedule: Schedule) -> None:
    """Only batch 1 was asked about: under a schedule with a rule for others, a run over processes stood still."""
    stages = 3
    waits = {
        (task.stage, before.stage, before.action)
        for task in schedule.order(stages, 12)
        for before in schedule.after(task, stages)
        if before.stage != task.stage and (before.action, before.stage) != (F, task.stage - 1)
    }
    told = {
        (other, stage, action)
        for stage in range(stages)
        for action in Action
        for other in listeners(schedule, stage, stages)[action]
    }
    assert told == waits


def replay(schedule: Schedule, stages: int, batches: int, queue_depth: int, turn: Random) -> list[Task]:
    """The threaded executor in plain Python: workers that take, act, hand on, wait; a random one moves.

    Raises:
        AssertionError: Nobody can move, and work is left.
    """
    ended: list[Task] = []
    queues = [list(range(batches)) if stage == 0 else [] for stage in range(stages)]
    steps = [[(what, batch) for batch in range(batches) for what in ("take", F, "put", B, U)] for _ in queues]

    def may(stage: int) -> bool:
        what, batch = steps[stage][0]
        if what == "take":
            return bool(queues[stage])
        if what == "put":
            return stage == stages - 1 or len(queues[stage + 1]) < queue_depth
        return all(before in ended for before in schedule.after(Task(batch, stage, what), stages))

    while any(steps):
        able = [stage for stage in range(stages) if steps[stage] and may(stage)]
        assert able, f"deadlock before {[step[0] for step in steps if step]}"
        stage = turn.choice(able)
        what, batch = steps[stage].pop(0)
        if what == "take":
            assert queues[stage].pop(0) == batch
        elif what == "put":
            if stage + 1 < stages:
                queues[stage + 1].append(batch)
        else:
            ended.append(Task(batch, stage, what))
    return ended


@given(
    schedule=schedules,
    stages=stage_counts,
    batches=batch_counts,
    queue_depth=st.integers(1, 3),
    turn=st.randoms(use_true_random=False),
)
def test_no_schedule_deadlocks_whoever_comes_next(
    schedule: Schedule, stages: int, batches: int, queue_depth: int, turn: Random
) -> None:
    assert len(replay(schedule, stages, batches, queue_depth, turn)) == 3 * stages * batches


def test_the_replay_notices_a_deadlock() -> None:
    class Circular(Schedule):
        def after(self, task: Task, stages: int) -> tuple[Task, ...]:
            extra = (Task(task.batch, stages - 1, U),) if task.stage == 0 and task.action is F else ()
            return super().after(task, stages) + extra

    with pytest.raises(AssertionError, match="deadlock"):
        replay(Circular("circular", False, False, False), 2, 1, 1, Random(0))


@given(stages=st.integers(1, 4), batches=st.integers(1, 6), turn=st.randoms(use_true_random=False))
def test_a_serial_schedule_leaves_no_choice(stages: int, batches: int, turn: Random) -> None:
    for serial in (SCHEDULES["sequential"], ORDERS["sequential/stage"]):
        assert replay(serial, stages, batches, 2, turn) == list(serial.order(stages, batches))


@pytest.mark.parametrize(
    ("name", "near"), [("pipeline", "pipelined"), ("al_fm", "al-fm"), ("Sequential", "sequential")]
)
def test_an_unknown_schedule_is_named_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        schedule_named(name)


def test_a_schedule_names_itself() -> None:
    assert all(schedule_named(name) is schedule_named(schedule) for name, schedule in SCHEDULES.items())


def recorded(schedule: str | Schedule, sizes: list[int], batches: int, **options: Any) -> Pipeline:
    layers = [VirtualLayer(0.0004 * (number % 3), 0.0006, 0.0003) for number in range(sum(sizes))]
    options = {"trace": Window(0, batches), "threads": 1} | options
    with Pipeline(layers, ["cpu"] * len(sizes), schedule, sizes=sizes, **options) as pipe:
        pipe.run([(None, None)] * batches)
    return pipe


@pytest.mark.parametrize("sizes", [[1], [1, 1], [2, 1, 1], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("schedule", ORDERS)
def test_a_real_run_keeps_its_schedule(schedule: str, sizes: list[int]) -> None:
    for queue_depth in (1, 3):
        spans = recorded(ORDERS[schedule], sizes, 7, queue_depth=queue_depth).spans()
        assert len(spans) == 3 * sum(sizes) * 7
        assert violations(ORDERS[schedule], len(sizes), spans) == []
        assert all(span.begin <= span.end for span in spans)


@pytest.mark.parametrize("order", ["layer", "stage"])
def test_within_a_stage_layers_go_in_the_order_asked_for(order: WithinStage) -> None:
    (stage,) = recorded("pipelined", [3], 1, within_stage=order).stages
    spans = sorted(stage.clock.spans(), key=lambda span: span.begin)
    by_layer = [(layer, action) for layer in range(3) for action in (F, B, U)]
    by_action = [(layer, action) for action in (F, B, U) for layer in range(3)]
    assert [(span.layer, span.action) for span in spans] == (by_layer if order == "layer" else by_action)


def test_the_packet_goes_on_before_the_last_layer_of_a_stage_goes_backward() -> None:
    begun = Event()

    class Waits(VirtualLayer):
        """Goes backward only once the next stage has begun with the packet."""

        def backward(self) -> None:
            assert begun.wait(30), "the next stage never got the packet"

    class Tells(VirtualLayer):
        """Says that it has begun."""

        def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
            begun.set()
            return super().forward(x, y)

    layers = [VirtualLayer(0, 0), Waits(0, 0), Tells(0, 0)]
    with Pipeline(layers, ["cpu"] * 2, "pipelined", sizes=[2, 1], trace=Window(0, 1), threads=1) as pipe:
        pipe.run([(None, None)])
    spans = pipe.spans()
    assert len(spans) == 3 * 3  # nothing is done twice
    ends, begins = ({(span.layer, span.action): getattr(span, edge) for span in spans} for edge in ("end", "begin"))
    assert ends[1, F] <= begins[2, F]


def test_two_graphs_at_once_are_told_of() -> None:
    spans = recorded("pipelined", [3], 2, within_stage="stage").spans()
    assert violations(SCHEDULES["pipelined"].within("stage"), 1, spans) == []
    found = violations(SCHEDULES["pipelined"], 1, spans)
    assert any(line.startswith("F0 of layer 1 began") and line.endswith("of B0 of layer 0") for line in found)


def test_a_schedule_whose_backwards_wait_has_no_order_by_layer() -> None:
    with pytest.raises(ConfigError, match=r"under backward-overlap no layer goes backward before .* use 'stage', or"):
        Pipeline([VirtualLayer(0, 0, 0)], None, "backward-overlap", within_stage="layer")
    with pytest.raises(ConfigError, match="did you mean 'layer'"):
        Pipeline([VirtualLayer(0, 0, 0)], within_stage="layers")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCHEDULES)
def test_there_and_back_an_order_leaves_the_schedule(name: str) -> None:
    own = SCHEDULES[name]
    other: WithinStage = "stage" if own.by_layer else "layer"
    if name == "backward-overlap":
        return
    assert own.within(other) != own
    assert own.within(other).within(own.within_stage) == own == own.within(None)


def test_only_the_window_is_kept() -> None:
    spans = recorded("pipelined", [1, 1], 9, trace=Window(3, 2), first_batch=100).spans()
    assert {span.batch for span in spans} == {103, 104}
    assert recorded("pipelined", [1, 1], 3, trace=None).spans() == []


def test_pipelined_breaks_the_rules_of_the_schedules_that_join() -> None:
    spans = recorded("pipelined", [1, 1, 1], 8, queue_depth=3).spans()
    assert violations(SCHEDULES["al-fm"], 3, spans)
    assert violations(SCHEDULES["sequential"], 3, spans)


@given(data=st.data(), name=st.sampled_from(list(SCHEDULES)))
def test_a_doctored_trace_is_found_out(data: st.DataObject, name: str) -> None:
    """Any task moved to before the end of any one that it must follow is reported, by name."""
    schedule, stages = SCHEDULES[name], 3
    spans = TRACES[name]
    if not spans:
        spans += recorded(name, [1, 1, 1], 4).spans()
    victim = data.draw(st.sampled_from([span for span in spans if schedule.after(_task(span), stages)]))
    before = data.draw(st.sampled_from(schedule.after(_task(victim), stages)))
    end = max(span.end for span in spans if _task(span) == before)
    moved = replace(victim, begin=end - 1e-3)
    found = violations(schedule, stages, [moved if span is victim else span for span in spans])
    assert any(line.startswith(f"{_task(victim)} began") and line.endswith(f"of {before}") for line in found)
    slack_s = 1.0 + max(span.end for span in spans) - min(span.begin for span in spans)  # a busy machine may take long
    assert violations(schedule, stages, [moved if span is victim else span for span in spans], slack_s=slack_s) == []


TRACES: dict[str, list[Any]] = {name: [] for name in SCHEDULES}


def _task(span: Any) -> Task:
    return Task(span.batch, span.stage, span.action)


class HoldsBack(Schedule):
    """Backwards wait for the forward of the last stage, by a rule of its own."""

    def after(self, task: Task, stages: int) -> tuple[Task, ...]:
        extra = (Task(task.batch, stages - 1, F),) if task.action is B else ()
        return super().after(task, stages) + extra


class OwnStart(Schedule):
    def __init__(self, name: str) -> None:
        super().__init__(name, forwards_first=False, joins=True, serial=True)


def test_schedules_of_users_keep_their_order_or_say_why() -> None:
    with pytest.raises(ConfigError, match="under held rules of its own may hold backwards back; use 'stage'"):
        HoldsBack("held", False, False, False).within("layer")
    own = OwnStart("own")
    by_layer = own.within("layer")
    assert (type(by_layer), by_layer.by_layer, by_layer.forwards_first) == (OwnStart, True, False)
    assert by_layer.within("stage") == own


def test_a_long_stage_is_watched_and_stopped_layer_by_layer() -> None:
    """Six layers of half a second in one stage: each is progress, and none is begun after a stop."""
    with pytest.MonkeyPatch.context() as patch:
        clock = LookedAt(patch)
        layers = [VirtualLayer(0.2, 0.2, 0.1) for _ in range(6)]
        with Pipeline(layers, ["cpu"], threads=1, stall_timeout_s=1.0) as pipe:
            pipe.run([(None, None)])
        assert clock.now == pytest.approx(3.0)
    gate = Gate()
    traps = [Trap("F", 0, gate.stand_still_here), *(Trap("F", 1, nothing) for _ in range(5))]
    with pytest.raises(KeyError, match="told"), Pipeline(traps, ["cpu"], threads=1) as pipe:  # noqa: PT012
        pipe.submit(None, None)
        assert gate.reached.wait(SOON_S)
        gate.open_after(pipe._executor.progress.ending)  # type: ignore[union-attr]
        raise KeyError("told")
    assert not pipe.left_behind
    assert [trap.done["F"] for trap in traps] == [1, 0, 0, 0, 0, 0]
