"""Size-aware batching: the examples of its document, and the laws beyond it."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections import Counter
from fractions import Fraction
from inspect import Parameter, signature
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from pipeal.core.errors import ConfigError, DataError
from pipeal.data.batching import bucket
from pipeal.data.batching.bounds import round_up
from pipeal.data.batching.bucket import BucketBatchSampler, EmptyBucketsError
from pipeal.data.batching.packing import SizeTypeError
from pipeal.data.batching.ranks import even_batches, steps_of
from pipeal.data.batching.size_aware import SizeAwareBatchSampler, size_aware_batching
from pipeal.data.batching.size_ranges import Buckets, bucket_of, create_buckets
from pipeal.data.memory.peaks import collect_cuda_peak_alloc

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=60)
COSTS = {
    "sum": lambda sizes: sum(sizes),
    "padded": lambda sizes: len(sizes) * max(sizes),
    "square": lambda sizes: len(sizes) * max(sizes) ** 2,
}
GIVEN = {"sum": "sum", "padded": "padded", "square": lambda n, longest: n * longest**2}
costs = st.sampled_from(sorted(COSTS))
PAIRS = [torch.tensor([first, first + 1]) for first in (1, 3, 5, 7, 9)]
VARIED = np.random.default_rng(0).integers(1, 40, 300)
BOUNDS = torch.tensor([0, 10, 25, 41])


def aware(sizes=VARIED, limit=100, **options):
    return SizeAwareBatchSampler(range(len(sizes)), sizes, limit, **options)


def bucketed(sizes=VARIED, bounds=BOUNDS, **options):
    return BucketBatchSampler(
        torch.as_tensor(sizes), bounds, BatchSampler, {"batch_size": 4, "drop_last": False}, **options
    )


def nested(sizes=VARIED, bounds=BOUNDS, limit=100, **options):
    kwargs = {"sizeof": sizes, "max_total_size": limit, "cost": "padded"}
    return BucketBatchSampler(torch.as_tensor(sizes), bounds, SizeAwareBatchSampler, kwargs, **options)


MAKERS = {
    "in order": aware,
    "shuffled": lambda **options: aware(shuffle=True, **options),
    "buckets": bucketed,
    "buckets within a limit": nested,
    "buckets as documented": lambda **options: bucketed(compatible=True, **options),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def flat(batches):
    return list(chain.from_iterable(batches))


class TestTheDocumentsExamples:
    def test_size_aware_batching(self):
        batches = list(size_aware_batching(PAIRS, lambda x: x.numel(), 4, collate_fn=default_collate))
        expected = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]]), torch.tensor([[9, 10]])]
        assert len(batches) == 3
        assert all(torch.equal(found, wanted) for found, wanted in zip(batches, expected, strict=True))

    def test_sampler(self):
        sampler = SizeAwareBatchSampler(
            sampler=SequentialSampler(PAIRS), sizeof=lambda index: PAIRS[index].numel(), max_total_size=4
        )
        assert isinstance(sampler, Sampler)
        assert list(sampler) == [[0, 1], [2, 3], [4]]

    def test_create_buckets(self):
        sizes = torch.tensor([1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 22, 22, 22, 22])
        buckets = create_buckets(sizes, max_width=5, min_bucket_count=10)
        assert str(buckets.bucket_boundaries) == "tensor([ 1,  6, 11, 16, 21, 23])"
        assert str(buckets.bucket_sizes) == "tensor([12,  0,  0,  0,  4])"
        bounds, held = create_buckets(torch.arange(20), max_width=10, min_bucket_count=5)
        assert bounds.tolist() == [0, 5, 10, 15, 20]
        assert held.tolist() == [5, 5, 5, 5]

    def test_bucket_sampler_in_order(self):
        sampler = self.buckets(shuffle=False)
        wanted = [[0, 1], [2, 3], [4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14], [*range(15, 20)], [*range(20, 25)]]
        assert list(sampler) == wanted
        assert len(sampler) == 8

    def test_bucket_sampler_shuffled(self):
        sampler = self.buckets(shuffle=True, generator=torch.Generator().manual_seed(0))
        first, second = list(sampler), list(sampler)
        again = self.buckets(shuffle=True, generator=torch.Generator().manual_seed(0))
        assert [list(again), list(again)] == [first, second]
        assert first != second
        for batches in (first, second):
            assert sorted(flat(batches)) == list(range(25))
            assert Counter((len(batch), self.bucket_of(batch)) for batch in batches) == {
                (2, 0): 3,
                (3, 1): 3,
                (5, 2): 2,
            }
            assert [self.bucket_of(batch) for batch in batches] != sorted(map(self.bucket_of, batches))

    def test_bucket_sampler_over_the_size_aware_one(self):
        costs = torch.arange(25).tolist()
        sampler = BucketBatchSampler(
            sizes=torch.arange(25),
            bucket_boundaries=torch.tensor([0, 6, 15, 25]),
            base_batch_sampler_class=SizeAwareBatchSampler,
            base_batch_sampler_shared_kwargs={"sizeof": costs.__getitem__, "max_total_size": 40},
            base_batch_sampler_individual_kwargs={},
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
        )
        length, batches = len(sampler), list(sampler)
        assert len(batches) == length
        assert sorted(flat(batches)) == list(range(25))
        assert all(sum(batch) <= 40 and self.bucket_of(batch) in (0, 1, 2) for batch in batches)

    def test_compatible_gives_the_documented_batches(self):
        sampler = self.buckets(shuffle=True, generator=torch.Generator().manual_seed(0), compatible=True)
        first = [
            [24, 17, 16, 22, 19],
            [2, 5],
            [12, 10, 11],
            [3, 0],
            [15, 18, 20, 21, 23],
            [7, 13, 6],
            [14, 9, 8],
            [1, 4],
        ]
        second = [
            [14, 9, 13],
            [23, 16, 20, 21, 15],
            [5, 0],
            [8, 10, 11],
            [17, 24, 22, 18, 19],
            [12, 6, 7],
            [4, 2],
            [3, 1],
        ]
        assert list(sampler) == first
        assert list(sampler) == second

        sampler.set_epoch(0)
        assert list(sampler) == first
        sampler.set_epoch(1)
        assert list(sampler) == list(sampler) == second
        without = self.buckets(shuffle=True, compatible=True)
        assert [list(without), list(without)] == [first, second]

    def test_compatible_over_the_size_aware_one(self):
        sizes = torch.arange(25)
        item_costs = sizes.tolist()

        def cost_of_element(index):
            return item_costs[index]

        sampler = BucketBatchSampler(
            sizes=sizes,
            bucket_boundaries=torch.tensor([0, 6, 15, 25]),
            base_batch_sampler_class=SizeAwareBatchSampler,
            base_batch_sampler_shared_kwargs={"sizeof": cost_of_element, "max_total_size": 40},
            base_batch_sampler_individual_kwargs={},
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
            compatible=True,
        )
        wanted = [
            [24], [2, 5, 3, 0, 1, 4], [12, 10, 11, 7], [13, 6, 14], [17, 16], [22], [19, 15], [9, 8], [18, 20], [21],
            [23],
        ]  # fmt: skip
        assert len(sampler) == 11
        assert list(iter(sampler)) == wanted

    def test_what_is_known_of_the_buckets(self):
        generator = torch.Generator()
        with pytest.warns(UserWarning, match="1 of 6 samples"):
            sampler = BucketBatchSampler(
                torch.tensor([1, 7, 2, 8, 3, 99]),
                torch.tensor([10, 0, 5, 20]),
                BatchSampler,
                {"drop_last": False},
                {"batch_size": [2, 1, 3]},
                generator=generator,
            )
        assert sampler.num_buckets == 3
        assert sampler.sizes.tolist() == [1, 7, 2, 8, 3, 99]
        assert sampler.bucket_boundaries.tolist() == [0, 5, 10, 20]
        assert sampler.bucket_sizes.tolist() == [3, 2, 0]
        assert sampler.bucket_element_indices == [[0, 2, 4], [1, 3], []]
        assert (sampler.num_samples, sampler.outside) == (5, 1)
        assert sampler.shuffle
        assert sampler.generator is generator
        assert sampler.base_batch_sampler_class is BatchSampler
        assert sampler.base_batch_sampler_shared_kwargs == {"drop_last": False}
        assert sampler.base_batch_sampler_individual_kwargs == [{"batch_size": 2}, {"batch_size": 1}, {"batch_size": 3}]
        assert [base.batch_size for base in sampler.base_batch_samplers] == [2, 1]
        assert isinstance(sampler.base_batch_samplers[0], BatchSampler)

    @staticmethod
    def buckets(**options):
        return BucketBatchSampler(
            sizes=torch.arange(25),
            bucket_boundaries=torch.tensor([0, 6, 15, 25]),
            base_batch_sampler_class=BatchSampler,
            base_batch_sampler_shared_kwargs={"drop_last": False},
            base_batch_sampler_individual_kwargs={"batch_size": [2, 3, 5]},
            **options,
        )

    @staticmethod
    def bucket_of(batch):
        found = {(index >= 6) + (index >= 15) for index in batch}
        assert len(found) == 1
        return found.pop()


def greedy(sizes, limit, cost, oversize):
    """Batches of indices, as one would cut them by hand."""
    batches, batch = [], []
    for index, size in enumerate(sizes):
        if cost([size]) > limit:
            if oversize == "single":
                batches.extend([*([batch] if batch else []), [index]])
                batch = []
            continue
        if batch and cost([sizes[i] for i in (*batch, index)]) > limit:
            batches.append(batch)
            batch = []
        batch = [*batch, index]
    return [*batches, batch] if batch else batches


@pytest.mark.filterwarnings("ignore:.*samples were dropped")
@given(SIZES, st.integers(1, 200), costs, st.sampled_from(["drop", "single"]))
def test_batches_are_cut_where_the_next_sample_would_not_fit(sizes, limit, cost, oversize):
    wanted = greedy(sizes, limit, COSTS[cost], oversize)
    options = {"cost": GIVEN[cost], "oversize": oversize}
    sampler = aware(sizes, limit, **options)
    assert list(sampler) == wanted
    assert len(sampler) == len(wanted)
    assert sampler.dropped == len(sizes) - len(flat(wanted))
    stream = size_aware_batching(iter(range(len(sizes))), sizes, limit, **options)
    assert list(stream) == wanted


def test_nine_small_samples_and_a_large_one_do_not_pass_a_padded_budget():
    """The sum of sizes lets 10 × 50 = 500 tokens pass under a budget of 60."""
    sizes = [1] * 9 + [50]
    assert list(aware(sizes, 60)) == [list(range(10))]
    assert list(aware(sizes, 60, cost="padded")) == [list(range(9)), [9]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint64, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("cost", ["sum", "padded"])
def test_no_type_of_sizes_overflows(dtype, cost):
    """Added up as uint8, 100 + 100 + 100 is 44 and would still fit."""
    sizes = np.full(1000, 100, dtype=dtype)
    wanted = [list(range(begin, begin + 10)) for begin in range(0, 1000, 10)]
    kinds = [sizes, torch.from_numpy(sizes), list(sizes), sizes.__getitem__, dict(enumerate(sizes))]
    for sizeof in kinds:
        assert list(SizeAwareBatchSampler(range(1000), sizeof, 1000, cost=cost)) == wanted
        assert list(SizeAwareBatchSampler(range(1000), sizeof, dtype(100), cost=cost))[:2] == [[0], [1]]


def test_an_array_that_buckets_share_is_not_made_into_a_list_for_each():
    """100 buckets made 100 lists of all sizes: 3 GB and more than a second for a million samples, in every pass."""
    made = []

    class Counting(np.ndarray):
        def tolist(self):
            made.append(self.size)
            return super().tolist()

    sizes = (np.arange(1000) % 100 + 1).view(Counting)
    sampler = nested(sizes, torch.arange(1, 102), limit=500)
    assert sorted(flat(sampler)) == list(range(1000))
    assert sum(made) == 1000


def test_other_kinds_of_numbers():
    thirds = [Fraction(1, 3)] * 7
    assert list(aware(thirds, 1)) == [[0, 1, 2], [3, 4, 5], [6]]
    halves = torch.full((5,), 0.5, dtype=torch.bfloat16)
    assert list(aware(halves, torch.tensor(1.0))) == [[0, 1], [2, 3], [4]]
    assert list(aware([2**62] * 3, 2**63)) == [[0, 1], [2]]
    assert list(aware([5, 7], float("inf"))) == [[0, 1]]


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**64 - 1), st.integers(1, 2**66))
def test_sizes_near_the_end_of_64_bits_are_added_exactly(first, second, limit):
    sizes = np.array([first, second], dtype=np.uint64)
    wanted = greedy([first, second], limit, sum, "single")
    assert list(aware(sizes, limit, oversize="single")) == wanted


def test_an_endless_stream_is_batched_as_it_comes():
    taken = []

    def endless():
        while True:
            taken.append(len(taken))
            yield taken[-1]

    stream = size_aware_batching(endless(), lambda _: 1, 3)
    assert [next(stream), next(stream)] == [[0, 1, 2], [3, 4, 5]]
    assert len(taken) == 7
    sampler = SizeAwareBatchSampler(endless(), lambda _: 1, 2)
    assert next(iter(sampler)) == [7, 8]
    with pytest.raises(TypeError, match="not known before a pass"):
        len(sampler)


class TestOversize:
    sizes = (3, 99, 4, 120)

    def test_raise_says_index_and_size(self):
        sampler = SizeAwareBatchSampler([0, 2, 3, 1], self.sizes, 50, oversize="raise")
        with pytest.raises(DataError, match=r"sample 3 has size 120, more than the limit of 50; raise the limit"):
            list(sampler)
        stream = size_aware_batching("abcd", dict(zip("abcd", self.sizes, strict=True)), 50, oversize="raise")
        with pytest.raises(DataError, match="sample 1 has size 99"):
            list(stream)
        with pytest.raises(DataError, match="sample 1 has size 99 and costs 9801 alone, more than the limit of 50"):
            list(aware(self.sizes, 50, cost=lambda n, longest: n * longest**2, oversize="raise"))

    def test_dropped_samples_are_counted_and_never_silent(self):
        sampler = aware(self.sizes, 50)
        with pytest.warns(UserWarning, match="2 samples were dropped, the first: sample 1 has size 99"):
            assert list(sampler) == [[0, 2]]
        assert sampler.dropped == 2
        with pytest.warns(UserWarning, match="2 samples were dropped"):
            assert list(size_aware_batching(self.sizes, int, 50)) == [[3, 4]]

    def test_a_logger_is_told_instead(self):
        told, warned = [], []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sampler = aware(self.sizes, 50, info_logger=told.append, warn_logger=warned.append)
            assert len(sampler) == 1
            assert not told
            assert not warned
            assert list(sampler) == [[0, 2]]
        assert told == ["1 batches of 2 samples, 2 dropped"]
        assert warned == [
            "sample 1 has size 99, more than the limit of 50: dropped",
            "sample 3 has size 120, more than the limit of 50: dropped",
        ]

    def test_single_keeps_the_order(self):
        assert list(aware(self.sizes, 50, oversize="single")) == [[0], [1], [2], [3]]

    def test_buckets_count_what_their_samplers_drop(self):
        sampler = nested(limit=30)
        with pytest.warns(UserWarning, match="samples were dropped"):
            batches = list(sampler)
        assert sampler.dropped == (VARIED > 30).sum() == 300 - len(flat(batches)) > 0


class TestPasses:
    @each
    def test_every_sample_once_and_len_is_right(self, make):
        sampler = make()
        for epoch in (0, 1, 5):
            sampler.set_epoch(epoch)
            length, batches = len(sampler), list(sampler)
            assert len(batches) == length
            assert sorted(flat(batches)) == list(range(300))

    @each
    def test_seed_and_epoch_decide_and_nothing_else(self, make):
        def epoch(number, **options):
            sampler = make(**options)
            sampler.set_epoch(number)
            return list(sampler)

        state = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
        assert epoch(1) == epoch(1)
        assert torch.equal(torch.random.get_rng_state(), state[0])
        assert np.random.get_state()[1].tolist() == state[1]
        if make is not aware:
            assert epoch(1) != epoch(2)
            assert epoch(1) != epoch(1, seed=5)
            assert {frozenset(batch) for batch in epoch(1)} != {frozenset(batch) for batch in epoch(2)}

    @each
    def test_passes_count_as_epochs_until_one_is_chosen(self, make):
        sampler, chosen = make(), make()
        for epoch in range(3):
            chosen.set_epoch(epoch)
            assert list(sampler) == list(chosen) == list(chosen)

    @each
    def test_iterators_do_not_disturb_each_other(self, make):
        """The cure of a sampler that kept its place in itself: the second loop went on where the first stood."""
        sampler = make()
        sampler.set_epoch(1)
        alone = list(sampler)
        first = iter(sampler)
        begun = [next(first)]
        second = iter(sampler)
        pairs = [(next(first), next(second)) for _ in range(3)]
        sampler.set_epoch(7)
        list(sampler)
        assert begun + [left for left, _ in pairs] + list(first) == alone
        assert [right for _, right in pairs] + list(second) == alone

    def test_an_inner_sampler_that_keeps_its_place_in_itself_is_read_at_once(self):
        class Careless(Sampler):
            def __iter__(self):
                self.place = -1
                return self

            def __next__(self):
                self.place += 1
                if self.place == 6:
                    raise StopIteration
                return self.place

            def __len__(self):
                return 6

        sampler = SizeAwareBatchSampler(Careless(), lambda _: 1, 2)
        first, second = iter(sampler), iter(sampler)
        assert [next(first), next(second), *first, *second] == [[0, 1], [0, 1], [2, 3], [4, 5], [2, 3], [4, 5]]

    def test_an_iterator_that_nobody_uses_is_no_pass(self):
        """A DataLoader with workers makes one: it took the restored position with it, and an epoch number."""
        sampler = aware(shuffle=True)
        begun = iter(sampler)
        first = [next(begun)]
        fresh = aware(shuffle=True)
        fresh.load_state_dict(sampler.state_dict())
        iter(fresh)
        assert first + list(fresh) == list(aware(shuffle=True))

    def test_set_epoch_reaches_the_inner_sampler(self):
        inner = DistributedSampler(VARIED, num_replicas=2, rank=1, seed=3)
        sampler = SizeAwareBatchSampler(inner, VARIED, 100)
        orders = []
        for epoch in (4, 5):
            sampler.set_epoch(epoch)
            orders.append(flat(sampler))
            other = DistributedSampler(VARIED, num_replicas=2, rank=1, seed=3)
            other.set_epoch(epoch)
            assert orders[-1] == list(other)
            assert len(sampler) == len(list(sampler))
        assert orders[0] != orders[1]

    @pytest.mark.parametrize("sized", [True, False])
    def test_passes_that_count_by_themselves_reach_the_inner_sampler(self, sized):
        """Every pass had the first one's order, and a state of a later one could not be restored."""

        class Shuffled(Sampler):
            epoch = 0

            def set_epoch(self, epoch):
                self.epoch = epoch

            def __iter__(self):
                yield from np.random.default_rng(self.epoch).permutation(300)

        class Sized(Shuffled):
            def __len__(self):
                return 300

        def make():
            return SizeAwareBatchSampler(Sized() if sized else Shuffled(), VARIED, 100)

        sampler = make()
        for epoch in range(3):
            running = iter(sampler)
            seen = [next(running), next(running)]
            fresh = make()
            fresh.load_state_dict(sampler.state_dict())
            rest = list(running)
            assert flat(seen + rest) == np.random.default_rng(epoch).permutation(300).tolist()
            assert list(fresh) == rest
            assert sampler.epoch == fresh.epoch == epoch + 1
            if sized:
                assert len(sampler) == len(fresh) == len(list(fresh))

    def test_a_random_inner_sampler_has_no_known_len_and_is_drawn_once_a_pass(self):
        generator = torch.Generator().manual_seed(0)
        sampler = SizeAwareBatchSampler(RandomSampler(range(300), generator=generator), VARIED, 100)
        before = generator.get_state()
        with pytest.raises(TypeError, match="number of batches over a RandomSampler is not known"):
            len(sampler)
        assert torch.equal(generator.get_state(), before)
        assert sorted(flat(sampler)) == list(range(300))

    def test_an_iterator_serves_one_pass(self):
        sampler = SizeAwareBatchSampler(iter([2, 0, 1]), [1, 1, 1], 2)
        assert list(sampler) == [[2, 0], [1]]
        with pytest.raises(DataError, match="its one pass is taken; pass something that can be iterated over again"):
            list(sampler)

    @pytest.mark.parametrize(
        "indices", [[3, 1], (3, 1), np.array([3, 1]), torch.tensor([3, 1]), {3: 0, 1: 0}, [np.int64(3), np.int64(1)]]
    )
    def test_any_iterable_of_indices(self, indices):
        sampler = SizeAwareBatchSampler(indices, [1] * 4, 1)
        assert len(sampler) == 2
        batches = list(sampler)
        assert batches == [[3], [1]]
        assert all(type(index) is int for index in flat(batches))

    def test_buckets_without_a_generator_differ_from_pass_to_pass(self):
        sampler = bucketed()
        assert list(sampler) != list(sampler)

    def test_batches_of_buckets_come_in_random_order(self):
        """The last batches of an epoch are not all from the fullest bucket."""
        last = Counter()
        sampler = bucketed()
        for epoch in range(200):
            sampler.set_epoch(epoch)
            last[int(np.searchsorted(BOUNDS.numpy(), VARIED[list(sampler)[-1][0]], side="right")) - 1] += 1
        held = np.histogram(VARIED, BOUNDS.numpy())[0] / 300 * 200
        assert all(abs(last[bucket] - held[bucket]) < 35 for bucket in range(3))


