"""The thread that writes checkpoints: training neither waits for it nor stops with it, and it always ends."""

import errno
import gc
import logging
import os
import threading
import time
import weakref

import pytest
import torch

from pipeal.core.errors import DataError, StallError, UntidyError
from pipeal.engine import LayerState
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.checkpoint.writer import CheckpointWriter, Job


class Slow:
    """A store that writes when it is allowed to."""

    def __init__(self, folder="nowhere"):
        self.folder = folder
        self.saved = []
        self.began, self.go = threading.Event(), threading.Event()

    def save(self, step, *_):
        self.began.set()
        assert self.go.wait(120)
        self.saved.append(step)


class Failing:
    """A store that raises what it is given, one after the other; None is success."""

    folder = "nowhere"

    def __init__(self, *errors):
        self.errors = list(errors)

    def save(self, step, *_):
        error = self.errors.pop(0)
        if error is not None:
            raise error


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "pipeal-writer"]


class Passed:
    """A snapshot that has passed one layer, or does what it is told when it is waited for."""

    batch, ended = 0, False

    def __init__(self, weight=None, wait=None):
        if wait is None:
            found = {0: LayerState({"module": {"w": weight}, "gradients": {}, "optimizers": {}}, None)}
        self.wait = wait or (lambda: found)


def submit(writer, step, **more):
    return writer.submit(Job(step, Passed(torch.full((10,), float(step))), {"batch": step}, {}, **more))


@pytest.fixture
def store(tmp_path):
    with CheckpointStore(tmp_path / "checkpoints") as opened:
        yield opened


def test_what_is_submitted_is_on_the_disk_after_a_flush(store, silent):
    with CheckpointWriter(store) as writer:
        for step in (1, 2, 3):
            job = submit(writer, step, best=step == 1)
            assert writer.flush(120)
            assert job.written
            found = store.newest(pytest.fail)
            assert found.position == {"batch": step}
            assert found.layers()[0]["module"]["w"].tolist() == [step] * 10
        assert len(threads()) == 1
    assert not threads()
    assert (writer.failures, writer.replaced, writer.last_failure) == (0, 0, None)
    assert sorted(path.name[-1] for path in store.folder.glob("step-*")) == ["1", "2", "3"]


def test_what_waits_is_written_at_the_end_and_no_thread_begins_without_work(store, silent):
    with CheckpointWriter(store):
        assert not threads()
    with CheckpointWriter(store) as writer:
        submit(writer, 7)
    assert store.newest(pytest.fail).step == 7
    writer.close()
    with pytest.raises(RuntimeError, match="step 8 came after the writer was closed"):
        submit(writer, 8)
    assert not threads()


def test_of_those_that_wait_only_the_newest_and_the_newest_best_are_kept(silent):
    slow = Slow()
    with CheckpointWriter(slow) as writer:
        submit(writer, 1)
        assert slow.began.wait(120)
        for step in range(2, 10):
            submit(writer, step, best=step in (3, 5))
        assert not writer.flush(0.01)
        slow.go.set()
        assert writer.flush(120)
        assert slow.saved == [1, 5, 9]
        assert writer.replaced == 6


def test_a_newer_best_one_replaces_all_that_wait(silent):
    slow = Slow()
    with CheckpointWriter(slow) as writer:
        submit(writer, 1)
        assert slow.began.wait(120)
        for step in (2, 3, 4):
            submit(writer, step, best=step in (2, 4))
        slow.go.set()
    assert slow.saved == [1, 4]


@pytest.mark.parametrize("tells_broken", [True, False])
def test_what_is_not_finite_is_told_or_comes_back(store, tells_broken, said):
    with CheckpointWriter(store) as writer:
        outcome = writer.submit(Job(3, Passed(torch.tensor([float("nan")])), {}, {}, tells_broken=tells_broken))
        assert writer.flush(120)
    assert (outcome.done, outcome.written, store.newest(pytest.fail)) == (True, False, None)
    assert writer.failures == len(said) == tells_broken
    told = said[0] if tells_broken else str(outcome.broken)
    assert told.startswith("layer 0 is not finite after batch -1 (step 3): w;")


