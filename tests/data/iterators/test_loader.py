"""The law of the loader: any number of workers, the same items in the same order, and the same after a resume."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from pipeal.core.errors import ConfigError, DataError, ScheduleError
from pipeal.data.iterators import (
    BucketedReadaheadBatchIterator,
    CheckpointableLoader,
    IterableCheckpointedDataset,
    MapIterator,
    NativeCheckpointableIterator,
    ParallelMapIterator,
    PrefetchIterator,
    SelectManyIterator,
    create_source_iterator,
)
from tests.data.iterators.pipelines import build, few, fits, specs, tag, until_gone, weight

WORKERS = pytest.mark.parametrize("workers", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])


def shares(num_instances, instance_rank):
    """Finite, and of another length in each shard."""
    chunks = create_source_iterator(list(range(40)), False, 0, False, num_instances, instance_rank)
    return BucketedReadaheadBatchIterator(SelectManyIterator(chunks, few), 6, weight, fits, seed=3)


def endless(num_instances, instance_rank):
    return create_source_iterator(list(range(10)), True, 5, True, num_instances, instance_rank)


def whole():
    return PrefetchIterator(shares(1, 0), 3)


def fails_at_5(item):
    if item == 5:
        raise KeyError("five")
    return item


def failing(num_instances, instance_rank):
    data = create_source_iterator(list(range(20)), False, 0, False, num_instances, instance_rank)
    return MapIterator(data, fails_at_5)


def loader(kind, workers, **options):
    if kind == "shares":
        return CheckpointableLoader(shares, workers, shards=4, **options)
    return CheckpointableLoader(whole(), workers, shards=4, **options)


def walk(items):
    with items:
        states, found = [items.getstate()], []
        for item in items:
            found.append(item)
            states.append(json.loads(json.dumps(items.getstate())))
    return found, states


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def leaves_no_process():
    yield
    assert until_gone(multiprocessing.active_children) == []


@pytest.mark.parametrize("kind", ["shares", "whole"])
def test_the_number_of_workers_changes_nothing(kind):
    reference, states = walk(loader(kind, 0))
    assert len(reference) > 10
    for workers in (1, 2, 4):
        assert walk(loader(kind, workers)) == (reference, states)
    if kind == "whole":
        with whole() as plain:
            assert reference == list(plain)


@pytest.mark.parametrize("kind", ["shares", "whole"])
@WORKERS
def test_saved_at_every_position_and_resumed_with_workers(kind, workers):
    reference, states = walk(loader(kind, 0))
    with loader(kind, workers) as fresh:
        for place, state in enumerate(states):
            fresh.setstate(state)
            assert fresh.getstate() == state
            # What has ended begins anew.
            assert list(fresh) == (reference if state["ended"] else reference[place:])


@WORKERS
def test_resumed_a_second_time(workers):
    reference, states = walk(loader("whole", 0))
    for place in (0, 5, len(reference) - 3):
        with loader("whole", workers) as fresh:
            fresh.setstate(states[place])
            assert list(islice(fresh, 2)) == reference[place : place + 2]
            second = json.loads(json.dumps(fresh.getstate()))
            assert second == states[place + 2]
            fresh.setstate(second)
            assert list(fresh) == reference[place + 2 :]


@given(specs(), st.data())
@settings(max_examples=10)
def test_the_law_without_workers_over_random_pipelines(spec, data):
    with build(spec) as plain:
        reference = list(plain)
    found, states = walk(CheckpointableLoader(build(spec), shards=3))
    assert found == reference
    place = data.draw(st.integers(0, len(found)))
    fresh = CheckpointableLoader(build(spec), shards=3)
    fresh.setstate(states[place])
    assert list(fresh) == reference[place:]


@given(specs(), st.sampled_from([2, 4]), st.data())
@settings(max_examples=4)
def test_the_law_with_workers_over_random_pipelines(spec, workers, data):
    with build(spec) as plain:
        reference = list(plain)
    found, states = walk(CheckpointableLoader(build(spec), workers))
    assert found == reference
    place = data.draw(st.integers(0, len(found)))
    with CheckpointableLoader(build(spec), workers) as fresh:
        fresh.setstate(states[place])
        assert list(fresh) == reference[place:]


def test_resumed_with_other_workers_and_at_an_epochs_end():
    reference, states = walk(loader("shares", 2))
    with loader("shares", 4) as fresh:
        fresh.setstate(states[5])
        assert list(fresh) == reference[5:]
        assert list(fresh) == reference, "what ended begins anew"
        ended = fresh.getstate()
    assert ended["ended"]
    fresh = loader("shares", 0)
    fresh.setstate(ended)
    assert list(fresh) == reference, "as the loader would have gone on that the state was taken from"


def test_a_pass_that_is_broken_off_goes_on_or_begins_anew():
    endlessly = CheckpointableLoader(endless, shards=2)
    first = list(islice(endlessly, 7))
    items = first + list(islice(endlessly, 5))
    assert items == list(islice(CheckpointableLoader(endless, shards=2), 12))
    anew = CheckpointableLoader(endless, shards=2, should_reset=True)
    assert list(islice(anew, 7)) == list(islice(anew, 7)) == first


def test_ranks_and_shards_share_the_items():
    loaders = [CheckpointableLoader(endless, shards=2, num_instances=2, instance_rank=rank) for rank in (0, 1)]
    found = [item for each in loaders for item in islice(each, 5)]
    assert len(found) == 10
    shards = [list(islice(endless(4, number), 3)) for number in range(4)]
    assert found[:4] == [shards[0][0], shards[1][0], shards[0][1], shards[1][1]]
    assert found[5:9] == [shards[2][0], shards[3][0], shards[2][1], shards[3][1]]


@pytest.mark.slow
def test_spawned_workers_get_the_pipeline_by_pickling():
    with CheckpointableLoader(whole(), 1, multiprocessing_context="spawn") as spawned, whole() as plain:
        assert list(spawned) == list(plain)


def test_a_started_pipeline_can_go_to_workers():
    # Its thread and its processes stay behind: a forked copy has neither, and must not wait for them.
    parallel = ParallelMapIterator(NativeCheckpointableIterator(range(20)), tag, 1, 2, start_method="fork")
    with PrefetchIterator(parallel, 4) as started:
        expected = list(islice(started, 20))
        started.setstate(None)
        assert next(started) == expected[0]
        with CheckpointableLoader(started, 2) as both:
            assert list(both) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_of_a_worker_arrives_as_its_own_type_with_its_position(workers):
    with CheckpointableLoader(failing, workers, shards=2) as both:
        items = iter(both)
        assert list(islice(items, 10)) == [0, 10, 1, 11, 2, 12, 3, 13, 4, 14]
        state = both.getstate()
        with pytest.raises(KeyError, match="five") as caught:
            next(items)
        assert "item 10 of this pass" in " ".join(caught.value.__notes__)
        assert both.getstate() == state


@pytest.mark.slow
def test_a_worker_that_is_killed_is_an_error_after_which_the_pass_goes_on():
    with CheckpointableLoader(NativeCheckpointableIterator(range(200)), 2) as both:
        items = iter(both)
        found = list(islice(items, 3))
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="worker") as caught:
            found.extend(items)
        assert f"item {len(found)} of this pass" in " ".join(caught.value.__notes__)
        assert [*found, *both] == list(range(200))


def test_tensors_travel():
    data = NativeCheckpointableIterator([{"x": torch.arange(3) * place} for place in range(4)])
    with CheckpointableLoader(data, 2) as both:
        assert [item["x"].tolist() for item in both] == [[0, 0, 0], [0, 1, 2], [0, 2, 4], [0, 3, 6]]


def test_one_pass_at_a_time():
    numbers = CheckpointableLoader(NativeCheckpointableIterator(range(9)))
    first = iter(numbers)
    next(first)
    second = iter(numbers)
    with pytest.raises(ScheduleError, match="another pass has begun"):
        next(first)
    assert list(second) == list(range(1, 9))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_pass_that_is_left_behind_does_not_send_the_next_one_back(shards):
    """Once the first one was collected as garbage, the second began at item 0 again, without a word."""
    numbers = CheckpointableLoader(NativeCheckpointableIterator(range(9)), shards=shards)
    first = iter(numbers)
    next(first)
    second = iter(numbers)
    found = [next(second)]
    del first
    assert found + list(second) == list(range(1, 9))


@pytest.mark.parametrize("end", [CheckpointableLoader.close, lambda numbers: numbers.setstate(None)])
@pytest.mark.parametrize("begun", [False, True])
def test_a_pass_that_was_ended_does_not_look_empty(end, begun):
    numbers = CheckpointableLoader(NativeCheckpointableIterator(range(9)))
    items = iter(numbers)
    if begun:
        next(items)
    end(numbers)
    with pytest.raises(ScheduleError, match="or the loader was closed or sent to a state"):
        next(items)


def test_an_iterator_that_came_to_its_end_stays_there():
    numbers = CheckpointableLoader(NativeCheckpointableIterator(range(9)))
    items = iter(numbers)
    assert list(items) == list(numbers) == list(range(9))
    assert list(items) == []


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_the_plain_data_set_in_a_plain_dataloader(workers):
    data = IterableCheckpointedDataset(whole(), should_reset=True)
    batches = DataLoader(data, num_workers=workers, batch_size=1, collate_fn=tag)
    found = [list(batches) for _ in range(2)]
    with whole() as plain:
        assert found[0] == found[1] == [("m", [item]) for item in plain]
    data._source.close()


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("should_reset", [False, True])
def test_the_plain_data_set_begins_where_its_source_stood(workers, should_reset):
    # With two workers or more it began at the beginning: a restored pipeline trained on the same items again. With
    # one it waited for ever for the thread of the prefetch, which does not exist in a forked process.
    with whole() as plain, whole() as source:
        rest = list(plain)[3:]
        list(islice(source, 3))
        data = DataLoader(IterableCheckpointedDataset(source, should_reset), batch_size=None, num_workers=workers)
        assert list(data) == rest
        if should_reset:
            assert list(data) == rest


def test_the_plain_data_set_goes_on_where_its_source_stands():
    source = endless(1, 0)
    data = DataLoader(IterableCheckpointedDataset(source, False), batch_size=None)
    items = [*islice(data, 4)]
    state = source.getstate()
    items += islice(data, 4)
    assert items == list(islice(endless(1, 0), 8))
    source.setstate(state)
    assert list(islice(data, 4)) == items[4:]


def test_options_for_workers_do_no_harm_without_them():
    assert list(CheckpointableLoader(NativeCheckpointableIterator("ab"), prefetch_factor=2)) == ["a", "b"]


def test_states_of_others_and_bad_settings_are_refused():
    four, three = CheckpointableLoader(shares, shards=4), CheckpointableLoader(shares, shards=3)
    with pytest.raises(DataError, match="CheckpointableLoader with shards 3; the pipeline has 4"):
        four.setstate(three.getstate())
    with pytest.raises(DataError, match="version 2"):
        four.setstate({**four.getstate(), "version": 2})
    with pytest.raises(DataError, match="NativeCheckpointableIterator"):
        four.setstate(NativeCheckpointableIterator([1]).getstate())
    for part in ({"shards": []}, {"shards": 4}, {"next": 4}, {"next": "0"}, {"ended": 0}):
        with pytest.raises(DataError, match="damaged"):
            four.setstate({**four.getstate(), **part})
    four.setstate({**four.getstate(), "shards": [endless(1, 0).getstate()] * 4})
    with pytest.raises(DataError, match="InfinitePermutationSourceIterator where the pipeline has Bucketed"):
        next(iter(four))
    with pytest.raises(ConfigError, match="3 shards for 2 workers"):
        CheckpointableLoader(shares, 2, shards=3)
    with pytest.raises(ConfigError, match="cannot be shared out"):
        CheckpointableLoader(whole(), num_instances=2)
    with pytest.raises(ConfigError, match="source is of type list"):
        CheckpointableLoader([1, 2])
    with pytest.raises(ConfigError, match="source is of type list"):
        IterableCheckpointedDataset([1, 2])