class TestResume:
    @each
    @pytest.mark.parametrize("options", [{}, {"largest_first": True}, {"world_size": 3, "rank": 1}])
    def test_at_every_position_the_rest_and_the_next_epochs_are_the_same(self, make, options):
        whole = make(**options)
        length = len(whole)
        future = [list(whole), list(whole)]
        for position in range(length + 1):
            sampler = make(**options)
            running = iter(sampler)
            for _ in range(position):
                next(running)
            state = json.loads(json.dumps(sampler.state_dict()))
            assert len(json.dumps(state)) < 300
            fresh = make(**options)
            fresh.load_state_dict(state)
            assert fresh.state_dict() == state
            assert [list(fresh), list(fresh)] == [future[0][position:], future[1]]

    @each
    def test_a_second_time_and_at_the_end(self, make):
        whole = make()
        whole.set_epoch(3)
        batches = list(whole)
        sampler = make()
        sampler.set_epoch(3)
        running = iter(sampler)
        seen = [next(running), next(running)]
        for _ in range(2):
            state = sampler.state_dict()
            sampler = make()
            sampler.load_state_dict(state)
            sampler.set_epoch(3)  # as a loop over epochs does: the position stays
            running = iter(sampler)
            seen += [next(running), next(running)]
        seen += running
        assert seen == batches
        ended = make()
        ended.load_state_dict(sampler.state_dict())
        assert list(ended) == []

    def test_the_seed_of_a_generator_is_restored(self):
        first = bucketed(generator=torch.Generator().manual_seed(1))
        list(first)
        running = iter(first)
        next(running)
        second = bucketed(generator=torch.Generator().manual_seed(2))
        second.load_state_dict(first.state_dict())
        assert list(second) == list(running)
        assert list(second) == list(first)

    def test_choosing_another_epoch_leaves_the_pass_before_behind(self):
        """As a loop does that saves between two epochs."""
        sampler = aware(shuffle=True)
        sampler.set_epoch(0)
        list(sampler)
        sampler.set_epoch(0)
        assert sampler.state_dict()["batch"] == len(sampler)
        sampler.set_epoch(1)
        state = sampler.state_dict()
        assert (state["epoch"], state["batch"]) == (1, 0)
        fresh = aware(shuffle=True)
        fresh.load_state_dict(state)
        assert list(fresh) == list(sampler)

    def test_choosing_another_epoch_forgets_the_position(self):
        sampler = aware(shuffle=True)
        next(iter(sampler))
        fresh = aware(shuffle=True)
        fresh.load_state_dict(sampler.state_dict())
        fresh.set_epoch(1)
        assert fresh.state_dict()["batch"] == 0
        assert fresh.state_dict()["epoch"] == 1
        assert len(list(fresh)) == len(fresh)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_with_workers_the_consumer_says_where_it_stands(self, workers):
        def loader(sampler):
            return DataLoader(range(300), batch_sampler=sampler, collate_fn=list, num_workers=workers)

        whole = list(nested())
        sampler = nested()
        running = iter(loader(sampler))
        assert [next(running) for _ in range(3)] == whole[:3]
        ahead = sampler.state_dict()["batch"]
        assert (ahead > 3) == (workers > 0)
        state = sampler.state_dict(consumed=3)
        fresh = nested()
        fresh.load_state_dict(state)
        assert list(loader(fresh)) == whole[3:]

    @pytest.mark.slow
    def test_in_a_fresh_process(self):
        sampler = aware(VARIED.tolist(), shuffle=True, seed=4)
        running = iter(sampler)
        next(running)
        code = (
            "import json, sys; from pipeal.data.batching.size_aware import SizeAwareBatchSampler as S; "
            "sizes, state = json.load(sys.stdin); s = S(range(len(sizes)), sizes, 100, shuffle=True); "
            "s.load_state_dict(state); print(list(s))"
        )
        sent = json.dumps([VARIED.tolist(), sampler.state_dict()])
        done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == list(running)

    def test_other_samples_before_the_position_are_refused(self):
        sampler = aware()
        running = iter(sampler)
        next(running)
        next(running)
        state = sampler.state_dict()
        other = aware(VARIED[::-1])
        other.load_state_dict(state)
        with pytest.raises(DataError, match="the first 2 batches are not those that the state was taken after"):
            next(iter(other))
        random = SizeAwareBatchSampler(RandomSampler(range(300)), VARIED, 100)
        random.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(DataError, match="shuffle=True does"):
                next(iter(random))
        short = aware(VARIED[:3])
        short.load_state_dict(state)
        with pytest.raises(DataError, match="stands after batch 2, but this pass has only 1 batches"):
            next(iter(short))

    def test_other_options_are_refused(self):
        changes = [
            (aware, [{"limit": 90}, {"largest_first": True}, {"shuffle": True}, {"cost": "padded"}, {"cost": max}]),
            (nested, [{"sizes": VARIED + 1}, {"bounds": BOUNDS + 1}, {"limit": 90}]),
        ]
        for make, others in changes:
            state = make().state_dict()
            make().load_state_dict(state)
            for options in others:
                with pytest.raises(DataError, match=r"a state with options .* with another limit"):
                    make(**options).load_state_dict(state)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": 2}, "a state with version 2; wanted 3"),
            ({"sampler": "BucketBatchSampler"}, "sampler 'BucketBatchSampler'; wanted 'SizeAwareBatchSampler'"),
            ({"world_size": 2}, "world_size 2; wanted 1"),
            ({"batch": -1}, "batch is -1; wanted a whole number"),
            ({"epoch": None}, "epoch is None"),
            ({"seed": True}, "seed is True"),
        ],
    )
    def test_states_of_others(self, change, message):
        sampler = aware()
        with pytest.raises(DataError, match=message):
            sampler.load_state_dict({**sampler.state_dict(), **change})
        with pytest.raises(DataError, match="a state with version 5"):
            sampler.load_state_dict(5)

    def test_a_restored_pass_that_has_not_begun_knows_only_its_own_place(self):
        sampler = aware()
        running = iter(sampler)
        for _ in range(3):
            next(running)
        fresh = aware()
        fresh.load_state_dict(sampler.state_dict())
        assert fresh.state_dict(consumed=3) == sampler.state_dict()
        with pytest.raises(ConfigError, match="consumed is 2, but the pass resumes after 3 batches and has not begun"):
            fresh.state_dict(consumed=2)
        next(iter(fresh))
        assert fresh.state_dict(consumed=2) == sampler.state_dict(consumed=2)

    def test_more_than_were_handed_out(self):
        sampler = aware()
        next(iter(sampler))
        assert sampler.state_dict(consumed=0)["batch"] == 0
        with pytest.raises(ConfigError, match="consumed is 2, but 1 batches of the pass begun last were handed out"):
            sampler.state_dict(consumed=2)