def test_jobs_that_give_way_or_are_given_up_are_done(silent):
    slow = Slow()
    with CheckpointWriter(slow) as writer:
        first = submit(writer, 1)
        assert slow.began.wait(120)
        outcomes = [submit(writer, step, best=step == 2) for step in (2, 3, 4)]
        assert [outcome.done for outcome in (first, *outcomes)] == [False, False, True, False]
        writer.give_up()
        assert [outcome.done for outcome in (first, *outcomes)] == [False, True, True, True]
        slow.go.set()
        assert writer.flush(120)
    assert slow.saved == [1]


def test_states_that_are_written_or_replaced_are_let_go(silent):
    slow = Slow()
    kept = []

    def passed():
        tensor = torch.zeros(3)
        kept.append(weakref.ref(tensor))
        return Passed(tensor)

    with CheckpointWriter(slow) as writer:
        slow.go.set()
        outcome = writer.submit(Job(1, passed(), {}, {}))
        assert writer.flush(120)
        gc.collect()
        until = time.monotonic() + 60
        while kept[0]() is not None and time.monotonic() < until:
            time.sleep(0.01)  # the thread has told that it is done, and may not have come back from there
        assert [ref() for ref in kept] == [None]
        assert outcome.done


def test_a_position_is_what_it_was_when_it_was_submitted(store, silent):
    position, state = {"epoch": [1]}, {"rows": []}
    ready = threading.Event()
    with CheckpointWriter(store) as writer:
        writer.submit(Job(1, Passed(wait=lambda: {} if ready.wait(120) else None), position, state))
        position["epoch"].append(2)
        state["more"] = 1
        ready.set()
        with pytest.raises(TypeError, match="JSON"):
            writer.submit(Job(2, Passed(wait=dict), {"a": object()}, {}))
    found = store.newest(pytest.fail)
    assert (found.position, found.state) == ({"epoch": [1]}, {"rows": []})


def test_a_full_disk_is_told_at_growing_intervals_and_its_end_too(said):
    full = DataError("cannot write: No space left on device; make room")
    with CheckpointWriter(Failing(*[full] * 9, None, None, full)) as writer:
        for step in range(12):
            submit(writer, step)
            assert writer.flush(120)
    assert said == [
        "cannot write: No space left on device; make room; the training goes on",
        "cannot write: No space left on device; make room; the training goes on (2 in a row now)",
        "cannot write: No space left on device; make room; the training goes on (4 in a row now)",
        "cannot write: No space left on device; make room; the training goes on (8 in a row now)",
        "checkpoints are written again, that of step 9 is the first",
        "cannot write: No space left on device; make room; the training goes on",
    ]
    assert writer.failures == 10
    assert writer.last_failure == str(full)


def test_a_disk_that_fills_while_training_goes_on_leaves_the_last_good_one(store, monkeypatch, said):
    with CheckpointWriter(store) as writer:
        submit(writer, 1)
        assert writer.flush(120)
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
            )
            for step in (2, 3, 4):
                submit(writer, step)
                assert writer.flush(120)
            assert store.newest(pytest.fail).step == 1
            assert [path.name for path in store.folder.glob(".step*")] == []
        submit(writer, 5)
    assert store.newest(pytest.fail).step == 5
    assert (writer.failures, len(said)) == (3, 3)


def test_one_that_is_written_though_an_older_one_stays_is_written(store, said):
    """Symptom: "which could not be saved: the checkpoint is written, but an older one cannot be removed"."""
    untidy = UntidyError("step-3 is written, but an older one cannot be removed: Directory not empty; make room")
    with CheckpointWriter(Failing(DataError("full"), *[untidy] * 3, None, untidy)) as writer:
        jobs = []
        for step in range(6):
            jobs.append(submit(writer, step))
            assert writer.flush(120)
    assert [job.written for job in jobs] == [False, *[True] * 5]
    assert said == [
        "full; the training goes on",
        "checkpoints are written again, that of step 1 is the first",
        f"{untidy}; the training goes on",
        f"{untidy}; the training goes on (2 in a row now)",
        f"{untidy}; the training goes on",
    ]
    assert (writer.failures, writer.failing) == (1, False)


