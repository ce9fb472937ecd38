"""Threads and processes: they end, they fail in their turn, they never leave anybody waiting."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import count, islice

import pytest

from pipeal.core.errors import ConfigError, ScheduleError
from pipeal.data.iterators import (
    BlockwiseShuffleIterator,
    FixedBatchIterator,
    MapIterator,
    NativeCheckpointableIterator,
    ParallelMapIterator,
    PrefetchIterator,
    parallel,
)
from tests.data.iterators.pipelines import Endless, tag, until_gone


class Odd(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one}{two}")


def numbers(many=20):
    return NativeCheckpointableIterator(range(many))


def raise_at_7(item):
    if item == 7:
        raise FileNotFoundError("no file 7")
    return item


def raise_odd(item):
    raise Odd("o", "dd")


def stop(item):
    raise StopIteration


def die_of_13(item):
    if item == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def make_local(item):
    return lambda: item


def stuck_at_2(item):
    time.sleep(600 if item == 2 else 0)
    return item


def waiting_first(other_works, item):
    if item == 0:
        other_works.wait(60)
    elif item > 1:  # which are of another chunk than item 0
        other_works.set()
    return item, os.getpid()


def forked(source, transform, processes=2, size=4):
    return ParallelMapIterator(source, transform, processes, size, start_method="fork")


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "pipeal-prefetch"]


def notes(error):
    return " ".join(getattr(error, "__notes__", []))


@pytest.fixture(autouse=True)
def leaves_nothing():
    yield
    assert until_gone(multiprocessing.active_children) == []
    assert until_gone(threads) == []


def test_parallel_is_in_order_over_all_processes_and_without_a_barrier():
    seen = []

    def watched():
        for number in count():
            seen.append(number)
            yield number

    class Stream:
        def __iter__(self):
            return watched()

    other_works = multiprocessing.get_context("fork").Event()
    with forked(NativeCheckpointableIterator(Stream()), partial(waiting_first, other_works), 2, 4) as mapped:
        items = [next(mapped)]
        assert len(seen) <= 2 * 4, "the look-ahead is bounded"
        items += islice(mapped, 29)
        assert [number for number, _ in items] == list(range(30))
        # While item 0 holds up one process, the other one works on: item 0 waits for it.
        assert len({process for _, process in items}) == 2


@pytest.mark.parametrize("wrap", [lambda pipeline: pipeline, lambda pipeline: PrefetchIterator(pipeline, 3)])
def test_an_exception_of_a_process_comes_in_its_turn_with_its_position(wrap):
    with wrap(forked(numbers(), raise_at_7)) as mapped:
        assert list(islice(mapped, 7)) == list(range(7))
        with pytest.raises(FileNotFoundError, match="no file 7") as caught:
            next(mapped)
        assert "item 7 of ParallelMapIterator" in notes(caught.value)
        assert "raise_at_7" in notes(caught.value), "the trace of the other process"
        with pytest.raises(FileNotFoundError):
            next(mapped)
        with pytest.raises(ScheduleError, match="no state after a failure"):
            mapped.getstate()
        mapped.setstate(None)
        assert next(mapped) == 0


def test_the_position_counts_from_the_beginning_after_a_resume_too():
    with forked(numbers(), raise_at_7) as mapped, PrefetchIterator(MapIterator(numbers(), raise_at_7), 4) as fetched:
        for pipeline, kind in ((mapped, "ParallelMapIterator"), (fetched, "PrefetchIterator")):
            list(islice(pipeline, 5))
            pipeline.setstate(json.loads(json.dumps(pipeline.getstate())))
            assert list(islice(pipeline, 2)) == [5, 6]
            with pytest.raises(FileNotFoundError) as caught:
                next(pipeline)
            assert f"item 7 of {kind}" in notes(caught.value)


def test_an_exception_of_the_source_comes_in_its_turn():
    # The items before it in its chunk were lost, and the note named the first of them in place of item 7.
    for skipped in (0, 6, 7):
        with forked(MapIterator(numbers(), raise_at_7), tag, 2, 8) as mapped:
            list(islice(mapped, skipped))
            mapped.setstate(mapped.getstate())
            assert [item for _, item in islice(mapped, 7 - skipped)] == list(range(skipped, 7))
            with pytest.raises(FileNotFoundError) as caught:
                list(mapped)
        assert "item 7 of ParallelMapIterator" in notes(caught.value)


def test_an_exception_that_cannot_travel_and_a_stop_iteration_arrive_all_the_same():
    with forked(numbers(), raise_odd) as mapped, pytest.raises(RuntimeError, match="Odd: odd"):
        next(mapped)
    # Let through, it would have ended the stream early, without a word.
    for pipeline in (forked(numbers(), stop), MapIterator(numbers(), stop)):
        with pipeline, pytest.raises(ValueError, match="stop raised StopIteration"):
            next(pipeline)


def test_a_process_that_dies_is_an_error():
    with forked(numbers(), die_of_13) as mapped:
        assert [next(mapped) for _ in range(2)] == [0, 1]
        with pytest.raises(BrokenProcessPool) as caught:
            list(mapped)
        assert "ParallelMapIterator" in notes(caught.value)
        mapped.setstate(None)
        assert next(mapped) == 0, "with another pool"


def test_a_process_that_dies_idle_is_an_error_once():
    # The pool noticed when it was given the next chunk; that place neither said where nor gave up the broken pool.
    with forked(numbers(40), tag) as mapped:
        first = next(mapped)
        time.sleep(0.1)
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGKILL)
        assert not until_gone(lambda: not mapped._pool._broken), "the pool has noticed"
        with pytest.raises(BrokenProcessPool) as caught:
            list(mapped)
        assert "ParallelMapIterator" in notes(caught.value)
        mapped.setstate(None)
        assert [first, *islice(mapped, 3)] == [("m", 0), *[("m", item) for item in range(3)]]


def test_what_cannot_travel_says_where_it_was():
    for mapped in (forked(numbers(), make_local, 1), forked(NativeCheckpointableIterator([1, lambda: 1]), tag, 1)):
        with mapped, pytest.raises((AttributeError, pickle.PicklingError), match="pickle") as caught:
            list(mapped)
        assert "item 0 of ParallelMapIterator or a later one" in notes(caught.value)


@pytest.mark.parametrize("taken", [0, 1, 5, 20])
def test_a_closed_pipeline_still_says_where_its_consumer_stood(taken):
    # Closing dropped the chunks in flight, and with them the place: a state saved behind the with block, the most
    # natural place for it, skipped what had been read ahead.
    make = (
        forked,
        lambda *args: PrefetchIterator(forked(*args), 3),
        lambda *args: FixedBatchIterator(forked(*args), 3),
    )
    for wrap in make:
        with wrap(numbers(), tag) as pipeline:
            list(islice(pipeline, taken))
            state = pipeline.getstate()
        assert pipeline.getstate() == state


def test_a_process_that_is_stuck_is_killed(monkeypatch):
    monkeypatch.setattr(parallel, "GRACE_S", 0.2)
    mapped = forked(numbers(), stuck_at_2, 1, 2)
    assert list(islice(mapped, 2)) == [0, 1]
    started = time.monotonic()
    mapped.close()
    assert time.monotonic() - started < 300  # and not 600


def test_a_function_that_cannot_go_to_another_process_is_refused():
    mapped = ParallelMapIterator(numbers(), lambda item: item, 1, 1, start_method="spawn")
    with mapped, pytest.raises(ConfigError, match="transform cannot be pickled"):
        next(mapped)


@pytest.mark.parametrize("taken", [0, 1, 20])
@pytest.mark.parametrize("end", ["close", "with", "garbage", "state"])
def test_ending_a_pipeline_ends_its_threads_and_processes(taken, end):
    pipeline = PrefetchIterator(FixedBatchIterator(PrefetchIterator(forked(numbers(60), tag), 3), 2), 2)
    list(islice(pipeline, taken))
    if end == "close":
        pipeline.close()
        pipeline.close()
        with pytest.raises(ScheduleError, match="closed"):
            next(pipeline)
        with pytest.raises(ScheduleError, match="closed"):
            pipeline.setstate(None)
    elif end == "with":
        with pipeline:
            next(pipeline)
    elif end == "state":
        pipeline.setstate(None)
        assert threads() == []
        pipeline.close()
    del pipeline
    gc.collect()
    assert until_gone(threads) == []
    assert until_gone(multiprocessing.active_children) == []


def test_a_prefetch_over_an_endless_source_reads_no_further_than_its_buffer():
    with PrefetchIterator(NativeCheckpointableIterator(Endless()), 5) as fetched:
        assert next(fetched) == 0
        deadline = time.monotonic() + 120
        while fetched._reading.ready < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert fetched._reading.ready == 5
        assert list(islice(fetched, 20)) == list(range(1, 21))


def test_a_prefetch_warns_of_an_empty_buffer_if_asked(caplog):
    end = time.monotonic() + 60

    def once_warned(item):
        while "buffer is empty" not in caplog.text and time.monotonic() < end:
            time.sleep(0.01)
        return item

    late = MapIterator(numbers(3), once_warned)
    with caplog.at_level(logging.WARNING), PrefetchIterator(late, 2, log_empty_buffer_warning=True) as fetched:
        next(fetched)
    assert "buffer is empty" in caplog.text


def test_parallel_before_prefetch_and_shuffle_does_not_lock():
    # infinibatch: a pool made before a prefetching process forks has no workers in the child, which waits for ever.
    for _ in range(3):
        with PrefetchIterator(BlockwiseShuffleIterator(forked(numbers(), tag), 5), 4) as pipeline:
            assert sorted(item for _, item in pipeline) == list(range(20))


@pytest.mark.slow
def test_an_interpreter_ends_with_a_pipeline_left_open():
    code = """
from pipeal.data.iterators import *
numbers = InfinitePermutationSourceIterator([1, 2])
left = PrefetchIterator(ParallelMapIterator(numbers, str, 1, 2, start_method="fork"), 3)
print(next(left) in "12")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert found.stdout == "True\n"
    assert found.stderr == ""


@pytest.mark.slow
def test_processes_do_not_outlive_a_parent_that_is_killed():
    # They waited for work for ever. The pipe stays open, and the call waits, while one of them lives.
    code = """
import os
from pipeal.data.iterators import *
numbers = InfinitePermutationSourceIterator([1, 2])
print(next(ParallelMapIterator(numbers, str, 2, 2, start_method="fork")) in "12", flush=True)
os.kill(os.getpid(), 9)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert found.returncode == -signal.SIGKILL
    assert found.stdout == "True\n"