class TestRanks:
    @each
    @pytest.mark.parametrize("world_size", range(1, 17))
    def test_the_same_number_of_steps_and_each_sample_on_one_rank(self, make, world_size):
        samplers = [make(rank=rank, world_size=world_size) for rank in range(world_size)]
        parts = [list(sampler) for sampler in samplers]
        assert {len(part) for part in parts} == {steps_of(len(list(make())), world_size)}
        for sampler in samplers:
            sampler.set_epoch(0)
        assert {len(sampler) for sampler in samplers} == {len(parts[0])}
        came = Counter(flat(chain.from_iterable(parts)))
        [list(sampler) for sampler in samplers]
        assert not any(sampler.repeated for sampler in samplers)
        assert came == Counter(range(300))

    @given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 16))
    def test_evening_out(self, counts, world_size):
        numbers = iter(range(300))
        batches = [[next(numbers) for _ in range(count)] for count in counts]
        even = even_batches(batches, world_size)
        assert len(even.batches) == world_size * steps_of(len(batches), world_size)
        assert Counter(flat(even.batches)) == Counter(flat(batches)) + Counter(even.repeated)
        added = len(even.batches) - len(batches)
        assert bool(even.repeated) == (added > sum(count - 1 for count in counts))
        if not even.repeated:
            assert flat(even.batches) == flat(batches)
        assert max(map(len, even.batches), default=0) <= max(counts, default=0)

    def test_more_ranks_than_samples(self):
        parts = [list(aware([1, 1], 2, rank=rank, world_size=5)) for rank in range(5)]
        assert parts == [[[0]], [[1]], [[0]], [[1]], [[0]]]

    def test_the_largest_are_halved(self):
        assert even_batches([[0], [1, 2, 3, 4, 5], [6, 7]], 4).batches == [[0], [1, 2, 3], [4, 5], [6, 7]]
        assert even_batches([[0], [1, 2, 3, 4, 5]], 4).batches == [[0], [1, 2], [3], [4, 5]]

    def test_ranks_may_be_numbers_of_numpy(self):
        sampler = aware(rank=np.int64(1), world_size=np.int64(2))
        assert json.loads(json.dumps(sampler.state_dict())) == aware(rank=1, world_size=2).state_dict()

    @pytest.mark.parametrize("values", [(2, 2), (-1, 2), (0, 0), (True, 2), (0, 1.0)])
    def test_ranks_that_do_not_exist(self, values):
        for make in (aware, bucketed):
            with pytest.raises(ConfigError, match=r"rank|world_size"):
                make(rank=values[0], world_size=values[1])

    def test_a_stream_cannot_be_shared(self):
        for options in ({"world_size": 2}, {"largest_first": True}, {"shuffle": True}):
            with pytest.raises(ConfigError, match=r"without len\(\) may be endless"):
                SizeAwareBatchSampler(iter([1]), {1: 1}, 1, **options)


