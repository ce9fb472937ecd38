"""What each iterator does, the examples of the document that they come from, and what they refuse."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import partial
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeal.core.errors import ConfigError, DataError
from pipeal.data import iterators as its
from tests.data.iterators.pipelines import fits, weight

Data = its.NativeCheckpointableIterator
SIX = [("a", 50), ("b", 30), ("c", 20), ("d", 20), ("e", 30), ("f", 20)]


def length(item):
    return item[1]


def names(batches):
    return ["".join(name for name, _ in batch) for batch in batches]


# The document's pipeline: chunks of lines, tokenized in parallel, cut by a budget, collated.


def read_chunk(path):
    with open(path, "rb") as file:
        lines = gzip.decompress(file.read()).decode("utf-8").splitlines()
    return iter([line.strip() for line in lines if len(line.strip()) > 2])


def tokenize(text, max_length, truncation):
    return {"input_ids": [len(word) for word in text.split()][:max_length]}


def pad(examples, return_tensors):
    longest = max(len(example["input_ids"]) for example in examples)
    return {"input_ids": torch.tensor([ex["input_ids"] + [0] * (longest - len(ex["input_ids"])) for ex in examples])}


@pytest.fixture
def chunks(tmp_path):
    lines = [" ".join(["word"] * (1 + place * 7 % 40)) for place in range(300)]
    paths = []
    for number in range(5):
        paths.append(str(tmp_path / f"train.{number}.txt.gz"))
        text = "\n".join(["", "x", *lines[number * 60 : number * 60 + 60]])
        (tmp_path / f"train.{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    return paths, lines


def test_the_documents_table_of_six_sequences():
    batches = its.BucketedReadaheadBatchIterator(
        source_iterator=Data(SIX), read_ahead=6, key=length, batch_size=lambda longest: 60 // longest[1], shuffle=False
    )
    assert names(batches) == ["a", "be", "cdf"]


@pytest.mark.parametrize("size", ["dynamic", "fixed"])
def test_the_documents_pipeline_stops_and_goes_on(chunks, size):
    paths, lines = chunks
    tokens_per_batch = 200
    batch_size = (lambda longest: tokens_per_batch // len(longest["input_ids"])) if size == "dynamic" else 32

    def pipeline():
        sentences = its.chunked_dataset_iterator(
            chunk_refs=paths, read_chunk_fn=read_chunk, buffer_size=100000, seed=1337, train=False, shuffle=False
        )
        features = its.ParallelMapIterator(
            source_iterator=sentences,
            num_processes=2,
            num_items_per_process=100,
            transform=partial(tokenize, max_length=512, truncation=True),
            start_method="fork",
        )
        batches = its.BucketedReadaheadBatchIterator(
            source_iterator=features,
            read_ahead=100,
            key=lambda example: len(example["input_ids"]),
            batch_size=batch_size,
            seed=0,
        )
        return its.MapIterator(batches, transform=partial(pad, return_tensors="pt"))

    with pipeline() as tensors:
        initial = tensors.getstate()
        first = [next(tensors) for _ in range(5)]
        here = tensors.getstate()
        tensors.setstate(initial)
        again = [next(tensors) for _ in range(5)]
        assert all(torch.equal(one["input_ids"], two["input_ids"]) for one, two in zip(first, again, strict=True))
        assert tensors.getstate() == here
        rest = [batch["input_ids"] for batch in tensors]
    every = [batch["input_ids"] for batch in first] + rest
    if size == "dynamic":
        assert all(batch.numel() <= tokens_per_batch for batch in every)
    else:
        assert sorted(len(batch) for batch in every)[1:] == [32] * (len(every) - 1)
    assert sum(int((batch > 0).sum()) for batch in every) == sum(len(line.split()) for line in lines)


def test_chunks_to_train_on_repeat_shuffled_and_are_shared_out(chunks):
    paths, lines = chunks
    lines = Counter(lines)
    for windowed in (False, True):
        make = partial(
            its.chunked_dataset_iterator, paths, read_chunk, 1000, seed=3, use_windowed=windowed, prefetch=True
        )
        with make(transform=str.upper) as whole:
            found = Counter(islice(whole, 3000))
            assert set(found) <= {line.upper() for line in lines}
        with make(num_instances=5, instance_rank=0) as one, make(num_instances=5, instance_rank=4) as other:
            assert list(islice(one, 60)) != list(islice(other, 60))


@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize("prefetch", [False, True])
def test_chunks_to_train_on_of_which_all_are_empty_are_an_error(instances, prefetch):
    """They were read over and over, without an item or a word."""
    reads = Counter()

    def read(chunk):
        reads[chunk] += 1
        assert reads.total() < 10_000
        return chunk

    options = {"buffer_size": 2, "num_instances": instances, "instance_rank": 0, "prefetch": prefetch}
    empty = its.chunked_dataset_iterator([""] * 9, read, **options)
    with empty, pytest.raises(DataError, match="collections in a row were empty, which is all that there are"):
        next(empty)
    assert reads.total() == 9 * (2 if instances == 1 else 40)
    with its.chunked_dataset_iterator(["a"] + [""] * 99, read, **options) as one_is_not:
        assert list(islice(one_is_not, 5)) == ["a"] * 5


@pytest.mark.data
def test_the_documents_method_on_wikitext(real_data):
    with gzip.open(real_data / "wikitext-2" / "train.txt.gz", "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    lengths = [min(512, len(line.split())) for line in lines if len(line) > 2]
    assert len(lengths) == 23_731

    def padding(**options):
        source = Data(lengths)
        batches = list(
            its.BucketedReadaheadBatchIterator(source, 10_000, lambda n: n, lambda n: 16_384 // n, **options)
        )
        padded = sum(len(batch) * max(batch) for batch in batches)
        return len(batches), 100 * (1 - sum(lengths) / padded)

    count, share = padding(carry=False, shuffle=False)
    assert count == 134
    assert share == pytest.approx(4.80, abs=0.01)
    assert padding(carry=False) == (count, pytest.approx(share)), "shuffling batches changes none of them"
    assert padding()[0] == 133


# Buckets: laws and errors.


@given(
    st.lists(st.integers(1, 9), max_size=60),
    st.integers(1, 15),
    st.one_of(st.integers(1, 8), st.integers(9, 40)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_each_item_once_within_the_budget_and_of_one_boundary(lengths, read_ahead, limit, padded, bounded, carry):
    items = list(enumerate(lengths))
    budget = max(limit, 9)
    batches = list(
        its.BucketedReadaheadBatchIterator(
            Data(items),
            read_ahead,
            length,
            (lambda item: budget // item[1]) if padded else limit,
            (lambda item: item[0] % 3) if bounded else None,
            carry=carry,
        )
    )
    assert sorted(chain.from_iterable(batches)) == items
    assert all(batches)
    for batch in batches:
        assert [size for _, size in batch] == sorted([size for _, size in batch], reverse=True)
        assert len(batch) <= (budget // batch[0][1] if padded else limit)
        assert not bounded or len({number % 3 for number, _ in batch}) == 1
        apart = max(number for number, _ in batch) // read_ahead - min(number for number, _ in batch) // read_ahead
        assert apart <= carry, "an item waits for one window at most"


@given(st.lists(st.integers(1, 9), min_size=30, max_size=60), st.integers(1, 6))
def test_a_part_filled_batch_waits_for_the_next_window(lengths, size):
    # infinibatch: every window ended with a part-filled batch, however small the rest.
    batches = list(its.BucketedReadaheadBatchIterator(Data(lengths), 14, lambda n: n, size, shuffle=False))
    assert all(len(batch) == size for batch in batches[:-1])
    plain = list(its.BucketedReadaheadBatchIterator(Data(lengths), 14, lambda n: n, size, shuffle=False, carry=False))
    expected = []
    for start in range(0, len(lengths), 14):
        window = sorted(lengths[start : start + 14], reverse=True)
        expected += [window[place : place + size] for place in range(0, len(window), size)]
    assert plain == expected
    assert len(batches) <= len(plain)


def test_batches_are_shuffled_within_their_window():
    items = list(range(100))
    plain, mixed, other = (
        list(its.BucketedReadaheadBatchIterator(Data(items), 50, None, 5, shuffle=shuffle, seed=seed))
        for shuffle, seed in ((False, 0), (True, 0), (True, 1))
    )
    assert plain == [items[place : place + 5] for place in range(0, 100, 5)]
    assert mixed != plain != other != mixed
    assert sorted(mixed[:10]) == plain[:10]
    assert [batch[0] % 50 for batch in mixed[:10]] != [batch[0] % 50 for batch in mixed[10:]], "each window anew"


def test_a_key_is_asked_for_once():
    # Cutting a window anew to fill its last batch asked four times, and a tokenizer may stand behind a key.
    asked = []

    def key(item):
        asked.append(item)
        return item % 17

    list(its.BucketedReadaheadBatchIterator(Data(range(1000)), 100, key, lambda item: 60 // (item % 17 + 1)))
    assert asked == list(range(1000))


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_a_batch_size_that_is_none_is_an_error(size):
    # infinibatch: 60 // 80 is 0, and the item went into a batch of one, over the budget and without a word.
    batches = its.BucketedReadaheadBatchIterator(Data([80]), 1, lambda n: n, lambda longest: size)
    with pytest.raises(DataError, match=rf"batch_size gave {size} for an item with key 80 in window 0"):
        next(batches)


# Sources and shares.


@given(st.lists(st.integers(), min_size=1, max_size=20), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_instances_share_each_permutation(items, instances, shuffle, seed):
    shares = [its.InfinitePermutationSourceIterator(items, seed, shuffle, instances, rank) for rank in range(instances)]
    rounds = [[next(share) for share in shares] for _ in range(3 * len(items))]
    stream = list(chain.from_iterable(rounds))
    for start in range(0, len(stream) - len(items), len(items)):
        assert sorted(stream[start : start + len(items)]) == sorted(items)
        assert shuffle or stream[start : start + len(items)] == items


@given(st.integers(0, 30), st.integers(1, 8))
def test_finite_shares_cover_the_list_or_are_equal(count, instances):
    items = list(range(count))
    shares = {
        uneven: [list(its.ChunkedSourceIterator(items, instances, rank, uneven=uneven)) for rank in range(instances)]
        for uneven in ("keep", "drop", "repeat")
    }
    assert list(chain.from_iterable(shares["keep"])) == items
    assert max(map(len, shares["keep"])) - min(map(len, shares["keep"])) <= 1
    assert {len(share) for share in shares["drop"]} == {count // instances}
    assert list(chain.from_iterable(shares["drop"])) == items[: count - count % instances]
    assert {len(share) for share in shares["repeat"]} == {-(-count // instances)}
    assert set(chain.from_iterable(shares["repeat"])) == set(items)


@given(st.lists(st.integers(1, 9), max_size=60), st.integers(1, 16), st.integers(0, 9))
def test_every_rank_gets_as_many_batches(lengths, ranks, seed):
    # infinibatch: shared-out chunks give each rank its own number of batches, and training in parallel hangs.
    def share(rank, uneven):
        batches = its.BucketedReadaheadBatchIterator(Data(list(enumerate(lengths))), 12, length, 4, seed=seed)
        return list(its.ShardIterator(batches, ranks, rank, uneven))

    dropped = [share(rank, "drop") for rank in range(ranks)]
    repeated = [share(rank, "repeat") for rank in range(ranks)]
    kept = [share(rank, "keep") for rank in range(ranks)]
    assert len({len(batches) for batches in dropped}) == len({len(batches) for batches in repeated}) == 1
    every = Counter(tuple(batch) for batches in kept for batch in batches)
    assert sorted(chain.from_iterable(every)) == list(enumerate(lengths))
    assert set(every.values()) <= {1}
    once = Counter(tuple(batch) for batches in dropped for batch in batches)
    assert once <= every
    assert sum((every - once).values()) == sum(every.values()) % ranks
    twice = Counter(tuple(batch) for batches in repeated for batch in batches)
    assert every <= twice
    assert sum((twice - every).values()) == -sum(every.values()) % ranks


# Shuffling and maps.


@given(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=80), st.integers(1, 20), st.integers(0, 9))
def test_shuffles_lose_and_invent_nothing(items, size, seed):
    for kind in (its.BufferedShuffleIterator, its.BlockwiseShuffleIterator):
        found = list(kind(Data(items), size, seed))
        assert Counter(found) == Counter(items)


def test_a_buffer_mixes_across_blocks_within_its_reach():
    found = list(its.BufferedShuffleIterator(Data(list(range(2000))), 50, seed=1))
    places = {item: place for place, item in enumerate(found)}
    moved = [place - item for item, place in places.items()]
    assert max(moved) <= 4 * 50
    assert min(moved) >= -50
    late = sum(1 for item in range(1000) if places[item] // 50 != item // 50)
    assert late > 500, "most items leave their block"
    blocks = list(its.BlockwiseShuffleIterator(Data(list(range(2000))), 50, seed=1))
    assert [sorted(blocks[place : place + 50]) for place in range(0, 2000, 50)] == [
        list(range(place, place + 50)) for place in range(0, 2000, 50)
    ]
    orders = {tuple(item % 50 for item in blocks[place : place + 50]) for place in range(0, 2000, 50)}
    assert len(orders) == 40, "each block has an order of its own"
    assert list(its.BufferedShuffleIterator(Data(list("abc")), 1)) == list("abc")


def test_a_users_random_draws_follow_the_place():
    def noisy(generator, item):
        return item, [generator.random() for _ in range(item)]

    found = list(its.SamplingRandomMapIterator(Data([3, 1, 2]), noisy, seed=4))
    again = list(its.SamplingRandomMapIterator(Data([1, 1, 2]), noisy, seed=4))
    assert [len(numbers) for _, numbers in found] == [3, 1, 2]
    assert found[1:] == again[1:]
    assert len({number for _, numbers in found for number in numbers}) == 6


def test_random_numbers_are_uniform():
    numbers = list(islice(its.RandomIterator(0), 4000))
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / 4000 == pytest.approx(0.5, abs=0.02)
    assert sum(number < 0.1 for number in numbers) / 4000 == pytest.approx(0.1, abs=0.02)


def test_a_memory_changed_in_place_changes_neither_states_nor_the_initial_one():
    def remember(memory, item):
        memory.append(item)
        return memory, len(memory)

    initial = []
    it = its.RecurrentIterator(Data("abc"), remember, initial)
    assert next(it) == 1
    state = it.getstate()
    assert list(it) == [2, 3]
    assert initial == []
    assert state["memory"] == ["a"]
    it.setstate(state)
    assert list(it) == [2, 3]
    assert state["memory"] == ["a"]


def test_one_end_ends_a_multiplex_and_a_zip_for_good():
    many = its.MultiplexIterator(Data([0, 1, 1, 0, 0]), [Data("abc"), Data("x")])
    assert list(many) == ["a", "x"]
    assert list(many) == []
    assert list(its.ZipIterator(Data("ab"), Data("xyz"))) == [("a", "x"), ("b", "y")]


# Errors: each says in one line what was found and what was wanted.


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: its.MapIterator([1], str), "source of type list; wanted a CheckpointableIterator"),
        (lambda: its.MapIterator(Data([1]), 3), "transform is of type int; wanted a function"),
        (lambda: Data(iter([1])), "iterable is an iterator"),
        (lambda: Data(3), "iterable is an int; wanted something to iterate over"),
        # Strings hash differently in each process, so a set restored in another one gave other items.
        (lambda: Data({"a", "b"}), "iterable is a set, whose order differs"),
        (lambda: its.ChunkedSourceIterator({1: 2}), "source_items is of type dict; wanted a list"),
        (lambda: its.InfinitePermutationSourceIterator([]), "source_items is empty"),
        (lambda: its.InfinitePermutationSourceIterator([1], None, True, 2, 0), "seed is None with 2 instances"),
        (lambda: its.InfinitePermutationSourceIterator([1], -1), "seed is -1"),
        (lambda: its.RandomIterator(1 << 63), r"less than 2\*\*63"),
        (lambda: its.RandomIterator(0.5), "seed is 0.5; wanted a whole number of at least 0"),
        (
            lambda: its.ChunkedSourceIterator([1], 2, 2),
            "instance_rank is 2; wanted less than num_instances, which is 2",
        ),
        (lambda: its.ChunkedSourceIterator([1], 0, 0), "num_instances is 0"),
        (lambda: its.ChunkedSourceIterator({1}), "source_items is of type set; wanted a list"),
        (lambda: its.ChunkedSourceIterator([1], uneven="pad"), "uneven is 'pad'; wanted one of keep, drop, repeat"),
        (lambda: its.create_source_iterator([1], train=False), "shuffle=True with train=False"),
        (lambda: its.chunked_dataset_iterator([1], list, 3, train=False), "shuffle=True with train=False"),
        (lambda: its.FixedBatchIterator(Data([1]), 0), "batch_size is 0; wanted a whole number of at least 1"),
        (lambda: its.WindowedIterator(Data([1]), 0), "width is 0"),
        (lambda: its.BlockwiseShuffleIterator(Data([1]), 0), "block_size is 0"),
        (lambda: its.BufferedShuffleIterator(Data([1]), True), "buffer_size is True"),
        (lambda: its.PrefetchIterator(Data([1]), 0), "buffer_size is 0"),
        (lambda: its.ParallelMapIterator(Data([1]), str, 0, 1), "num_processes is 0"),
        (lambda: its.ParallelMapIterator(Data([1]), str, 1, 1, start_method="thread"), "start_method is 'thread'"),
        (lambda: its.BucketedReadaheadBatchIterator(Data([1]), 0, None, 1), "read_ahead is 0"),
        (lambda: its.BucketedReadaheadBatchIterator(Data([1]), 1, 7, 1), "key is of type int"),
        (lambda: its.BucketedReadaheadBatchIterator(Data([1]), 1, None, 0), "batch_size is 0"),
        (lambda: its.SelectManyIterator(Data([1]), 1), "collection_selector is of type int"),
        (lambda: its.ZipIterator(), "no source_iterators"),
        (lambda: its.ZipIterator(*[Data([1])] * 2), "one source twice"),
    ],
)
def test_bad_settings_are_refused(make, says):
    with pytest.raises(ConfigError, match=says) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_an_index_out_of_range_is_an_error():
    for index in (2, -1, 0.5, "a", None):
        with pytest.raises(DataError, match=f"index {index!r}; wanted one of 0 to 1"):
            next(its.MultiplexIterator(Data([index]), [Data("a"), Data("b")]))


def inner(state):
    return state["sources"][0]


def pipeline(items=tuple(range(9)), size=3, seed=1):
    return its.FixedBatchIterator(its.BlockwiseShuffleIterator(Data(items), size, seed), 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: [], "type list without a kind; wanted one of FixedBatchIterator"),
        (lambda state: {"source_state": None}, "type dict without a kind"),
        (lambda state: inner(state), "BlockwiseShuffleIterator where the pipeline has FixedBatchIterator"),
        (lambda state: {**state, "version": 2}, "FixedBatchIterator in version 2; wanted version 1"),
        (lambda state: {**state, "sources": [inner(inner(state))]}, "Native.* where the pipeline has Blockwise"),
        (lambda state: {**state, "sources": []}, "with 0 sources; the pipeline has 1"),
        (lambda state: {**state, "ended": 0}, "damaged state of FixedBatchIterator"),
        (lambda state: {**state, "sources": [{**inner(state), "served": -1}]}, "damaged state of Blockwise"),
        (lambda state: {**state, "setup": {}}, "damaged state of FixedBatchIterator; wanted a setup with batch_size"),
        (lambda state: pipeline(size=4).getstate(), "BlockwiseShuffleIterator with block_size 4; the pipeline has 3"),
        (lambda state: pipeline(seed=2).getstate(), "BlockwiseShuffleIterator with seed 2; the pipeline has 1"),
        (lambda state: pipeline(range(8)).getstate(), "Native.*with items 8; the pipeline has 9"),
    ],
)
def test_states_of_others_are_refused_and_change_nothing(change, says):
    batches = pipeline()
    first = next(batches)
    state = batches.getstate()
    with pytest.raises(DataError, match=says) as caught:
        batches.setstate(change(json.loads(json.dumps(state))))
    assert "\n" not in str(caught.value)
    assert batches.getstate() == state
    assert [first, *batches] == list(pipeline())


def test_data_that_became_shorter_is_noticed():
    long, short = Data(dict.fromkeys(range(9))), Data(dict.fromkeys(range(3)))
    list(islice(long, 5))
    short.setstate(long.getstate())
    with pytest.raises(DataError, match="ends before item 5"):
        next(short)
    whole, cut = its.SelectManyIterator(Data(["abcdef"])), its.SelectManyIterator(Data(["ab"]))
    list(islice(whole, 4))
    cut.setstate(whole.getstate())
    with pytest.raises(DataError, match="stood at output 4 of a window that now has 2"):
        next(cut)


class Short:
    """So many numbers, and no sequence, of which the length would be noticed."""

    def __init__(self, many):
        self.many = many

    def __iter__(self):
        return iter(range(self.many))


@pytest.mark.parametrize(
    ("make", "taken", "left"),
    [
        # The buffer was filled again for ever.
        (lambda source: its.BufferedShuffleIterator(source, 4), 30, 27),
        # These ended early, without a word.
        (lambda source: its.PrefetchIterator(source, 100), 21, 19),
        (lambda source: its.WindowedIterator(source, 4), 7, 5),
        (lambda source: its.ParallelMapIterator(source, str, 1, 8, start_method="fork"), 7, 5),
        (lambda source: its.BucketedReadaheadBatchIterator(source, 10, None, 3, seed=1), 4, 8),
    ],
    ids=["buffer", "prefetch", "window", "parallel", "buckets"],
)
def test_data_that_became_shorter_than_what_is_read_again_is_noticed(make, taken, left):
    with make(Data(Short(40))) as whole, make(Data(Short(left))) as cut:
        list(islice(whole, taken))
        cut.setstate(whole.getstate())
        with pytest.raises(DataError, match="but its source ends before"):
            list(cut)


def test_settings_of_numpy_leave_states_of_json():
    two, one, yes = np.int64(2), np.int64(1), np.True_
    for made in (
        its.ChunkedSourceIterator([1, 2, 3], two, one),
        its.InfinitePermutationSourceIterator([1, 2, 3], one, yes, two, one),
        its.ShardIterator(Data([1]), two, one),
        its.BucketedReadaheadBatchIterator(Data([1]), two, None, one, shuffle=yes, seed=one, carry=yes),
        its.CheckpointableLoader(its.create_source_iterator, num_instances=two, instance_rank=one, shards=two),
    ):
        assert json.loads(json.dumps(made.getstate())) == made.getstate()


def test_a_data_set_without_slices_is_a_list_of_items():
    data = torch.utils.data.TensorDataset(torch.arange(5))
    assert [int(item) for (item,) in its.ChunkedSourceIterator(data, 2, 1, uneven="repeat")] == [3, 4, 4]
    assert sorted(int(item) for (item,) in islice(its.InfinitePermutationSourceIterator(data), 5)) == [0, 1, 2, 3, 4]


def test_an_interrupted_iterator_refuses_to_go_on_as_if_nothing_had_happened():
    def interrupt(item):
        if item == 3:
            raise KeyboardInterrupt
        return item

    batches = its.FixedBatchIterator(its.MapIterator(Data([1, 2, 3, 4]), interrupt), 2)
    assert next(batches) == [1, 2]
    state = batches.getstate()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    with pytest.raises(RuntimeError, match="was interrupted within an item"):
        next(batches)
    with pytest.raises(RuntimeError, match="no state after a failure"):
        batches.getstate()
    batches.setstate(state)


def test_every_iterator_is_one_and_says_where_it_is():
    assert issubclass(its.BucketedReadaheadBatchIterator, its.CheckpointableIterator)
    assert weight("x") <= fits("x")
    it = Data("ab")
    assert iter(it) is it
    assert it.getstate() == {
        "kind": "NativeCheckpointableIterator",
        "version": 1,
        "setup": {"items": 2},
        "ended": False,
        "sources": [],
        "yielded": 0,
    }
