"""Law 3: a thread never fails quietly, and nothing hangs."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.virtual import VirtualLayer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Pipeline, ScheduleError, StallError
from pipeal.engine import SCHEDULES
from pipeal.engine.devices import Device

from .traps import SOON_S, STALL_S, Gate, LookedAt, LostLosses, Trap, nothing, quick, throw

WORDS = {"F": "forward", "B": "backward", "U": "update"}
THREADED = [name for name, schedule in SCHEDULES.items() if not schedule.serial]


class PickyError(Exception):
    """Cannot be built again from its ``args``, copied or pickled."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}: {hint}")
        self.code = code


ERRORS: list[BaseException] = [
    ValueError("wrong"),
    PickyError(7, hint="look here"),
    StopIteration(3),
    GeneratorExit("gone"),
    SystemExit(4),
    KeyboardInterrupt("in a layer"),
    TimeoutError("not ours"),
]


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def run(layers: list[nn.Module], schedule: str, batches: int, **options: Any) -> float:
    """Runs virtual batches and says how long it took, also when it fails (in a note)."""
    begin = time.perf_counter()
    try:
        with Pipeline(layers, schedule=schedule, **({"threads": 1, "stall_timeout_s": 120.0} | options)) as pipe:
            pipe.run(nothing(batches))
    finally:
        assert time.perf_counter() - begin < SOON_S
    return time.perf_counter() - begin