class TestLargestFirst:
    @pytest.mark.parametrize("world_size", [1, 3])
    @pytest.mark.parametrize("make", [nested, lambda **options: aware(cost="padded", shuffle=True, **options)])
    def test_no_later_step_is_larger(self, make, world_size):
        parts = [list(make(rank=rank, world_size=world_size, largest_first=True)) for rank in range(world_size)]
        padded = [[len(batch) * VARIED[batch].max() for batch in part] for part in parts]
        assert min(part[0] for part in padded) >= max(chain.from_iterable(part[1:] for part in padded))
        plain = [list(make(rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert sorted(map(sorted, chain(*parts))) == sorted(map(sorted, chain(*plain)))
        assert parts != plain


@given(
    st.lists(st.integers(-50, 200), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(1, 20),
    st.sampled_from([torch.int64, torch.int32, torch.int16]),
)
def test_buckets_are_as_narrow_as_the_count_allows(sizes, max_width, enough, dtype):
    buckets = create_buckets(torch.tensor(sizes, dtype=dtype), max_width, enough)
    assert isinstance(buckets, Buckets)
    assert buckets._fields == ("bucket_boundaries", "bucket_sizes")
    bounds, held = buckets.bucket_boundaries.tolist(), buckets.bucket_sizes.tolist()
    assert bounds[0] == min(sizes)
    assert bounds[-1] >= max(sizes) + 1
    assert held == [sum(low <= size < high for size in sizes) for low, high in pairwise(bounds)]
    for low, high, count in zip(bounds, bounds[1:], held, strict=False):
        within = sorted(size for size in sizes if low <= size < high)
        assert 0 < high - low <= max_width
        # Too few only where it could not grow; no more sizes than it needed.
        assert count >= enough or high - low == max_width or high == bounds[-1]
        assert not within or sum(size < within[-1] for size in within) < enough
        assert high in sizes or high - low == max_width or high == bounds[-1] == max(sizes) + 1


def test_bounds_of_buckets_are_sorted_as_the_document_says():
    """Its own example, ``[10, 5, 0, 16]``; the bounds of pipeal's own functions must rise instead."""
    orders = [[10, 5, 0, 16], [0, 5, 10, 16]]
    batches = [list(bucketed(torch.arange(16), torch.tensor(bounds), shuffle=False)) for bounds in orders]
    assert batches[0] == batches[1]
    held = [min(bucket[0] for bucket in ((0, 5), (5, 10), (10, 16)) if batch[0] < bucket[1]) for batch in batches[0]]
    assert Counter(held) == {0: 2, 5: 2, 10: 2}
    with pytest.raises(DataError, match="each above the one before it"):
        round_up([1], orders[0])


def test_signatures_are_those_of_the_document():
    def named(function):
        parameters = signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"}

    empty = Parameter.empty
    logs = {"info_logger": None, "warn_logger": None}
    assert list(named(size_aware_batching).items()) == [
        *dict.fromkeys(("dataset", "sizeof", "max_total_size"), empty).items(), ("collate_fn", None), *logs.items()
    ]  # fmt: skip
    assert list(named(SizeAwareBatchSampler.__init__).items()) == [
        *dict.fromkeys(("sampler", "sizeof", "max_total_size"), empty).items(), *logs.items()
    ]  # fmt: skip
    assert list(named(BucketBatchSampler.__init__).items()) == [
        *dict.fromkeys(("sizes", "bucket_boundaries", "base_batch_sampler_class"), empty).items(),
        ("base_batch_sampler_shared_kwargs", None), ("base_batch_sampler_individual_kwargs", None),
        ("shuffle", True), ("generator", None),
    ]  # fmt: skip
    assert list(named(create_buckets)) == ["sizes", "max_width", "min_bucket_count"]
    assert list(named(collect_cuda_peak_alloc).items()) == [
        *dict.fromkeys(("dataset", "work", "device"), empty).items(), ("cleanup", None)
    ]  # fmt: skip


class TestBucketErrors:
    @pytest.mark.parametrize(
        "sizes",
        [torch.tensor([]), torch.tensor([], dtype=torch.int64), torch.tensor([1.0]), torch.tensor([[1]]),
         torch.tensor([True]), [1, 2], torch.tensor([2**63 - 1])],
    )  # fmt: skip
    def test_sizes_to_cut(self, sizes):
        with pytest.raises(ValueError, match="wanted") as caught:
            create_buckets(sizes, 5, 5)
        assert isinstance(caught.value, DataError)

    def test_a_gap_of_too_many_empty_buckets(self):
        """It took all memory to make them."""
        with pytest.raises(
            DataError, match=r"sizes from 1 to 1000000000000 need more than 10000000 buckets of width 1"
        ):
            create_buckets(torch.tensor([1, 10**12]), 1, 1)
        assert len(create_buckets(torch.tensor([1, 10**12]), 10**9, 1).bucket_sizes) == 1000

    @pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
    def test_widths_and_counts(self, value):
        with pytest.raises(ConfigError, match="max_width is"):
            create_buckets(torch.arange(3), value, 5)
        with pytest.raises(ConfigError, match="min_bucket_count is"):
            create_buckets(torch.arange(3), 5, value)

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ([1, 2], "sizes is a list; wanted a 1-D tensor"),
            (torch.ones(2, 2), r"sizes is a tensor of shape \(2, 2\)"),
            (torch.tensor([True]), "torch.bool"),
            (torch.tensor([1j]), "complex"),
            (torch.tensor([1.0, float("nan")]), "sample 1 has size nan"),
            (torch.tensor([1.0, 2.0, float("inf")]), "sample 2 has size inf"),
        ],
    )
    def test_sizes(self, sizes, message):
        with pytest.raises(ValueError, match=message):
            BucketBatchSampler(sizes, BOUNDS, BatchSampler)

    @pytest.mark.parametrize(
        ("bounds", "message"),
        [
            ([0, 5], "bucket_boundaries is a list"),
            (torch.tensor([[0, 5]]), "bucket_boundaries is a tensor of shape"),
            (torch.tensor([0, 5, 5]), "bucket_boundaries contain 5 twice"),
            (torch.tensor([3]), "1 bucket_boundaries; wanted at least 2"),
            (torch.tensor([0.0, float("nan")]), "NaN"),
        ],
    )
    def test_bounds(self, bounds, message):
        with pytest.raises(ValueError, match=message):
            BucketBatchSampler(torch.arange(3), bounds, BatchSampler)

    @pytest.mark.parametrize(
        ("shared", "individual", "message"),
        [
            ([1], None, "base_batch_sampler_shared_kwargs is"),
            (None, [1], "base_batch_sampler_individual_kwargs is"),
            ({1: 2}, None, "wanted a dictionary of keyword arguments"),
            ({"drop_last": True}, {"batch_size": [1, 2]}, "2 values of 'batch_size' for 3 buckets"),
            ({"drop_last": True}, {"batch_size": 4}, "the values of 'batch_size' are 4"),
        ],
    )
    def test_keyword_arguments(self, shared, individual, message):
        with pytest.raises(ValueError, match=message):
            BucketBatchSampler(torch.arange(3), BOUNDS, BatchSampler, shared, individual)

    @pytest.mark.parametrize(("value", "shuffles"), [(None, True), (0, False), (1, True), (np.False_, False)])
    def test_shuffle_may_be_left_open_or_a_number(self, value, shuffles):
        """0 is False in Python, but was taken for True."""
        assert bucketed(shuffle=value).shuffle is shuffles

    def test_other_arguments(self):
        with pytest.raises(ValueError, match="shuffle is 'no'"):
            bucketed(shuffle="no")
        with pytest.raises(TypeError, match="generator is an int; wanted"):
            bucketed(generator=3)
        with pytest.raises(TypeError, match="wanted a class"):
            BucketBatchSampler(torch.arange(3), BOUNDS, "BatchSampler")

    @pytest.mark.parametrize("sizes", [torch.arange(3) + 100, torch.tensor([]), torch.tensor([-0.5, 41.0])])
    def test_nothing_within_the_bounds(self, sizes):
        with pytest.raises(RuntimeError, match=r"none of .* samples has a size from 0 to below 41") as caught:
            BucketBatchSampler(sizes, BOUNDS, BatchSampler)
        assert isinstance(caught.value, EmptyBucketsError)

    def test_samples_outside_are_left_out_with_a_warning(self):
        with pytest.warns(UserWarning, match="2 of 5 samples have sizes outside 0 to 41"):
            sampler = bucketed(torch.tensor([-1, 0, 40, 41, 9]), shuffle=False)
        assert list(sampler) == [[1, 4], [2]]
        assert sampler.outside == 2

    def test_whole_sizes_and_bounds_between_them(self):
        with pytest.warns(UserWarning, match="1 of 4 samples"):
            sampler = bucketed(torch.tensor([1, 2, 3, 2]), torch.tensor([1.5, 2.5, 4.0]), shuffle=False)
        assert list(sampler) == [[1, 3], [2]]

    def test_a_base_class_without_len(self):
        class Plain(Sampler):
            def __init__(self, indices):
                self.indices = indices

            def __iter__(self):
                return iter([self.indices])

        sampler = BucketBatchSampler(torch.arange(12), BOUNDS, Plain, shuffle=False)
        assert list(sampler) == [[*range(10)], [10, 11]]
        with pytest.raises(TypeError, match=r"Plain has no len\(\)"):
            len(sampler)


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False), min_size=2, max_size=6, unique=True),
)
def test_sizes_fall_into_buckets_without_rounding(sizes, bounds):
    whole = all(isinstance(bound, int) for bound in bounds)
    given_bounds = torch.tensor(bounds, dtype=torch.int64 if whole else torch.float64)
    sorted_bounds = sorted(given_bounds.tolist())
    if len(set(sorted_bounds)) < len(bounds):
        return
    wanted = []
    for low, high in pairwise(sorted_bounds):
        wanted += [[index] for index, size in enumerate(sizes) if low <= size < high]
    options = {"batch_size": 1, "drop_last": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = list(BucketBatchSampler(torch.tensor(sizes), given_bounds, BatchSampler, options, shuffle=False))
        except EmptyBucketsError:
            found = []
    assert found == wanted


def test_many_buckets_do_not_each_look_at_every_sample(monkeypatch):
    """Building took samples times buckets: minutes over ranges as narrow as sizes allow."""
    looks = []

    class Watched(np.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **options):
            looks.append(ufunc)
            return getattr(ufunc, method)(*(np.asarray(each) for each in inputs), **options)

    monkeypatch.setattr(bucket, "bucket_of", lambda sizes, bounds: bucket_of(sizes, bounds).view(Watched))
    sampler = bucketed(np.arange(500), torch.arange(501), shuffle=False)
    assert list(sampler) == [[index] for index in range(500)]
    assert len(looks) < 10


class TestErrors:
    @pytest.mark.parametrize("limit", [0, -1, -0.5, float("nan"), "4", None, True, torch.ones(2)])
    def test_limits(self, limit):
        with pytest.raises(ValueError, match="wanted a number above 0"):
            aware(limit=limit)
        with pytest.raises(ValueError, match="wanted a number above 0"):
            size_aware_batching([1], int, limit)

    @pytest.mark.parametrize("sizeof", [3, None, "size", b"size", np.ones((2, 2)), torch.ones(1, 1)])
    def test_sizeof_of_the_wrong_kind(self, sizeof):
        with pytest.raises(TypeError, match="sizeof is a"):
            SizeAwareBatchSampler([0], sizeof, 1)
        with pytest.raises(SizeTypeError, match="sizeof is a"):
            size_aware_batching([0], sizeof, 1)

    def test_samplers_of_the_wrong_kind(self):
        with pytest.raises(TypeError, match="sampler is an int; wanted a Sampler or an iterable"):
            SizeAwareBatchSampler(3, [1], 1)
        with pytest.raises(TypeError, match="dataset is an int"):
            size_aware_batching(3, int, 1)
        with pytest.raises(TypeError, match="integer"):
            list(SizeAwareBatchSampler(["a"], {"a": 1}, 1))

    @pytest.mark.parametrize(
        ("size", "error", "message"),
        [
            (-1, DataError, "sample 1 has size -1; wanted a finite size of at least 0"),
            (float("nan"), DataError, "sample 1 has size nan"),
            (float("inf"), DataError, "sample 1 has size inf"),
            (np.float32("inf"), DataError, "sample 1 has size inf"),
            ("9", SizeTypeError, "sample 1 has size '9', a str; wanted a number"),
            (None, SizeTypeError, "sample 1 has size None"),
            (1j, SizeTypeError, "wanted a number"),
            (torch.ones(2), SizeTypeError, "a Tensor; wanted a number"),
        ],
    )
    def test_sizes(self, size, error, message):
        for sizes in ([1, size], lambda index: (1, size)[index]):
            with pytest.raises(error, match=message):
                list(SizeAwareBatchSampler([0, 1], sizes, 10))

    def test_missing_sizes_and_samples(self):
        for sizeof in ([1], {0: 1}):
            with pytest.raises(DataError, match="no size for sample 1 among 1"):
                list(SizeAwareBatchSampler([0, 1], sizeof, 10))

    @pytest.mark.parametrize(
        ("samples", "sizeof", "told"),
        [
            (["a", "b"], [1, 2], "no size of a str can be looked up in a list; wanted a function"),
            ([[1], [2]], {1: 1}, "no size of a list can be looked up in a dict"),
        ],
    )
    def test_samples_that_nothing_can_be_looked_up_by(self, samples, sizeof, told):
        """Symptom: "list indices must be integers or slices, not str" of a list of sizes beside the samples."""
        with pytest.raises(SizeTypeError, match=told):
            list(size_aware_batching(samples, sizeof, 10))

    @pytest.mark.parametrize("empty", [[], range(0), SequentialSampler([]), iter([]), np.array([], np.int64)])
    @pytest.mark.parametrize("sizeof", [len, [], {}, torch.ones(0)])
    def test_without_samples_there_are_no_batches(self, empty, sizeof):
        assert list(SizeAwareBatchSampler(empty, sizeof, 10)) == []
        assert list(size_aware_batching(empty, len, 10)) == []

    @pytest.mark.parametrize("options", [{"world_size": 2, "rank": 1}, {"largest_first": True}, {"shuffle": True}])
    def test_without_samples_no_rank_has_a_batch(self, options):
        sampler = SizeAwareBatchSampler([], [], 10, **options)
        assert len(sampler) == 0
        assert list(sampler) == []
        again = SizeAwareBatchSampler([], [], 10, **options)
        again.load_state_dict(sampler.state_dict())
        assert list(again) == []

    def test_what_sizeof_raises_comes_as_it_is(self):
        with pytest.raises(ZeroDivisionError):
            list(SizeAwareBatchSampler([0], lambda index: 1 // index, 1))
        with pytest.raises(KeyError):
            list(SizeAwareBatchSampler([0], lambda index: {}[index], 1))

    def test_a_sizeof_that_ends_does_not_end_the_pass_unnoticed(self):
        left = iter([1, 1])
        with pytest.raises(ValueError, match="shorter"):
            list(SizeAwareBatchSampler([0, 1, 2], lambda index: next(left), 1))
        left = iter([1, 1])
        with pytest.raises(ValueError, match="shorter"):
            list(size_aware_batching([0, 1, 2], lambda index: next(left), 1))

    @pytest.mark.parametrize(
        "options", [{"cost": "max"}, {"cost": 3}, {"oversize": "keep"}, {"seed": -1}, {"seed": 0.5}]
    )
    def test_options(self, options):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} is .*; wanted"):
            aware(**options)
        with pytest.raises(ConfigError, match="epoch is -1"):
            aware().set_epoch(-1)

    @pytest.mark.parametrize("result", [float("nan"), -1, None])
    def test_costs(self, result):
        with pytest.raises(ConfigError, match=r"cost\(1, 5\) gave"):
            list(aware([5], 10, cost=lambda n, longest: result))


class TestCompatible:
    """What holds of ``compatible=True`` beyond the batches that the document shows."""

    @given(sizes=st.lists(st.integers(0, 29), min_size=1, max_size=80), size=st.integers(1, 5), drop=st.booleans())
    def test_each_sample_at_most_once_and_each_bucket_in_the_order_of_its_base(self, sizes, size, drop):
        bounds = torch.tensor([0, 5, 6, 20, 30])
        sampler = BucketBatchSampler(
            torch.tensor(sizes), bounds, BatchSampler, {"batch_size": size, "drop_last": drop}, compatible=True
        )
        for _ in range(2):
            batches = list(sampler)
            assert len(batches) == len(sampler)
            wanted = sorted(tuple(batch) for base in sampler.base_batch_samplers for batch in base)
            assert sorted(map(tuple, batches)) == wanted
            if not drop:
                assert sorted(flat(batches)) == list(range(len(sizes)))

    def test_buckets_come_in_proportion_to_what_they_hold(self):
        sizes = torch.tensor([0] * 600 + [1] * 300 + [3] * 100)
        firsts = Counter()
        for seed in range(400):
            sampler = BucketBatchSampler(
                sizes,
                torch.arange(5),
                BatchSampler,
                {"batch_size": 500, "drop_last": False},
                compatible=True,
                seed=seed,
            )
            firsts[int(sizes[next(iter(sampler))[0]])] += 1
        assert [round(firsts[size] / 400, 1) for size in range(4)] == [0.6, 0.3, 0.0, 0.1]

    def test_it_draws_from_a_copy(self):
        shared = torch.Generator().manual_seed(0)
        one = bucketed(generator=shared, compatible=True)
        other = bucketed(generator=shared, compatible=True)
        alone = list(bucketed(generator=torch.Generator().manual_seed(0), compatible=True))
        found = next(iter(one)), list(other)
        assert found[0] == alone[0]
        assert found[1] != alone
        shared.manual_seed(9)
        one.set_epoch(0)
        assert list(one) == alone

    def test_a_state_wants_the_generator_that_it_was_taken_with(self):
        def built(seed):
            return bucketed(generator=torch.Generator().manual_seed(seed), compatible=True)

        sampler = built(1)
        list(sampler)
        second = iter(sampler)
        next(second), next(second)
        state = json.loads(json.dumps(sampler.state_dict()))
        again = built(1)
        again.load_state_dict(state)
        assert list(again) == list(second)
        for other in (built(2), bucketed(compatible=True), bucketed(generator=torch.Generator().manual_seed(1))):
            with pytest.raises(DataError, match="with options"):
                other.load_state_dict(state)

    def test_the_seed_of_a_state_is_taken_over(self):
        sampler = bucketed(compatible=True, seed=4)
        list(sampler)
        again = bucketed(compatible=True, seed=5)
        list(again)
        again.load_state_dict(sampler.state_dict())
        assert list(again) == []
        assert list(again) == list(sampler)

    def test_what_bases_drop_is_counted(self):
        sampler = nested(compatible=True, limit=30)
        with pytest.warns(UserWarning, match="dropped"):
            list(sampler)
        assert sampler.dropped == (VARIED > 30).sum()

    def test_without_shuffling_it_changes_nothing(self):
        assert list(bucketed(shuffle=False, compatible=True)) == list(bucketed(shuffle=False))