def test_any_other_error_of_a_write_is_told_with_its_type(store, said):
    with CheckpointWriter(store) as writer:
        writer.submit(Job(1, Passed({1, 2}), {}, {}))
        assert writer.flush(120)
        writer.submit(Job(2, Passed(wait=lambda: None), {}, {}))
    assert (
        said[0]
        == "layer 0.module.w is a set, wanted tensors, numbers, texts, dicts, lists and tuples; the training goes on"
    )
    assert said[1].startswith("the checkpoint of step 2 failed: AttributeError: ")
    assert writer.failures == 2


def test_a_pipeline_that_dies_is_no_failure_of_the_disk(store, silent):
    died = threading.Event()

    def wait():
        assert died.wait(120)
        snapshot.ended = True
        raise RuntimeError("stage 1: non-finite loss")

    snapshot = Passed(wait=wait)
    with CheckpointWriter(store) as writer:
        job = writer.submit(Job(1, snapshot, {}, {}))
        time.sleep(0.02)
        died.set()
    assert not threads()
    assert (job.written, writer.failures) == (False, 0)
    assert store.newest(pytest.fail) is None


def test_states_that_cannot_be_had_from_a_living_pipeline_are_a_failure(store, said):
    """A stage without memory for the copy gave no checkpoint, and the run said that it was saved."""

    def wait():
        raise RuntimeError("can't allocate memory")

    with CheckpointWriter(store) as writer:
        job = writer.submit(Job(1, Passed(wait=wait), {}, {}))
    assert (job.written, writer.failures) == (False, 1)
    assert said == ["the checkpoint of step 1 failed: RuntimeError: can't allocate memory; the training goes on"]


def test_a_disk_that_never_answers_is_named_and_does_not_hold_the_end_up(silent):
    slow = Slow("runs/x/checkpoints")
    writer = CheckpointWriter(slow)
    submit(writer, 1)
    with pytest.raises(
        StallError, match=r"still not written 0\.05 s after .*; look at the disk below runs/x/checkpoints"
    ):
        writer.close(0.05)
    slow.go.set()
    writer.close()
    assert not threads()


def test_someone_who_cannot_be_told_is_raised_where_the_training_runs(monkeypatch):
    class Closed(logging.Handler):
        def emit(self, _):
            raise BrokenPipeError("no reader is left")

    monkeypatch.setattr(logging.getLogger("pipeal"), "handlers", [Closed()])
    writer = CheckpointWriter(Failing(OSError("x"), None))
    submit(writer, 1)
    with pytest.raises(BrokenPipeError):
        writer.flush(120)
    writer.close()
    assert not threads()


def test_a_thread_that_may_not_be_started_is_the_error_and_none_is_waited_for(monkeypatch):
    """Symptom: the end waited for a thread that never was, and told that, not what the system had refused."""

    def refused(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start"), CheckpointWriter(Slow()) as writer:  # noqa: PT012
        with pytest.raises(RuntimeError):
            submit(writer, 1)
        assert writer.flush(0), "nothing waits to be written"
        submit(writer, 2)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_signal_does_not_wait_for_what_hangs(kind, monkeypatch, said):
    """Symptom: the second Ctrl-C waited 300 s for the disk that the first one had waited for."""
    monkeypatch.setattr("pipeal.training.checkpoint.writer.HURRY_S", 0.1)
    monkeypatch.setattr("pipeal.training.checkpoint.writer.PATIENCE_S", 0.2)
    slow = Slow()
    with pytest.raises(kind), CheckpointWriter(slow) as writer:  # noqa: PT012  what happens before counts
        submit(writer, 1)
        assert slow.began.wait(120)
        submit(writer, 2)
        raise kind
    assert "a checkpoint is still not written 0.1 s after the end" in said[0], "not 0.2, as long as patience lasts"
    slow.go.set()
    for thread in threads():
        thread.join(120)
    assert slow.saved == [1], "what had not been begun is not wanted any more"
