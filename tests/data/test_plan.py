"""The laws of the epoch plan: fewest batches, least padding, every sample once, and the same future after a resume."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from itertools import chain, islice, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from pipeal.core.errors import ConfigError, DataError
from pipeal.data import FixedBatchSampler, TokenBudgetBatchSampler
from pipeal.data.batching.cuts import SortedSamples
from pipeal.data.batching.plan import PlannedBatchSampler
from pipeal.data.batching.samplers import padding_share

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)
FEW = st.lists(st.integers(1, 9), min_size=1, max_size=7)
# Lengths that occur several times each: only then it matters where in a run a cut lies.
RUNS = st.dictionaries(st.integers(1, 12), st.integers(1, 14), min_size=1, max_size=6)
VARIED = np.random.default_rng(0).integers(1, 40, 300)


def partitions(items):
    """Every way to put items into batches, whatever their order."""
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for n, batch in enumerate(smaller):
            yield [*smaller[:n], [first, *batch], *smaller[n + 1 :]]


def padded(lengths, batches):
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


def quadratic(n, longest):
    return n * (longest + 0.1 * longest * longest) + 3


@given(FEW, st.integers(9, 30), st.one_of(st.none(), st.integers(1, 4)), st.integers(0, 2))
def test_no_way_to_batch_has_fewer_batches_or_less_padding_with_as_many(lengths, budget, most, spare):
    sampler = PlannedBatchSampler(lengths, budget, max_samples=most, spare_batches=spare, shuffle=False)
    fitting = [
        batches
        for batches in partitions(list(range(len(lengths))))
        if all(len(b) * max(lengths[i] for i in b) <= budget and len(b) <= (most or 99) for b in batches)
    ]
    count = min(min(map(len, fitting)) + spare, len(lengths))
    assert len(list(sampler)) == count
    best = min(padded(lengths, batches) for batches in fitting if len(batches) == count)
    assert padded(lengths, list(sampler)) == best


@given(FEW, st.integers(21, 60), st.integers(0, 3))
def test_the_same_for_any_cost_and_shuffling_keeps_the_number(lengths, budget, seed):
    calm = PlannedBatchSampler(lengths, budget, cost=quadratic, shuffle=False)
    fitting = [
        batches
        for batches in partitions(list(range(len(lengths))))
        if all(quadratic(len(b), max(lengths[i] for i in b)) <= budget for b in batches)
    ]
    fewest = min(map(len, fitting))
    assert len(list(calm)) == fewest
    assert padded(lengths, list(calm)) == min(padded(lengths, b) for b in fitting if len(b) == fewest)
    assert len(list(PlannedBatchSampler(lengths, budget, cost=quadratic, seed=seed))) == fewest


def least_by_trying_all_cuts(lengths, fits, batches):
    """Over every place of every cut."""
    best = {0: 0}
    for _ in range(batches):
        after = {}
        for begin, cost in ((begin, cost) for begin, cost in best.items() if begin < len(lengths)):
            for end in range(begin + 1, min(begin + fits[begin], len(lengths)) + 1):
                after[end] = min(after.get(end, 10**9), cost + (end - begin) * lengths[begin])
        best = after
    return best[len(lengths)]


@given(RUNS, st.integers(12, 70), st.integers(0, 12))
def test_cuts_at_runs_and_full_batches_are_enough(runs, budget, spare):
    lengths = [length for length, count in runs.items() for _ in range(count)]
    falling = np.array(sorted(lengths, reverse=True))
    samples = SortedSamples(falling, budget // falling)
    batches = min(samples.fewest() + spare, len(lengths))
    cuts = samples.least_padding(samples.windows(batches), batches)
    assert cuts[0] == 0
    assert cuts[-1] == len(lengths)
    assert len(cuts) == batches + 1
    assert all(begin < end <= begin + samples.fits[begin] for begin, end in pairwise(cuts.tolist()))
    found = int((np.diff(cuts) * falling[cuts[:-1]]).sum())
    assert found == least_by_trying_all_cuts(falling.tolist(), samples.fits.tolist(), batches)


@given(LENGTHS, st.integers(40, 200), st.integers(0, 9), st.integers(0, 2), st.sampled_from([None, 3]), st.booleans())
def test_shuffled_plans_keep_the_budget_the_fewest_and_every_sample(lengths, budget, seed, epoch, shapes, largest):
    sampler = PlannedBatchSampler(lengths, budget, seed=seed, shapes=shapes, largest_first=largest)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert sorted(chain.from_iterable(batches)) == list(range(len(lengths)))
    assert len(batches) == len(sampler) == len(PlannedBatchSampler(lengths, budget, shapes=shapes, shuffle=False))
    longest = [max(sampler.padded_lengths[batch]) for batch in batches]
    assert all(len(batch) * up <= budget for batch, up in zip(batches, longest, strict=True))
    if largest:
        assert len(batches[0]) * longest[0] == max(len(b) * up for b, up in zip(batches, longest, strict=True))
    if shapes:
        assert len(set(sampler.padded_lengths.tolist())) <= shapes
        assert (sampler.padded_lengths >= lengths).all()


@given(LENGTHS, st.integers(40, 200), st.integers(1, 5), st.integers(0, 2), st.integers(1, 3))
def test_bounds_give_few_shapes_and_the_same_in_every_epoch(lengths, budget, shapes, spare, world_size):
    """Symptom: only lengths were bounded; batches of other sizes were compiled anew in every epoch."""
    options = {"shapes": shapes, "spare_batches": spare, "world_size": world_size}
    ranks = [PlannedBatchSampler(lengths, budget, rank=rank, **options) for rank in range(world_size)]

    def drawn(epoch):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        batches = list(chain.from_iterable(ranks))
        return Counter((len(batch), max(ranks[0].padded_lengths[batch])) for batch in batches)

    known = drawn(0)
    assume(not ranks[0].repeated)  # which depends on what is drawn
    for epoch in range(1, 4):
        assert drawn(epoch) == known
    if not spare and world_size == 1:
        assert len(known) <= shapes + 1  # the last batch takes what is left


def test_with_bounds_other_samples_share_a_batch_in_each_epoch():
    sampler = PlannedBatchSampler(VARIED, 400, shapes=4)
    members = set()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        members |= {frozenset(batch) for batch in sampler}
    assert len(members) > 2.5 * len(sampler)


def test_spare_batches_pad_less_with_bounds_too():
    """Symptom: they were made of halves of others, and saved nothing."""
    few, more = (PlannedBatchSampler(VARIED, 400, shapes=8, spare_batches=spare) for spare in (0, 8))
    assert len(more) == len(few) + 8
    assert padded(more.padded_lengths, list(more)) < padded(few.padded_lengths, list(few))


def test_other_samples_share_a_batch_in_each_epoch():
    sampler = PlannedBatchSampler(VARIED, 400, seed=3)
    members = []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        members.append({frozenset(batch) for batch in sampler})
    assert all(len(one & other) < len(one) / 3 for one, other in pairwise(members))


def test_membership_changes_even_where_no_two_lengths_are_equal():
    sampler = PlannedBatchSampler(range(1, 201), 2000)
    together = set()
    for epoch in range(20):
        sampler.set_epoch(epoch)
        together.update(tuple(sorted(batch)) for batch in sampler if 150 in batch)
    assert len(together) > 3


@given(LENGTHS, st.integers(1, 16), st.booleans(), st.integers(0, 2), st.booleans())
def test_ranks_take_equal_steps_and_share_every_sample(lengths, world_size, shuffle, epoch, largest):
    ranks = [
        PlannedBatchSampler(lengths, 80, shuffle=shuffle, rank=rank, world_size=world_size, largest_first=largest)
        for rank in range(world_size)
    ]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in ranks]
    assert {len(some) for some in batches} == {len(ranks[0])} == {len(sampler) for sampler in ranks}
    assert all(len(b) * max(lengths[i] for i in b) <= 80 for some in batches for b in some)
    given_out = sorted(chain.from_iterable(chain.from_iterable(batches)))
    assert set(given_out) == set(range(len(lengths)))
    assert given_out == sorted([*range(len(lengths)), *ranks[0].repeated])
    assert ranks[0].repeated == ranks[-1].repeated
    alone = len(PlannedBatchSampler(lengths, 80))
    assert len(ranks[0]) == -(-alone // world_size)
    if len(lengths) >= len(ranks[0]) * world_size:
        assert not ranks[0].repeated


@pytest.mark.parametrize("world_size", [1, 2, 3])
@given(lengths=LENGTHS, data=st.data())
def test_a_resumed_future_is_the_same_from_every_place(world_size, lengths, data):
    def build():
        return PlannedBatchSampler(lengths, 60, seed=5, rank=world_size - 1, world_size=world_size)

    def epochs_from(sampler, first):
        for epoch in range(first, 3):
            sampler.set_epoch(epoch)
            yield from sampler

    straight = build()
    future = list(epochs_from(straight, 0))
    length = len(straight)
    for seen in range(3 * length):
        epoch, batch = divmod(seen, length)
        running = build()
        running.set_epoch(epoch)
        list(islice(running, batch))
        state = json.loads(json.dumps(running.state_dict()))
        assert (state["epoch"], state["batch"]) == (epoch, batch)
        again = build()
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert list(epochs_from(again, epoch)) == future[seen:]
    # A second time, within the remainder and at the end of an epoch.
    at = data.draw(st.integers(0, length))
    straight.set_epoch(1)
    list(islice(straight, at))
    again = build()
    again.load_state_dict(straight.state_dict())
    rest = data.draw(st.integers(0, length - at))
    list(islice(again, rest))
    third = build()
    third.load_state_dict(again.state_dict())
    assert list(epochs_from(third, 1)) == future[length + at + rest :]


def test_positions_of_a_consumer_and_of_other_epochs():
    sampler = PlannedBatchSampler(VARIED, 400)
    whole = list(sampler)
    assert sampler.state_dict()["batch"] == len(whole)
    state = sampler.state_dict(consumed=3)
    sampler.load_state_dict(state)
    sampler.set_epoch(0)
    assert list(sampler) == whole[3:]
    assert list(sampler) == whole
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    assert len(list(sampler)) == len(whole)
    other = PlannedBatchSampler(VARIED, 400, seed=9)
    other.load_state_dict(state)
    assert list(other) == whole[3:]
    with pytest.raises(ConfigError, match=r"consumed is 99, but \d+ batches of the pass begun last"):
        sampler.state_dict(consumed=99)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        (VARIED[::-1], {}),
        (np.append(VARIED, 3), {}),
        (VARIED, {"budget": 500}),
        (VARIED, {"max_samples": 5}),
        (VARIED, {"shapes": 3}),
        (VARIED, {"shuffle": False}),
        (VARIED, {"world_size": 2}),
        (VARIED, {"spare_batches": 1}),
        (VARIED, {"largest_first": True}),
    ],
)
def test_a_state_of_other_data_or_options_is_refused(lengths, options):
    state = PlannedBatchSampler(VARIED, 400).state_dict()
    other = PlannedBatchSampler(lengths, **({"budget": 400} | options))
    with pytest.raises(DataError, match=r"a state with (world_size|options) .*; wanted .* of other sizes"):
        other.load_state_dict(state)


def test_a_state_of_another_kind_or_version_is_refused():
    sampler = PlannedBatchSampler(VARIED, 400)
    state = sampler.state_dict()
    for wrong in ({}, {"version": 1}, state | {"version": 1}, None, 5, "state"):
        with pytest.raises(DataError, match=r"a state with version .*; wanted 3"):
            sampler.load_state_dict(wrong)
    for wrong in ({"batch": None}, {"epoch": -1}, {"seed": "3"}):
        with pytest.raises(DataError, match=r"a state in which .* is .*; wanted a whole number of at least 0"):
            sampler.load_state_dict(state | wrong)
    assert sampler.state_dict() == state
    sampler.load_state_dict(state | {"batch": 1000})
    with pytest.raises(DataError, match="stands after batch 1000, but this pass has only"):
        next(iter(sampler))


def test_over_size_samples():
    lengths = [5, 99, 3, 70, 4]
    with pytest.raises(DataError, match=r"sample 1 has length 99, which is over the budget of 64 by itself; raise"):
        PlannedBatchSampler(lengths, 64)
    dropping = PlannedBatchSampler(lengths, 64, oversize="drop")
    assert dropping.dropped == 2
    assert sorted(chain.from_iterable(dropping)) == [0, 2, 4]
    single = PlannedBatchSampler(lengths, 64, oversize="single", shuffle=False)
    assert list(single) == [[1], [3], [0, 4, 2]]
    assert single.dropped == 0
    rounded = PlannedBatchSampler(lengths, 64, oversize="single", shapes=1)
    assert rounded.padded_lengths.tolist() == [5, 99, 5, 70, 5]
    with pytest.raises(DataError, match="all 5 samples are over the budget of 2"):
        PlannedBatchSampler(lengths, 2, oversize="drop")


@pytest.mark.parametrize("budget", [2**70, 2**63 - 1])
def test_a_budget_beyond_64_bits_holds_everything(budget):
    assert list(PlannedBatchSampler([3, 9, 2], budget, shuffle=False)) == [[1, 0, 2]]
    assert list(PlannedBatchSampler([3, 9, 2], float("inf"), cost=quadratic, shuffle=False)) == [[1, 0, 2]]


def test_options_may_be_numbers_of_numpy():
    """The state could not be taken: JSON knows none of them."""
    ours = {"shuffle": False, "largest_first": True, "rank": 1, "world_size": 2, "seed": 3}
    theirs = {key: np.bool_(value) if isinstance(value, bool) else np.int64(value) for key, value in ours.items()}
    state = PlannedBatchSampler(VARIED, 400, **theirs).state_dict()
    assert json.loads(json.dumps(state)) == PlannedBatchSampler(VARIED, 400, **ours).state_dict()


@given(FEW, st.integers(1, 30), st.data())
def test_all_options_together_are_still_the_best(lengths, budget, data):
    options = {
        "cost": data.draw(st.sampled_from([None, quadratic, lambda n, longest: max(n * longest, 9)])),
        "oversize": data.draw(st.sampled_from(["drop", "single"])),
        "shapes": data.draw(st.sampled_from([None, 1, 2])),
        "max_samples": data.draw(st.sampled_from([None, 1, 3])),
        "spare_batches": data.draw(st.integers(0, 2)),
    }
    cost = options["cost"] or (lambda n, longest: n * longest)
    alone = {place for place, length in enumerate(lengths) if cost(1, length) > budget}
    kept = [place for place in range(len(lengths)) if place not in alone or options["oversize"] == "single"]
    if not kept:
        with pytest.raises(DataError, match="are over the budget"):
            PlannedBatchSampler(lengths, budget, **options)
        return
    calm = PlannedBatchSampler(lengths, budget, shuffle=False, **options)
    rounded = calm.padded_lengths.tolist()

    def fits(batch):
        over = len(batch) == 1 and batch[0] in alone
        largest = max(rounded[place] for place in batch)
        return over or (cost(len(batch), largest) <= budget and len(batch) <= (options["max_samples"] or 99))

    fitting = [batches for batches in partitions(kept) if all(map(fits, batches))]
    count = min(min(map(len, fitting)) + options["spare_batches"], len(kept))
    assert sorted(chain.from_iterable(calm)) == kept
    assert all(map(fits, calm))
    assert len(calm) == count
    if not options["shapes"]:
        assert padded(rounded, list(calm)) == min(padded(rounded, some) for some in fitting if len(some) == count)
    for drawn in (PlannedBatchSampler(lengths, budget, largest_first=True, seed=seed, **options) for seed in range(2)):
        batches = list(drawn)
        costs = [cost(len(batch), max(rounded[place] for place in batch)) for batch in batches]
        assert sorted(chain.from_iterable(batches)) == kept
        assert all(map(fits, batches))
        assert len(batches) == count
        assert costs[0] == max(costs)


def test_spare_batches_pad_less():
    shares = [
        padding_share(VARIED, PlannedBatchSampler(VARIED, 400, spare_batches=spare, shuffle=False)) for spare in (0, 4)
    ]
    assert shares[0] < padding_share(VARIED, TokenBudgetBatchSampler(VARIED, 400, shuffle=False))
    assert shares[1] < 0.7 * shares[0] < shares[0] < padding_share(VARIED, FixedBatchSampler(VARIED, 32)) / 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_dataloader_takes_it(workers):
    sampler = PlannedBatchSampler(VARIED, 400)
    loader = DataLoader(VARIED.tolist(), batch_sampler=sampler, collate_fn=list, num_workers=workers)
    assert len(loader) == len(sampler)
    whole = [VARIED[batch].tolist() for batch in sampler]
    assert list(loader) == whole
    # A loader with workers asks its sampler for two iterators and uses one: the first took the position away.
    seen = list(islice(loader, 4))
    sampler.load_state_dict(sampler.state_dict(consumed=4))
    assert seen + list(loader) == whole


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint32, np.int64])
def test_any_whole_number_type(kind):
    lengths = np.full(1000, 200, dtype=kind)
    assert len(PlannedBatchSampler(lengths, 100_000)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget is 0; wanted a whole number of at least 1"),
        ({"budget": 9.5}, "budget is 9.5"),
        ({"budget": 0, "cost": quadratic, "oversize": "single"}, "budget is 0; wanted a number above 0"),
        ({"budget": -1.5, "cost": quadratic}, "budget is -1.5"),
        ({"budget": float("nan"), "cost": quadratic, "oversize": "single"}, "budget is nan"),
        ({"budget": "30", "cost": quadratic}, "budget is '30'"),
        ({"cost": lambda n, longest: float("nan")}, r"cost\(1, 9\) gave nan; wanted a number of at least 0"),
        ({"cost": lambda n, longest: n - 5}, r"cost\(1, 9\) gave -4"),
        ({"max_samples": 0}, "max_samples is 0"),
        ({"shapes": 0}, "shapes is 0"),
        ({"oversize": "hide"}, "oversize is 'hide'; wanted one of raise, drop, single"),
        ({"spare_batches": -1}, "spare_batches is -1"),
        ({"world_size": 0}, "world_size is 0; wanted a whole number of at least 1"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2"),
        ({"cost": lambda n, longest: n * (20 - longest)}, "wanted a cost that does not fall as samples get longer"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        PlannedBatchSampler([1, 2, 9], **({"budget": 30} | options))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "wanted one length"),
        ([1.5], "float64"),
        ([0], "at least 1"),
        ([2**62, 2**62, 1], "3 lengths up to 4611686018427387904; wanted a padded sum below 2"),
    ],
)
def test_bad_lengths(lengths, message):
    with pytest.raises(DataError, match=message):
        PlannedBatchSampler(lengths, 10)


@pytest.mark.parametrize("longest", [512, 2000])
def test_a_million_lengths_are_planned_in_a_second(longest):
    lengths = np.random.default_rng(0).integers(1, longest, 1_000_000)
    begin = time.process_time()
    sampler = PlannedBatchSampler(lengths, 16_384)
    next(iter(sampler))
    # It takes a quarter of a second; the rest is for machines that are busy.
    assert time.process_time() - begin < 1.5


@pytest.mark.data
def test_wikitext_2_needs_129_batches_and_little_padding(real_data):
    with gzip.open(real_data / "wikitext-2" / "train.txt.gz", "rt", encoding="utf-8") as lines:
        lengths = [min(len(line.split()), 512) for line in lines if len(line.strip()) > 2]
    assert len(lengths) == 23_731
    for shuffle in (False, True):
        sampler = PlannedBatchSampler(lengths, 16_384, shuffle=shuffle)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            assert len(sampler) <= 129
            assert padding_share(lengths, sampler) < 0.018
