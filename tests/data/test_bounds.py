"""Thresholds and bounds are the best there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal.core.errors import ConfigError, DataError
from pipeal.data.batching import partitions
from pipeal.data.batching.bounds import counted, find_thresholds, length_bounds, round_up

LENGTHS = st.lists(st.integers(1, 14), min_size=2, max_size=40).filter(lambda lengths: len(set(lengths)) > 1)
COSTS = {
    "linear": lambda n: n,
    "quadratic": lambda n: n * n,
    "mixed": lambda n: 3 + n + 0.25 * n * n,
    "constant": lambda n: 2,
    "falling": lambda n: 10 / n,
    "up and down": lambda n: n * 7 % 5,
    "not for arrays": lambda n: n if n > 5 else 5,
}
each_cost = pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())


def group_costs(lengths, cost, thresholds):
    edges = [0, *thresholds, max(lengths)]
    return [cost(high) * sum(low < n <= high for n in lengths) for low, high in pairwise(edges)]


@each_cost
@given(LENGTHS, st.data())
def test_the_total_is_the_least_of_all_choices(cost, lengths, data):
    distinct = sorted(set(lengths))
    k = data.draw(st.integers(1, len(distinct) - 1))
    found = find_thresholds(lengths, cost, k)
    assert len(found) == k
    assert found == sorted(set(found))
    assert set(found) <= set(distinct[:-1])
    best = min(sum(group_costs(lengths, cost, some)) for some in combinations(distinct[:-1], k))
    assert sum(group_costs(lengths, cost, found)) == pytest.approx(best)


def test_the_demo_of_batch_grouping():
    lengths = [1] * 720 + [4] * 190 + [16] * 90 + [64] * 24
    assert find_thresholds(lengths, cost_fn=lambda x: x, k=3, num_trials=100) == [1, 4, 16]


@given(LENGTHS, st.data())
def test_counts_stand_for_repetition_in_any_order(lengths, data):
    k = data.draw(st.integers(1, len(set(lengths)) - 1))
    values, counts = np.unique(lengths, return_counts=True)
    wanted = find_thresholds(lengths, lambda n: n, k)
    assert find_thresholds((values, counts), lambda n: n, k) == wanted
    assert find_thresholds((values[::-1], counts[::-1] / 2), lambda n: n, k) == wanted
    assert find_thresholds(lengths[::-1], lambda n: n, k) == wanted


def test_far_lengths_are_counted_without_a_table():
    assert find_thresholds([1, 10**12, 10**12, 1], lambda n: n, 1) == [1]
    values, weights = counted(([10**12, 5, 10**12, 7], [1, 2, 3, 0]))
    assert (values.tolist(), weights.tolist()) == ([5, 10**12], [2, 4])


@given(LENGTHS, st.integers(1, 20))
def test_bounds_round_up_with_the_least_padding(lengths, k):
    distinct = sorted(set(lengths))
    bounds = length_bounds(lengths, k)
    assert len(bounds) == min(k, len(distinct))
    assert bounds[-1] == distinct[-1]
    rounded = round_up(lengths, bounds)
    assert set(rounded.tolist()) <= set(bounds.tolist())
    assert all(n <= up and not any(n <= bound < up for bound in bounds) for n, up in zip(lengths, rounded, strict=True))
    best = min(round_up(lengths, [*some, distinct[-1]]).sum() for some in combinations(distinct[:-1], len(bounds) - 1))
    assert rounded.sum() == best


def test_divide_and_conquer_finds_what_trying_every_cut_finds(monkeypatch):
    lengths = np.random.default_rng(0).lognormal(4, 0.8, 20_000).astype(np.int64) + 1
    values, counts = np.unique(lengths, return_counts=True)
    quick = find_thresholds((values, counts), lambda n: n * n, 40)
    monkeypatch.setattr(partitions, "_monotone_layer", partitions._dense_layer)
    monkeypatch.setattr(partitions, "_BLOCK", 1000)
    assert find_thresholds((values, counts), lambda n: n * n, 40) == quick


def test_sixty_four_thresholds_over_a_million_lengths():
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 0.8, 1_000_000).astype(np.int64) + 1, 4096)
    assert len(find_thresholds(counted(lengths), lambda n: n, 64)) == 64


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], r"lengths of shape \(0,\); wanted one length"),
        ([[1, 2]], r"lengths of shape \(1, 2\)"),
        ([1.5, 2], "lengths of type float64; wanted whole numbers"),
        ([3, 0], "sample 1 has length 0; wanted at least 1"),
        (np.array([3, 2**63], dtype=np.uint64), "lengths up to 9223372036854775808; wanted whole numbers below 2"),
        (([1, 2], [1]), r"counts of shape \(1,\) for lengths of shape \(2,\)"),
        (([1, 2], [1, -1]), "wanted one finite count of at least 0"),
        (([1, 2], [1, float("nan")]), "wanted one finite count of at least 0"),
        (([1, 2], [0, 0]), "all counts are 0"),
    ],
)
def test_bad_lengths(lengths, message):
    with pytest.raises(DataError, match=message):
        find_thresholds(lengths, lambda n: n, 1)
    with pytest.raises(DataError, match=message):
        length_bounds(lengths, 1)


@pytest.mark.parametrize("k", [0, -1, 4, 2.0, True])
def test_k_is_between_one_and_the_number_of_distinct_lengths(k):
    with pytest.raises(ConfigError, match=rf"k is {k}; wanted (a whole number of at least 1|at most .*, which is 3)"):
        find_thresholds([1, 2, 2, 3], lambda n: n, k)
    assert find_thresholds([1, 2, 2, 3], lambda n: n, 3) == [1, 2, 3]


def test_other_bad_input():
    for cost in (-1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"cost_fn\(1\) is .*; wanted a finite number"):
            find_thresholds([1, 2], lambda n, cost=cost: cost, 1)
    with pytest.raises(ConfigError, match="k is 0; wanted"):
        length_bounds([1], 0)
    for bounds in ([], [2.5], [[1]]):
        with pytest.raises(DataError, match="wanted at least 1 whole number"):
            round_up([1], bounds)
    with pytest.raises(DataError, match="lengths of type float64; wanted whole numbers"):
        round_up([1.5], [4])  # was cut to 1
    for far in ((np.array([2**63], dtype=np.uint64), [4]), ([1], np.array([2**63], dtype=np.uint64))):
        with pytest.raises(DataError, match="lengths up to 9223372036854775808; wanted whole numbers below 2"):
            round_up(*far)  # was taken for a negative one
    assert round_up([], [4]).tolist() == []
    for bounds in ([2, 1], [1, 1], [0, 1]):
        with pytest.raises(DataError, match="each above the one before it"):
            round_up([1], bounds)
    with pytest.raises(DataError, match="sample 1 has length 9, above the last bound 8"):
        round_up([1, 9], [4, 8])
