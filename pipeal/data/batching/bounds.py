"""The best lengths to pad to: thresholds between groups, and bounds to round up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeal.core.errors import ConfigError, DataError
from pipeal.data.batching.partitions import least_total
from pipeal.data.batching.samplers import Lengths, checked_lengths, whole_numbers
from pipeal.data.checks import at_least

__all__ = ["find_thresholds", "length_bounds", "round_up"]

CostFn: TypeAlias = Callable[[int], float]
Counted: TypeAlias = tuple[Lengths, Sequence[float] | npt.NDArray[np.generic]]
"""Distinct or repeated lengths, and how often (or with which weight) each of them occurs."""

_Ints: TypeAlias = npt.NDArray[np.int64]
_Floats: TypeAlias = npt.NDArray[np.float64]


def find_thresholds(
    lengths: Lengths | Counted,
    cost_fn: CostFn,
    k: int,
    num_trials: int | None = None,  # noqa: ARG001  searches by trial take it, so callers pass it
) -> list[int]:
    """The ``k`` lengths that best split the samples into ``k + 1`` groups, each padded to its longest sample.

    Group ``j`` holds the lengths above ``thresholds[j - 1]`` up to and including ``thresholds[j]``; the last group
    holds all above the last threshold. The groups' summed cost is the least there is, and the result the same on every
    call; O(k·m log m) for m distinct lengths and a cost that does not fall with the length, else O(k·m²).

    Args:
        lengths: ``(N,)`` whole numbers, at least 1 each; or a tuple ``(values, counts)``, where the counts may be
            any weights of at least 0.
        cost_fn: What one sample costs once it is padded to a length: ``lambda n: n`` for linear layers,
            ``lambda n: n * n`` for attention. Called once for each distinct length; finite, at least 0.
        k: How many thresholds, from 1 to the number of distinct lengths. With as many as there are distinct
            lengths, every one of them is a threshold, and no sample seen here lies above the last.
        num_trials: Not used: it is how often a search with random restarts would start.

    Raises:
        DataError: No samples; lengths that are not whole numbers of at least 1; counts that do not fit them.
        ConfigError: ``k`` out of range, or a cost that is not a finite number of at least 0.

    >>> find_thresholds([1, 1, 1, 1, 4, 4, 16, 64], lambda n: n, 2)
    [4, 16]
    >>> find_thresholds(([1, 4, 16, 64], [64, 16, 4, 1]), lambda n: n, 3)
    [1, 4, 16]
    """
    values, weights = counted(lengths)
    if at_least("k", k, 1) > len(values):
        raise ConfigError(f"k is {k}; wanted at most the number of distinct lengths, which is {len(values)}")
    if k == len(values):
        return [int(value) for value in values]
    costs, sums = _costs(cost_fn, values), np.cumsum(np.concatenate(([0.0], weights)))
    return [int(values[end - 1]) for end in least_total(costs, sums, int(k) + 1)]


def length_bounds(lengths: Lengths | Counted, k: int, cost_fn: CostFn | None = None) -> _Ints:
    """At most ``k`` lengths to round all lengths up to, so that the rounded samples cost least in total.

    The last bound is the longest length. With ``k`` at or above the number of distinct lengths nothing is rounded.

    Args:
        lengths: As for :func:`find_thresholds`.
        k: At least 1.
        cost_fn: As for :func:`find_thresholds`; by default the length itself, for the least padding.

    Raises:
        DataError: Bad lengths.
        ConfigError: ``k`` below 1, or a bad cost.

    >>> length_bounds([1, 1, 1, 1, 4, 4, 16, 64], 3)
    array([ 4, 16, 64])
    """
    values, weights = counted(lengths)
    if at_least("k", k, 1) >= len(values):
        return values
    if k == 1:
        return values[-1:]
    below = find_thresholds((values, weights), cost_fn or float, int(k) - 1)
    return np.array([*below, int(values[-1])], dtype=np.int64)


def round_up(lengths: Lengths, bounds: Lengths) -> _Ints:
    """Each length's bound: the least one that is not below it.

    Args:
        lengths: ``(N,)`` whole numbers.
        bounds: ``(K,)`` whole numbers, rising.

    Raises:
        DataError: Bounds that do not rise, lengths that are not whole numbers, or one above the last bound.

    >>> round_up([1, 5, 4], [4, 8])
    array([4, 8, 4])
    """
    rising = checked_bounds(bounds)
    found = whole_numbers(np.asarray(lengths)) if len(lengths) else np.zeros(0, dtype=np.int64)
    above = np.flatnonzero(found > rising[-1])
    if above.size:
        raise DataError(
            f"sample {above[0]} has length {found[above[0]]}, above the last bound {rising[-1]}; "
            "add a bound for it, or cut the samples (max_len)"
        )
    return rising[np.searchsorted(rising, found)]


def checked_bounds(bounds: Lengths) -> _Ints:
    """The bounds as an array.

    They are not sorted for the caller: what made bounds that do not rise has made a mistake. Only
    :class:`pipeal.data.batching.bucket.BucketBatchSampler` sorts, as the document says that it follows.

    Raises:
        DataError: No bounds, bounds that are not whole numbers of at least 1, or ones that do not rise.
    """
    found = np.asarray(bounds)
    if found.ndim != 1 or not found.size or not np.issubdtype(found.dtype, np.integer):
        raise DataError(f"bounds of shape {found.shape} and type {found.dtype}; wanted at least 1 whole number")
    rising = whole_numbers(found)
    if rising[0] < 1 or (np.diff(rising) <= 0).any():
        raise DataError(f"bounds {found.tolist()}; wanted whole numbers of at least 1, each above the one before it")
    return rising


def counted(lengths: Lengths | Counted) -> tuple[_Ints, _Floats]:
    """The distinct lengths, rising, and how often each occurs.

    Args:
        lengths: As for :func:`find_thresholds`. Values of weight 0 do not occur.

    Raises:
        DataError: No samples; lengths that are not whole numbers of at least 1; counts that do not fit them.

    >>> counted(([7, 3, 7], [1, 2, 0.5]))
    (array([3, 7]), array([2. , 1.5]))
    """
    weights: _Floats | None = None
    if isinstance(lengths, tuple) and len(lengths) == 2 and not isinstance(lengths[0], (int, np.integer)):
        lengths, counts = lengths
        weights = np.asarray(counts, dtype=np.float64)
    values = checked_lengths(lengths)
    if weights is not None:
        if weights.shape != values.shape or not np.isfinite(weights).all() or (weights < 0).any():
            raise DataError(
                f"counts of shape {weights.shape} for lengths of shape {values.shape}; "
                "wanted one finite count of at least 0 for each length"
            )
        values, weights = values[weights > 0], weights[weights > 0]
        if not values.size:
            raise DataError("all counts are 0; wanted at least 1 sample")
    distinct, which = np.unique(values, return_inverse=True)
    return distinct, np.bincount(which, weights).astype(np.float64)


def _costs(cost_fn: CostFn, values: _Ints) -> _Floats:
    """``(m,)``: called with one whole number at a time, so any function of a length will do."""
    costs = np.array([float(cost_fn(value)) for value in values.tolist()])
    bad = ~(np.isfinite(costs) & (costs >= 0))
    if bad.any():
        first = int(np.argmax(bad))
        raise ConfigError(f"cost_fn({values[first]}) is {costs[first]}; wanted a finite number of at least 0")
    return costs