@given(
    schedule=st.sampled_from(list(SCHEDULES)),
    action=st.sampled_from("FBU"),
    stages=st.integers(1, 4),
    data=st.data(),
    queue_depth=st.integers(1, 3),
)
@settings(max_examples=60)
def test_an_exception_of_any_action_reaches_the_caller(
    schedule: str, action: str, stages: int, data: st.DataObject, queue_depth: int
) -> None:
    batches = data.draw(st.integers(1, 9), label="batches")
    layer = data.draw(st.integers(0, stages), label="layer")  # the last stage has two
    batch = data.draw(st.sampled_from([0, batches // 2, batches - 1]), label="batch")
    layers = quick(stages + 1)
    layers[layer] = Trap(action, batch, throw(ValueError("the trap")))
    with pytest.raises(ValueError, match="the trap") as caught:
        run(
            layers,
            schedule,
            batches,
            devices=["cpu"] * stages,
            sizes=[1] * (stages - 1) + [2],
            queue_depth=queue_depth,
            first_batch=100,
        )
    assert notes_of(caught.value) == (
        f"in the {WORDS[action]} of stage {min(layer, stages - 1)}, layer {layer} (Trap), "
        f"batch {100 + batch}, device cpu; input no tensor"
    )


def test_after_a_failure_a_worker_ends_with_the_action_that_it_is_in() -> None:
    """Symptom: stopping waited for a forward, a backward and an update, and took a slow batch for a standstill."""
    gate = Gate()
    slow = Trap("F", 0, gate.stand_still_here)

    def fail_meanwhile() -> None:
        assert gate.reached.wait(120)
        raise ValueError("the trap")

    def learn() -> None:
        with Pipeline([Trap("F", 1, fail_meanwhile), slow], ["cpu"] * 2, threads=1) as pipe:
            try:
                pipe.run(nothing(2))
            finally:
                gate.open()

    with pytest.raises(ValueError, match="the trap") as caught:
        learn()
    assert slow.done == {"F": 1, "B": 0, "U": 0}
    assert "stands still" not in notes_of(caught.value)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_it_arrives_as_the_very_same_exception(schedule: str, error: BaseException) -> None:
    layers = [*quick(1), Trap("B", 2, throw(error)), *quick(1)]
    with pytest.raises(type(error)) as caught:
        run(layers, schedule, 6)
    assert caught.value is error


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_an_exit_raised_in_a_layer_says_where_as_well(schedule: str) -> None:
    """SystemExit and KeyboardInterrupt are no ``Exception``; whoever sees them end a run needs the note as much."""
    error = SystemExit(4)
    with pytest.raises(SystemExit) as caught:
        run([*quick(1), Trap("B", 2, throw(error))], schedule, 6)
    assert "stage 1, layer 1" in notes_of(caught.value)


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_its_own_cause_is_kept(schedule: str) -> None:
    """``raise ... from None`` on the way to the caller wiped out the ``raise ... from cause`` of the layer."""

    def spring() -> None:
        raise ValueError("effect") from KeyError("cause")

    with pytest.raises(ValueError, match="effect") as caught:
        run([*quick(1), Trap("F", 1, spring)], schedule, 4)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_losses_that_cannot_be_had_are_a_failure_of_that_layer(schedule: str) -> None:
    with pytest.raises(LookupError) as caught:
        run([*quick(1), LostLosses(0, 0)], schedule, 3)
    assert "stage 1, layer 1 (LostLosses), batch 0, device cpu" in notes_of(caught.value)


class Fails(AL):
    """A real layer that fails in one action on the second batch."""

    def __init__(self, action: str) -> None:
        super().__init__(ENC(nn.Linear(3, 3), nn.Linear(3, 2)), AE(nn.Linear(2, 2), nn.Linear(2, 2)))
        self.action, self.seen = action, 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        self._fail("F")
        return super().forward(x, y)

    def backward(self) -> None:
        self._fail("B")
        super().backward()

    def update(self) -> None:
        self._fail("U")
        super().update()

    def _fail(self, action: str) -> None:
        if self.action == action and self.seen == 2:
            raise RuntimeError("broken")


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_a_device_that_fails_where_it_is_waited_for_says_where(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a GPU's error without stage and batch. Cause: it came out of the wait before a batch, not of a layer."""

    def fails(_: Device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Device, "limit_run_ahead", fails)
    with pytest.raises(RuntimeError, match="illegal") as caught:
        run(quick(2), schedule, 1)
    assert "in the forward of stage 0, batch 0, device cpu" in notes_of(caught.value)


@pytest.mark.parametrize("action", "FBU")
@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_the_note_has_the_shapes(schedule: str, action: str) -> None:
    """Law 3: a note of stage, layer, batch, device and the shapes it had, whatever the action."""
    package = ALPackage([Fails(""), Fails(action)])
    with pytest.raises(RuntimeError, match="broken") as caught, Pipeline(package, schedule=schedule, threads=1) as pipe:
        pipe.run([(torch.ones(5, 3), torch.ones(5, 2))] * 3)
    assert "(5, 3) float32, (5, 2) float32" in notes_of(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wrong_shape_of_the_user_is_named(schedule: str) -> None:
    package = ALPackage([Fails(""), Fails("")])
    with pytest.raises(RuntimeError) as caught, Pipeline(package, schedule=schedule, threads=1) as pipe:
        pipe.run([(torch.ones(5, 3), torch.ones(5, 2)), (torch.ones(5, 4), torch.ones(5, 2))])
    assert "stage 0, layer 0 (Fails), batch 1, device cpu; input (5, 4) float32" in notes_of(caught.value)


USES: dict[str, Callable[[Pipeline, Path], object]] = {
    "submit": lambda pipe, _: pipe.submit(None, None),
    "predict": lambda pipe, _: pipe.predict(None),
    "predict_each": lambda pipe, _: list(pipe.predict_each([None])),
    "predict_exits": lambda pipe, _: list(pipe.predict_exits([None])),
    "drain": lambda pipe, _: pipe.drain(),
    "save": lambda pipe, folder: pipe.save(folder / "mixed"),
    "load": lambda pipe, folder: pipe.load(folder / "sound"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("use", USES)
def test_what_a_hook_or_a_signal_handler_calls_within_a_batch_is_refused(
    tmp_path: Path, schedule: str, use: str
) -> None:
    """Symptom: ``save`` in a hook wrote, as if it were sound, a file of layers of which some had learnt from the batch
    and some had not; ``submit`` ended in an AssertionError, and a ``drain`` reported more losses than batches. On a
    worker, calls waited for themselves until ``stall_timeout_s`` was over."""
    Pipeline(quick(3)).save(tmp_path / "sound")
    refused = []

    def spring() -> None:
        with pytest.raises(ScheduleError, match="within a batch"):
            USES[use](pipe, tmp_path)
        refused.append(use)

    with Pipeline([*quick(1), Trap("F", 1, spring), *quick(1)], None, schedule, threads=1) as pipe:
        assert pipe.run(nothing(3)).batches == pipe.next_batch == 3
    assert refused == [use]
    assert not (tmp_path / "mixed").exists()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_layer_may_ask_another_pipeline(schedule: str) -> None:
    """As of a teacher: it waits for stages that do not wait for it."""
    answers = []
    x = torch.ones(2, 3)
    with Pipeline(ALPackage([Fails(""), Fails("")]), None, schedule, threads=1) as teacher:
        layers = [*quick(1), Trap("F", 1, lambda: answers.append(teacher.predict(x))), *quick(1)]
        with Pipeline(layers, None, schedule, threads=1) as pipe:
            pipe.run(nothing(3))
        (answer,) = answers
        assert torch.equal(answer, teacher.predict(x))


@pytest.mark.parametrize("schedule", THREADED)
@pytest.mark.parametrize("where", [0, 1, 2])
def test_stages_that_wait_for_space_or_input_are_woken(schedule: str, where: int) -> None:
    """Before the failure the stages ahead fill their queues, and those behind starve."""
    gate = Gate()

    def spring() -> None:
        gate.stand_still_here()
        raise ValueError("late")

    layers = quick(3)
    layers[where] = Trap("B", 1, spring)
    timer = threading.Timer(0.1, gate.open)
    timer.start()
    with pytest.raises(ValueError, match="late"):
        run(layers, schedule, 50, queue_depth=1)
    timer.join()


def test_the_first_of_several_failures_wins() -> None:
    """The second stage fails while the first one's failure is on its way to the caller."""
    gate, second_thread = Gate(), list[threading.Thread]()

    def second() -> None:
        second_thread.append(threading.current_thread())
        gate.stand_still_here()
        raise KeyError("second")

    def first() -> None:
        assert gate.reached.wait(120)
        worker: Any = threading.current_thread()
        gate.open_after(worker.progress.ending)
        raise ValueError("first")

    def batches() -> Iterator[tuple[None, None]]:
        yield from nothing(2)
        assert gate.reached.wait(120)
        second_thread[0].join(120)  # both stages have failed before the caller looks
        yield from nothing(2)

    with pytest.raises(ValueError, match="first"), Pipeline([Trap("F", 1, first), Trap("F", 0, second)]) as pipe:
        pipe.run(batches())
    assert gate.ended.is_set()


def test_a_failure_seen_only_at_the_end_of_the_with_block() -> None:
    with pytest.raises(ValueError, match="unseen"), Pipeline([Trap("U", 0, throw(ValueError("unseen")))]) as pipe:
        pipe.submit(None, None)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("use", USES)
def test_a_failed_pipeline_says_since_when(tmp_path: Path, schedule: str, use: str) -> None:
    """Symptom: ``save`` after a Ctrl-C that had been caught raised a KeyboardInterrupt without words, as if of now.
    Here it is a ValueError, as pytest ends by the other."""
    Pipeline(quick(2)).save(tmp_path / "sound")
    failure = ValueError("the trap")
    with Pipeline([*quick(1), Trap("B", 2, throw(failure))], None, schedule) as pipe:
        with pytest.raises(ValueError, match="the trap"):
            pipe.run(nothing(4))
        for _ in range(2):
            with pytest.raises(
                ScheduleError,
                match=r"at different batches, since ValueError: the trap, in the backward of stage 1, layer 1 "
                r"\(Trap\), batch 2, device cpu; leave its `with`, and load what was saved before$",
            ) as caught:
                USES[use](pipe, tmp_path)
            assert caught.value.__cause__ is failure
    assert not (tmp_path / "mixed").exists()
    pipe.load(tmp_path / "sound")
    pipe.save(tmp_path / "again")


@pytest.mark.parametrize("schedule", THREADED)
def test_each_thread_is_told_a_failure_as_it_is(schedule: str) -> None:
    """Law 3: what another thread has heard of, such as one that predicts, is the first exception for this one, too."""
    heard = []

    def predict() -> None:
        with pytest.raises(ValueError, match="the trap"):
            pipe.predict(None)
        heard.append(True)

    with Pipeline([Trap("B", 0, throw(ValueError("the trap")))], None, schedule) as pipe:
        pipe.submit(None, None)
        other = threading.Thread(target=predict)
        other.start()
        other.join()
        with pytest.raises(ValueError, match="the trap"):
            pipe.drain()
    assert heard


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_error_that_was_caught_is_not_raised_again_at_the_end(schedule: str) -> None:
    """Symptom: ``try: pipe.run(…) except ValueError`` within the ``with`` did not help: its end raised once more."""
    caught = []
    with Pipeline([*quick(1), Trap("F", 1, throw(ValueError("bad batch")))], None, schedule) as pipe:
        try:
            pipe.run(nothing(3))
        except ValueError as error:
            caught.append(str(error))
    assert caught == ["bad batch"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_caught_error_in_the_middle_of_an_update_is_not_raised_again_either(schedule: str) -> None:
    with Pipeline([Trap("B", 1, throw(ValueError("bad batch")))], None, schedule) as pipe:
        pipe.submit(None, None, updates=False)
        with pytest.raises(ValueError, match="bad batch"):  # noqa: PT012  whichever call hears of it first
            pipe.submit(None, None, updates=False)
            pipe.drain()


@pytest.mark.parametrize("schedule", THREADED)
def test_another_error_than_the_one_that_was_caught_is_raised_at_the_end(schedule: str) -> None:
    """What a stage failed with after something else was caught has yet to be told."""
    pipe = Pipeline([Trap("U", 1, throw(ValueError("unseen")))], None, schedule)
    with pytest.raises(ValueError, match="unseen"), pipe:  # noqa: PT012  its end raises
        with pytest.raises(ScheduleError, match="between two batches of one update"):  # noqa: PT012
            pipe.submit(None, None, updates=False)
            pipe.snapshot()
        pipe.submit(None, None)
        pipe.submit(None, None)


def test_a_wait_that_ctrl_c_ended_does_not_keep_the_end_from_finishing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyboardInterrupt in the caller's own wait is no failure of a stage; what was submitted is learnt from."""
    learnt = Trap("U", 9, nothing)
    with Pipeline([learnt, *quick(1)]) as pipe:
        pipe.submit(None, None)
        with monkeypatch.context() as patched:
            patched.setattr(pipe._executor, "drain", throw(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                pipe.drain()
    assert learnt.done["U"] == 1


def test_a_second_ctrl_c_is_not_taken_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a Ctrl-C while the end of the ``with`` waited went unheard, where one before it had been caught."""
    first, second = KeyboardInterrupt(), KeyboardInterrupt()
    pipe = Pipeline(quick(1))
    with pytest.raises(KeyboardInterrupt) as caught, pipe:  # noqa: PT012  its end raises
        monkeypatch.setattr(pipe._executor, "drain", throw(first))
        with pytest.raises(KeyboardInterrupt):
            pipe.drain()
        monkeypatch.setattr(pipe._executor, "drain", throw(second))
    assert caught.value is second


def test_a_standstill_that_was_caught_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the end of the ``with`` waited ``stall_timeout_s`` once more, and raised the same once more."""
    monkeypatch.setattr("pipeal.engine.execution.executors.STOP_S", 0.2)
    gate, reports = Gate(), []

    def reported(*args: Any) -> StallError:
        reports.append(args)
        return StallError("stands still")

    monkeypatch.setattr("pipeal.engine.execution.executors.stall_report", reported)
    pipe = Pipeline([Trap("B", 0, gate.stand_still_here), *quick(1)], stall_timeout_s=0.3)
    with gate.alone(), pipe, pytest.raises(StallError, match="stands still"):
        pipe.run(nothing(2))
    gate.open()
    assert pipe.left_behind
    assert len(reports) == 1


def test_a_first_failure_is_not_hidden_by_a_stage_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: StallError instead of the layer's own error. Cause: ``stop`` raised over it at the end of ``with``."""
    monkeypatch.setattr("pipeal.engine.execution.executors.STOP_S", 0.2)
    gate = Gate()

    def spring() -> None:
        assert gate.reached.wait(120)
        raise ValueError("the first")

    try:
        with (
            pytest.raises(ValueError, match="the first"),
            Pipeline([Trap("B", 0, gate.stand_still_here), Trap("B", 0, spring)]) as pipe,
        ):
            pipe.submit(None, None)
        assert pipe.left_behind
    finally:
        gate.open()


def test_a_failure_does_not_wait_for_a_long_action_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stage is in an action that ends when the pipeline has been left."""
    monkeypatch.setattr("pipeal.engine.execution.executors.STOP_S", 0.2)
    gate = Gate()

    def spring() -> None:
        assert gate.reached.wait(120)
        raise ValueError("now")

    try:
        with (
            pytest.raises(ValueError, match="now"),
            Pipeline([Trap("B", 0, gate.stand_still_here), Trap("F", 0, spring)]) as pipe,
        ):
            pipe.run(nothing(3))
        assert not gate.ended.is_set()
    finally:
        gate.open()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exception_of_the_data_ends_the_run(schedule: str) -> None:
    def rows() -> Iterator[tuple[None, None]]:
        yield from nothing(5)
        raise OSError("disk")

    layers = [VirtualLayer(0.001, 0.001) for _ in range(3)]
    begin = time.perf_counter()
    with pytest.raises(OSError, match="disk"), Pipeline(layers, schedule=schedule, queue_depth=1) as pipe:
        pipe.run(rows())
    assert time.perf_counter() - begin < SOON_S


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_after_an_exception_of_the_data_the_pipeline_still_learns(schedule: str) -> None:
    def rows() -> Iterator[tuple[None, None]]:
        yield from nothing(2)
        raise OSError("disk")

    with Pipeline(quick(2), schedule=schedule) as pipe:
        with pytest.raises(OSError, match="disk"):
            pipe.run(rows())
        assert pipe.run(nothing(3)).batches == 5


def test_an_exception_in_the_callers_block_leaves_at_once() -> None:
    begin = time.perf_counter()
    with pytest.raises(ZeroDivisionError), Pipeline([VirtualLayer(0, 2.0) for _ in range(2)], queue_depth=50) as pipe:  # noqa: PT012
        for _ in range(50):
            pipe.submit(None, None)
        raise ZeroDivisionError
    assert time.perf_counter() - begin < SOON_S  # not the 100 s that the submitted batches would take


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_after_a_failure_layers_can_be_copied(schedule: str) -> None:
    """Those that had only been through their forward kept its graph, which no copy can have."""
    package = ALPackage([AL(ENC(nn.Linear(4, 4), nn.Linear(4, 4)), AE(nn.Linear(4, 4), nn.Linear(4, 4)))])
    layers = [*package, Trap("F", 0, throw(ValueError("the trap")))]
    with pytest.raises(ValueError, match="the trap"), Pipeline(layers, None, schedule, threads=1) as pipe:
        pipe.run([(torch.ones(2, 4), torch.ones(2, 4))])
    copy.deepcopy(package)


def test_a_wait_that_another_thread_ends_by_closing_says_so() -> None:
    gate, found = Gate(), list[str]()

    def waits(pipe: Pipeline) -> None:
        with pytest.raises(ScheduleError) as raised:
            pipe.drain()
        found.append(str(raised.value))

    with pytest.raises(ZeroDivisionError), Pipeline([Trap("F", 0, gate.stand_still_here)], threads=1) as pipe:  # noqa: PT012
        pipe.submit(None, None)
        assert gate.reached.wait(SOON_S)
        other = threading.Thread(target=waits, args=(pipe,))
        other.start()
        while not pipe._executor.progress._waiters:  # type: ignore[union-attr]
            time.sleep(1e-3)
        threading.Timer(0.1, gate.open).start()
        raise ZeroDivisionError
    other.join()
    assert found == ["the pipeline was closed, by another thread, during this wait"]


def test_workers_that_cannot_all_start_do_not_leave_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Whoever starts a thread owns its end``: also when the third one cannot be had."""
    start, started = threading.Thread.start, []

    def scarce(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr("pipeal.engine.execution.worker.Worker.start", scarce)
    pipe = Pipeline(quick(3))
    with pytest.raises(RuntimeError, match="can't start"):
        pipe.__enter__()
    for thread in started:
        thread.join(SOON_S)
    alive = [thread.name for thread in started if thread.is_alive()]
    for thread in started:  # so that this test harms no other
        thread.progress.stop()
    assert alive == []


@pytest.mark.parametrize("action", ["B", *(pytest.param(one, marks=pytest.mark.slow) for one in "FU")])
@pytest.mark.parametrize("schedule", THREADED)
def test_the_watchdog_names_the_stage_that_stands_still(schedule: str, action: str) -> None:
    gate = Gate()
    layers = [*quick(1), Trap(action, 2, gate.stand_still_here), *quick(1)]
    begin = time.perf_counter()
    opened = Pipeline(layers, schedule=schedule, stall_timeout_s=STALL_S, queue_depth=1)
    with gate.alone(), pytest.raises(StallError) as caught, opened as pipe:  # noqa: PT012  the gate opens before the way out
        try:
            pipe.run(nothing(30))
        finally:
            took = time.perf_counter() - begin
            gate.open()
    text = str(caught.value)
    assert text.startswith(f"stage 1 stands still: {action}2@s1 for ")
    assert "stand_still_here" in text
    assert "stage 0: waiting for " in text
    assert STALL_S <= took < SOON_S


def test_a_stalled_stage_that_never_returns_is_left_behind_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.engine.execution.executors.STOP_S", 0.3)
    gate = Gate()
    begin = time.perf_counter()
    with (
        gate.alone(),
        pytest.raises(StallError) as caught,
        Pipeline([Trap("B", 0, gate.stand_still_here)], stall_timeout_s=STALL_S) as pipe,
    ):
        pipe.run(nothing(2))
    assert time.perf_counter() - begin < SOON_S
    assert "stand_still_here" in notes_of(caught.value)
    gate.open()


def test_slow_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each action is shorter than the limit, the run is longer, and so is what is left when all is submitted."""
    clock = LookedAt(monkeypatch)
    with Pipeline([VirtualLayer(0.1, 0.2), VirtualLayer(0.2, 0.1)], stall_timeout_s=0.8) as pipe:
        for _ in range(8):
            pipe.submit(None, None)
        before = clock.now
        pipe.drain()
    assert clock.now - before > 0.8


def test_a_caller_who_idles_is_not_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LookedAt(monkeypatch)
    with Pipeline([VirtualLayer(0.1, 0.1) for _ in range(2)], stall_timeout_s=STALL_S) as pipe:
        pipe.run(nothing(2))
        clock.now += 1.5 * STALL_S
        assert pipe.run(nothing(2)).batches == 2


SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
from pipeal import Pipeline
from bench.virtual import VirtualLayer

def batches():
    yield None, None
    print("running", flush=True)
    while True:
        yield None, None

with Pipeline([VirtualLayer({seconds}, {seconds}) for _ in range(3)], schedule={schedule!r}) as pipe:
    pipe.run(batches())
"""


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        ("pipelined", 600.0),
        pytest.param("pipelined", 0.05, marks=pytest.mark.slow),
        pytest.param("sequential", 0.05, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_the_run(schedule: str, seconds: float) -> None:
    """Also while a stage is in an action of ten minutes."""
    script = textwrap.dedent(SCRIPT.format(schedule=schedule, seconds=seconds))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # pytest has put scripts there
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n", process.communicate()[1]
        time.sleep(0.3)
        begin = time.perf_counter()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=2 * SOON_S)
        took = time.perf_counter() - begin
    finally:
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" in errors.splitlines()[-1] or "\nKeyboardInterrupt" in errors
    assert process.returncode in (130, -signal.SIGINT)
    assert took < SOON_S
