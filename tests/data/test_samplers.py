"""The laws of the batch samplers."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from pipeal.core.errors import ConfigError, DataError
from pipeal.data import (
    BinnedBatchIterator,
    BinnedBatchSampler,
    FixedBatchSampler,
    LengthGroupedBatchSampler,
    PlannedBatchSampler,
    TokenBudgetBatchSampler,
    padding_share,
)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)
MAKERS = {
    "fixed": lambda lengths, **options: FixedBatchSampler(lengths, 4, **options),
    "grouped": lambda lengths, **options: LengthGroupedBatchSampler(lengths, 4, **options),
    "budget": lambda lengths, **options: TokenBudgetBatchSampler(lengths, 200, **options),
    "budget of few": lambda lengths, **options: TokenBudgetBatchSampler(lengths, 200, max_samples=3, **options),
    "planned": lambda lengths, **options: PlannedBatchSampler(lengths, 400, **options),
    "binned": lambda lengths, **options: BinnedBatchSampler(
        lengths, [8, 16, 24, 40], 200, buffer_samples=50, **options
    ),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
VARIED = np.random.default_rng(0).integers(1, 40, 300)


@each
@given(LENGTHS, st.booleans(), st.integers(0, 5), st.integers(0, 5))
def test_every_index_once_per_epoch_and_len_is_right(make, lengths, shuffle, seed, epoch):
    sampler = make(lengths, shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert sorted(chain.from_iterable(batches)) == list(range(len(lengths)))
    assert len(sampler) == len(batches)
    assert all(batches)


@each
def test_seed_and_epoch_decide_and_nothing_else(make):
    sampler = make(VARIED, seed=3)
    epochs = []
    for epoch in (0, 1, 2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    np.random.default_rng().random()
    fresh = make(VARIED.tolist(), seed=3)
    fresh.set_epoch(1)
    assert list(fresh) == epochs[1]
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]
    assert list(make(VARIED, seed=4)) != epochs[0]
    members = [{frozenset(batch) for batch in batches} for batches in epochs]
    assert len(members[0] & members[1]) < len(members[0]) / 2


@each
def test_without_shuffling_every_epoch_is_the_same(make):
    sampler = make(VARIED, shuffle=False)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) == first


def test_without_shuffling_equal_lengths_stay_in_order():
    for sampler in (
        TokenBudgetBatchSampler(VARIED, 200, shuffle=False),
        LengthGroupedBatchSampler(VARIED, 4, shuffle=False),
        PlannedBatchSampler(VARIED, 400, shuffle=False),
    ):
        flat = list(chain.from_iterable(sampler))
        assert flat == sorted(range(len(VARIED)), key=lambda index: -VARIED[index])


def test_membership_changes_even_where_no_two_lengths_are_equal():
    sampler = TokenBudgetBatchSampler(range(1, 201), 2000)
    longest = set()
    for epoch in range(30):
        sampler.set_epoch(epoch)
        longest.update(tuple(sorted(batch)) for batch in sampler if 199 in batch)
    assert len(longest) == 10


@pytest.mark.parametrize("make", [MAKERS["grouped"], MAKERS["budget"], MAKERS["planned"]])
def test_batches_do_not_come_by_length(make):
    longest = [max(VARIED[batch]) for batch in make(VARIED)]
    assert longest != sorted(longest, reverse=True)
    calm = [max(VARIED[batch]) for batch in make(VARIED, shuffle=False)]
    assert calm == sorted(calm, reverse=True)


def test_the_smaller_batch_may_be_of_any_length():
    sampler = LengthGroupedBatchSampler(range(1, 11), 4)
    smaller = set()
    for epoch in range(30):
        sampler.set_epoch(epoch)
        smaller.update(tuple(batch) for batch in sampler if len(batch) < 4)
    assert smaller == {(9, 8), (5, 4), (1, 0)}


@each
def test_iterators_do_not_disturb_each_other(make):
    sampler = make(VARIED)
    alone = list(sampler)
    running = iter(sampler)
    begun = [next(running)]
    sampler.set_epoch(5)
    other = list(sampler)
    assert begun + list(running) == alone != other
    assert next(running, None) is None


@each
def test_a_plain_dataloader_takes_it(make):
    sampler = make(VARIED)
    loader = DataLoader(VARIED.tolist(), batch_sampler=sampler, collate_fn=list)
    assert len(loader) == len(sampler)
    assert list(loader) == [VARIED[batch].tolist() for batch in sampler]


@given(LENGTHS, st.integers(40, 200), st.one_of(st.none(), st.integers(1, 9)), st.booleans(), st.integers(0, 9))
def test_no_batch_exceeds_the_budget_and_all_are_cut_from_one_order(lengths, budget, most, shuffle, seed):
    sampler = TokenBudgetBatchSampler(lengths, budget, max_samples=most, shuffle=shuffle, seed=seed)
    batches = [[lengths[i] for i in batch] for batch in sampler]
    for batch in batches:
        assert max(batch) * len(batch) <= budget
        assert most is None or len(batch) <= most
    batches.sort(key=lambda batch: (batch[0], batch[-1]), reverse=True)
    assert list(chain.from_iterable(batches)) == sorted(lengths, reverse=True)


def fewest(lengths, budget):
    """By trying every cutting of the sorted lengths."""
    ordered = sorted(lengths)
    best = [0]
    for end in range(1, len(ordered) + 1):
        fitting = (begin for begin in range(end) if ordered[end - 1] * (end - begin) <= budget)
        best.append(1 + min(best[begin] for begin in fitting))
    return best[-1]


@given(LENGTHS, st.integers(40, 120), st.integers(0, 3))
def test_without_shuffling_the_batches_are_fewest_and_with_it_one_more_at_most(lengths, budget, seed):
    best = fewest(lengths, budget)
    assert len(TokenBudgetBatchSampler(lengths, budget, shuffle=False)) == best
    assert len(TokenBudgetBatchSampler(lengths, budget, seed=seed)) <= best + 1


@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_grouped_batches_are_full_but_one_and_do_not_overlap_in_length(lengths, size, shuffle):
    batches = list(LengthGroupedBatchSampler(lengths, size, shuffle=shuffle))
    whole, rest = divmod(len(lengths), size)
    assert sorted(map(len, batches), reverse=True) == [size] * whole + [rest] * bool(rest)
    spans = sorted((min(lengths[i] for i in batch), max(lengths[i] for i in batch)) for batch in batches)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_similar_lengths_leave_little_padding():
    shares = {name: padding_share(VARIED, make(VARIED)) for name, make in MAKERS.items()}
    assert shares["grouped"] < 0.05 < 0.3 < shares["fixed"]
    assert shares["budget"] < 0.1


@given(LENGTHS, st.integers(0, 3))
def test_padding_share_counts_what_a_loop_counts(lengths, seed):
    batches = list(FixedBatchSampler(lengths, 3, seed=seed))
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)
    assert padding_share(lengths, iter(batches)) == pytest.approx(1 - sum(lengths) / padded)


@each
@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([], DataError, r"lengths of shape \(0,\); wanted one length"),
        ([[1]], DataError, r"lengths of shape \(1, 1\)"),
        ([1.5, 2], DataError, "lengths of type float64; wanted whole numbers"),
        ([3, 0], DataError, "sample 1 has length 0; wanted at least 1"),
        ([3, -2], DataError, "sample 1 has length -2"),
        ([torch.ones(3), torch.ones(2)], DataError, r"make no array .*; wanted one whole number for each sample"),
        (torch.ones(2, dtype=torch.bfloat16), DataError, r"make no array \(TypeError"),
    ],
)
def test_bad_lengths(make, lengths, error, message):
    with pytest.raises(error, match=message):
        make(lengths)


@each
def test_bad_seed_and_epoch(make):
    with pytest.raises(ConfigError, match="seed is -1; wanted a whole number of at least 0"):
        make([1], seed=-1)
    with pytest.raises(ConfigError, match="epoch is -1"):
        make([1]).set_epoch(-1)


@pytest.mark.parametrize("value", [0, -5, 2.5, True])
def test_bad_sizes(value):
    for make in (FixedBatchSampler, LengthGroupedBatchSampler):
        with pytest.raises(ConfigError, match=f"batch_size is {value}; wanted a whole number of at least 1"):
            make([1], value)
    with pytest.raises(ConfigError, match=f"budget_tokens is {value}"):
        TokenBudgetBatchSampler([1], value)
    with pytest.raises(ConfigError, match=f"max_samples is {value}"):
        TokenBudgetBatchSampler([1], 1, max_samples=value)


def test_a_sample_longer_than_the_budget_is_named():
    with pytest.raises(DataError, match=r"sample 2 has length 99, more than the budget of 64 tokens; raise"):
        TokenBudgetBatchSampler([1, 64, 99], 64)


def test_bad_batches():
    for batches in ([], [[0], []]):
        with pytest.raises(DataError, match="no batches, or one without samples"):
            padding_share([1], batches)


def test_small_whole_number_types_do_not_overflow():
    lengths = np.full(1000, 200, dtype=np.uint8)
    assert padding_share(lengths, TokenBudgetBatchSampler(lengths, 100_000, shuffle=False)) == 0


@given(LENGTHS, st.integers(0, 3), st.sampled_from(["bound", "longest"]), st.integers(1, 30))
def test_a_binned_sampler_gives_what_the_stream_gives_and_says_what_to_pad_to(lengths, epoch, pad_to, buffer_samples):
    options = {"bounds": [4, 20, 30], "budget": 100, "buffer_samples": buffer_samples, "pad_to": pad_to}
    sampler = BinnedBatchSampler(lengths, **options, oversize="single", seed=5)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    order = list(np.random.default_rng((5, epoch)).permutation(len(lengths)))
    stream = list(BinnedBatchIterator(order, **options, length=lengths.__getitem__, oversize="single"))
    assert batches == [batch.samples for batch in stream]
    assert [sampler.padded_lengths[batch].max() for batch in batches] == [batch.padded_length for batch in stream]


def test_a_binned_sampler_settles_what_is_over_its_bounds_before_the_first_epoch():
    with pytest.raises(DataError, match=r"sample 1 has length 9, above the last bound 8"):
        BinnedBatchSampler([3, 9], [4, 8], 16)
    dropping = BinnedBatchSampler([3, 9], [4, 8], 16, oversize="drop")
    assert (list(dropping), dropping.dropped) == ([[0]], 1)
    with pytest.raises(DataError, match=r"all 1 samples"):
        BinnedBatchSampler([9], [4, 8], 16, oversize="drop")
    with pytest.raises(ConfigError, match=r"over the budget of 7"):
        BinnedBatchSampler([3], [4, 8], 7)


def test_a_length_that_no_signed_number_holds_does_not_turn_negative():
    with pytest.raises(DataError, match=r"lengths up to 9223372036854775813; wanted whole numbers below"):
        FixedBatchSampler(np.array([2**63 + 5, 3], dtype=np.uint64), 1)
