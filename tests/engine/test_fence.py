"""Law 4: a snapshot between any two batches finds what training layer by layer would have left there."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import pytest
import torch
from bench.virtual import VirtualLayer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeal import ALPackage, Pipeline, ScheduleError, StallError
from pipeal.core.protocols import TrainableLayer
from pipeal.core.rng import keyed
from pipeal.engine import SCHEDULES, LayerState, Snapshot, layer_state, load_layer_state

from .cases import Case, Layer, cases, cosine, cuts, outcome, train_by_hand
from .test_layer_state import pairs, rebuilt, written_and_read
from .traps import STALL_S, Gate, LookedAt, Trap, nothing, quick, throw

THREADED = [name for name, schedule in SCHEDULES.items() if not schedule.serial]
LIMIT_S = 120.0
RICH = Case(
    (
        Layer("nn.Dropout", "AL", 8, 5),
        Layer("functional", "own ENC", 5, 4, "adamw"),
        Layer("pipeal.Dropout", "silent AL", 9, 3, "sgd"),
        Layer("batch norm", "own AE", 4, 3),
    ),
    rows=(5, 5, 3, 5, 5, 2),
    seed=11,
)


def by_hand(case: Case, last: int) -> list[list[LayerState]]:
    """What a snapshot before each batch must find, and one after the last."""
    package, batches = case.build(), case.batches()
    losses: list[list[Tensor]] = [[] for _ in package]

    def found() -> list[LayerState]:
        return [
            LayerState(layer_state(layer), torch.stack(rows) if rows else None)
            for layer, rows in zip(package, losses, strict=True)
        ]

    package.train()
    states = [found()]
    for batch, (x, y) in enumerate(batches[:last]):
        for number, layer in enumerate(package):
            with keyed(case.seed, number, batch, whole_default=True):
                x, y = layer(x, y)
            if (loss := layer.loss()) is not None:
                losses[number].append(torch.stack(loss).float())
            layer.backward()
            layer.scale_lr(cosine(batch))
            layer.update()
        states.append(found())
    return states


def differences(found: dict[int, LayerState], wanted: list[LayerState]) -> list[str]:
    assert list(found) == list(range(len(wanted)))
    trees = [({"state": one.state, "losses": one.losses}, {"state": two.state, "losses": two.losses})
             for one, two in zip(found.values(), wanted, strict=True)]  # fmt: skip
    return [
        f"layer {number}: {path}"
        for number, two in enumerate(trees)
        for path, (a, b) in pairs(*two).items()
        if not (same(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b)
    ]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def pipeline(case: Case, package: ALPackage, schedule: str, sizes: list[int], **options: Any) -> Pipeline:
    chosen = {"threads": 1, "stall_timeout_s": LIMIT_S, "seed": case.seed} | options
    return Pipeline(package, ["cpu"] * len(sizes), schedule, sizes=sizes, **chosen)


def placements(case: Case, data: st.DataObject) -> dict[str, Any]:
    stages = data.draw(st.integers(1, min(4, len(case.layers))), label="stages")
    return {
        "schedule": data.draw(st.sampled_from(list(SCHEDULES)), label="schedule"),
        "sizes": data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label="sizes"),
        "queue_depth": data.draw(st.integers(1, 4), label="queue depth"),
    }


@given(case=cases(), data=st.data())
def test_fences_find_what_training_by_hand_leaves_and_change_nothing(case: Case, data: st.DataObject) -> None:
    last = len(case.rows)
    fenced = data.draw(st.lists(st.integers(0, last), max_size=5), label="snapshots")
    wanted, whole = by_hand(case, last), case.build()
    losses = train_by_hand(whole, case.batches(), seed=case.seed)
    package, snapshots = case.build(), []
    with pipeline(case, package, **placements(case, data)) as pipe:
        snapshots += [pipe.snapshot() for _ in range(fenced.count(0))]
        report = pipe.run(
            case.batches(),
            cosine,
            lambda batch: snapshots.extend(pipe.snapshot() for _ in range(fenced.count(batch + 1))),
        )
    assert outcome(package, report.losses, []).differences(outcome(whole, losses, [])) == []
    assert [snapshot.batch for snapshot in snapshots] == sorted(fenced)
    for snapshot in snapshots:
        assert not snapshot.is_open
        assert differences(snapshot.wait(), wanted[snapshot.batch]) == []


@given(case=cases(), data=st.data())
@pytest.mark.slow
def test_going_on_from_a_fence_is_never_having_stopped(case: Case, data: st.DataObject) -> None:
    """In another schedule, on another number of stages, and once more from a snapshot of the second life."""
    last, batches = len(case.rows), case.batches()
    stops = sorted(data.draw(st.lists(st.integers(0, last), min_size=1, max_size=2), label="stops"))
    whole = case.build()
    losses = train_by_hand(whole, batches, seed=case.seed)
    package, first = case.build(), 0
    before: dict[int, list[Tensor]] = {}
    for stop in stops:
        with pipeline(case, package, **placements(case, data), first_batch=first) as pipe:
            for x, y in batches[first:stop]:
                pipe.submit(x, y, cosine(pipe.next_batch))
            snapshot = pipe.snapshot()
            for x, y in batches[stop:]:  # a life that is lost
                pipe.submit(x, y, cosine(pipe.next_batch))
        package, first = rebuilt(case), snapshot.batch
        for number, found in snapshot.wait(LIMIT_S).items():
            load_layer_state(package[number], written_and_read(found.state))
            before.setdefault(number, []).extend([] if found.losses is None else [found.losses])
    with pipeline(case, package, **placements(case, data), first_batch=first) as pipe:
        report = pipe.run(batches[first:], cosine)
    after = dict(
        zip([n for n, layer in enumerate(case.layers) if layer.kind != "silent AL"], report.losses, strict=False)
    )
    pieces = [
        [*before.get(number, []), *([after[number]] if number in after else [])] for number in range(len(package))
    ]
    found_losses = [torch.cat(rows) for rows in pieces if rows]
    assert outcome(package, found_losses, []).differences(outcome(whole, losses, [])) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fences_between_all_batches_on_every_placement(schedule: str) -> None:
    wanted = by_hand(RICH, len(RICH.rows))
    for stages in range(1, 5):
        for sizes in cuts(4, stages):
            for queue_depth in (1, 3):
                snapshots = []
                with pipeline(RICH, RICH.build(), schedule, sizes, queue_depth=queue_depth) as pipe:
                    for x, y in RICH.batches():
                        pipe.submit(x, y, cosine(pipe.next_batch))
                        snapshots.append(pipe.snapshot())
                assert [differences(snapshot.wait(), wanted[snapshot.batch]) for snapshot in snapshots] == [[]] * len(
                    RICH.rows
                )


def test_losses_are_those_since_the_last_report() -> None:
    with pipeline(RICH, RICH.build(), "pipelined", [2, 2]) as pipe:
        pipe.run(RICH.batches()[:2], cosine)
        assert all(found.losses is None for found in pipe.snapshot().wait(LIMIT_S).values())
        for x, y in RICH.batches()[2:]:
            pipe.submit(x, y, cosine(pipe.next_batch))
        found = pipe.snapshot().wait(LIMIT_S)
        report = pipe.drain()
    given = [state.losses for state in found.values() if state.losses is not None]
    assert [layer for layer, state in found.items() if state.losses is None] == [2]
    assert all(torch.equal(a, b) for a, b in zip(given, report.losses, strict=True))


def test_another_thread_may_wait_while_the_caller_trains() -> None:
    found: list[Any] = []
    with pipeline(RICH, RICH.build(), "pipelined", [1, 1, 2]) as pipe:
        pipe.submit(*RICH.batches()[0])
        snapshot = pipe.snapshot()
        writer = threading.Thread(target=lambda: found.append(snapshot.wait(LIMIT_S)))
        writer.start()
        for x, y in RICH.batches()[1:]:
            pipe.submit(x, y)
        writer.join(LIMIT_S)
    assert list(found[0]) == [0, 1, 2, 3]


def test_no_stage_waits_for_another() -> None:
    """Stage 0 has come by, and trains on, while stage 1 stands still before the snapshot."""
    gate = Gate()
    first = VirtualLayer(0, 0)
    with Pipeline([first, Trap("U", 0, gate.stand_still_here)], threads=1, queue_depth=3) as pipe:
        pipe.submit(None, None)
        snapshot = pipe.snapshot()
        pipe.submit(None, None)
        assert gate.reached.wait(LIMIT_S)
        until = time.perf_counter() + LIMIT_S
        while pipe._executor.progress._ended[0, "U"] < 2 and time.perf_counter() < until:  # type: ignore[union-attr]
            time.sleep(0.001)
        assert list(snapshot._states) == [0]
        assert snapshot.is_open
        with pytest.raises(StallError, match=r"layers \[1\] before batch 1 were not there after 0.05 s"):
            snapshot.wait(0.05)
        gate.open()
        assert list(snapshot.wait(LIMIT_S)) == [0, 1]


@pytest.mark.parametrize("schedule", THREADED)
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_failure_while_a_fence_is_under_way_reaches_who_waits_for_it(schedule: str, queue_depth: int) -> None:
    gate, error = Gate(), ValueError("the trap")

    def spring() -> None:
        gate.stand_still_here()
        raise error

    begin, snapshots = time.perf_counter(), []
    with pytest.raises(ValueError, match="the trap"):  # noqa: PT012, SIM117
        with Pipeline(
            [*quick(1), Trap("B", 1, spring), *quick(1)], None, schedule, threads=1, queue_depth=queue_depth
        ) as p:
            p.submit(None, None)
            snapshots.append(p.snapshot())
            p.submit(None, None)
            snapshots.append(p.snapshot())
            assert gate.reached.wait(LIMIT_S)
            assert list(snapshots[0].wait(LIMIT_S)) == [0, 1, 2]
            gate.open()
            with pytest.raises(ValueError, match="the trap") as caught:
                snapshots[1].wait(LIMIT_S)
            assert caught.value is error
            assert not snapshots[1].is_open
            p.snapshot()
    assert list(snapshots[0].wait()) == [0, 1, 2]  # what was whole before stays whole
    assert time.perf_counter() - begin < LIMIT_S


def test_a_pipeline_that_is_stopped_tells_who_waits_for_a_fence() -> None:
    gate, raised = Gate(), []

    def wait(snapshot: Snapshot) -> None:
        try:
            snapshot.wait(LIMIT_S)
        except ScheduleError as error:
            raised.append(str(error))
            gate.open()

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with Pipeline([*quick(1), Trap("F", 0, gate.stand_still_here)], threads=1) as pipe:
            pipe.submit(None, None)
            waiting = threading.Thread(target=wait, args=(pipe.snapshot(),))
            waiting.start()
            assert gate.reached.wait(LIMIT_S)
            raise KeyboardInterrupt
    waiting.join(LIMIT_S)
    assert raised == ["the pipeline was stopped before every stage had come by the snapshot before batch 1"]


class Reluctant(VirtualLayer):
    """Its state is hard to come by."""

    def __init__(self, spring: Any) -> None:
        super().__init__(0, 0)
        self.spring = spring

    def get_extra_state(self) -> Any:
        return self.spring()

    def set_extra_state(self, state: Any) -> None: ...


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_state_that_cannot_be_had_is_told_by_the_fence_and_training_goes_on(schedule: str) -> None:
    """Never lose work: a checkpoint that fails is no reason to end the run."""
    layers = [*quick(1), Reluctant(throw(LookupError("not today"))), *quick(1)]
    with Pipeline(layers, None, schedule, threads=1) as pipe:
        pipe.submit(None, None)
        snapshot = pipe.snapshot()
        assert pipe.run(nothing(5)).batches == 6
    with pytest.raises(LookupError, match="not today") as caught:
        snapshot.wait(LIMIT_S)
    notes = getattr(caught.value, "__notes__", [])
    assert notes[0].startswith("in the snapshot before batch 1, of stage ")
    assert "layer 1 (Reluctant), device cpu" in notes[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_later_stages_copy_nothing_for_a_fence_that_was_given_up(schedule: str) -> None:
    asked: list[int] = []
    layers = [*quick(1), Reluctant(throw(LookupError("not today"))), Reluctant(lambda: asked.append(1))]
    with Pipeline(layers, None, schedule, threads=1) as pipe:
        pipe.submit(None, None)
        pipe.snapshot()
        pipe.drain()
    assert asked == []


def test_saving_is_progress_and_is_told_apart_from_work_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, saving = LookedAt(monkeypatch), [True]

    def save() -> None:
        if saving:
            clock.take(STALL_S / 2)
        else:
            clock.now += STALL_S / 2

    layers: list[TrainableLayer] = [Reluctant(save) for _ in range(6)]
    with Pipeline(layers, ["cpu"], "pipelined", sizes=[6], threads=1, stall_timeout_s=STALL_S) as pipe:
        pipe.submit(None, None)
        pipe.snapshot()
        report = pipe.drain()
        assert report.stages[0].waiting["saving"] == 3 * STALL_S
        assert report.stages[0].busy_s == 0
        saving.clear()
        pipe.snapshot().wait(LIMIT_S)  # at rest, like any wait at rest
        clock.now += STALL_S / 2
        report = pipe.run(nothing(1))
        assert sum(report.stages[0].waiting.values()) <= report.seconds, "of what was before"


def test_a_stage_that_stands_still_while_saving_is_named() -> None:
    gate = Gate()
    words = "stage 1 stands still: saving in the snapshot before batch 1 for"
    with gate.alone(), pytest.raises(StallError, match=words):  # noqa: PT012, SIM117
        with Pipeline([*quick(1), Reluctant(gate.stand_still_here)], threads=1, stall_timeout_s=STALL_S) as pipe:
            pipe.submit(None, None)
            pipe.snapshot()
            try:
                pipe.drain()
            finally:
                gate.open()


def test_predictions_wait_for_fences_and_a_fence_may_be_asked_for_between_predictions() -> None:
    wanted = by_hand(RICH, len(RICH.rows))[-1]
    with pipeline(RICH, RICH.build(), "pipelined", [1, 1, 1, 1]) as pipe:
        for x, y in RICH.batches():
            pipe.submit(x, y, cosine(pipe.next_batch))
        snapshot = pipe.snapshot()
        for _ in pipe.predict_each([x for x, _ in RICH.batches()]):
            assert not snapshot.is_open
            assert differences(pipe.snapshot().wait(LIMIT_S), wanted) == []


def test_a_pipeline_that_is_not_open_has_no_fences() -> None:
    pipe = Pipeline(quick(1))
    with pytest.raises(ScheduleError, match="not open"):
        pipe.snapshot()


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_a_fence_that_its_caller_lets_go_of_is_gone(schedule: str) -> None:
    """A copy of all weights stayed in memory until the next one."""
    with pipeline(RICH, RICH.build(), schedule, [2, 2]) as pipe:
        snapshot = pipe.snapshot()
        snapshot.wait(LIMIT_S)
        pipe.run(RICH.batches(), cosine)
        gone = weakref.ref(snapshot)
        del snapshot
        assert gone() is None


def test_a_fence_holds_nothing_of_the_layers() -> None:
    with pipeline(RICH, RICH.build(), "sequential", [4]) as pipe:
        pipe.run(RICH.batches(), cosine)
        found = pipe.snapshot().wait()
        before = [value.clone() for state in found.values() for value in state.state["module"].values()]
        pipe.run(RICH.batches(), cosine)
    after = [value for state in found.values() for value in state.state["module"].values()]
    assert all(map(torch.equal, before, after))
