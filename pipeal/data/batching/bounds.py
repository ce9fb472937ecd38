"""The best lengths to pad to: thresholds between groups, and bounds to round up to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from pipeal.core.errors import ConfigError, DataError
from pipeal.data.batching.partitions import least_total, most_balanced
from pipeal.data.batching.samplers import Lengths

__all__ = ["find_thresholds", "length_bounds", "round_up"]

CostFn: TypeAlias = Callable[[int], float]
Objective: TypeAlias = Literal["total", "balanced"]
Counted: TypeAlias = tuple[Lengths, Sequence[float] | npt.NDArray[np.generic]]
"""Distinct or repeated lengths, and how often (or with which weight) each of them occurs."""

_Ints: TypeAlias = npt.NDArray[np.int64]
_Floats: TypeAlias = npt.NDArray[np.float64]


def find_thresholds(
    lengths: Lengths | Counted,
    cost_fn: CostFn,
    k: int,
    *,
    objective: Objective = "total",
    num_trials: int | None = None,  # noqa: ARG001  searches by trial take it, so callers pass it
) -> list[int]:
    """The ``k`` lengths that best split the samples into ``k + 1`` groups, each padded to its longest sample.

    Group ``j`` holds the lengths above ``thresholds[j - 1]`` up to and including ``thresholds[j]``; the last group
    holds all above the last threshold. The result is exact, and the same on every call.

    Args:
        lengths: ``(N,)`` whole numbers, at least 1 each; or a tuple ``(values, counts)``, where the counts may be
            any weights of at least 0.
        cost_fn: What one sample costs once it is padded to a length: ``lambda n: n`` for linear layers,
            ``lambda n: n * n`` for attention. Called once for each distinct length; finite, at least 0.
        k: How many thresholds, from 1 to the number of distinct lengths. With as many as there are distinct
            lengths, every one of them is a threshold, and no sample seen here lies above the last.
        objective: ``total`` makes the groups' summed cost least: O(k·m log m) for m distinct lengths and a cost that
            does not fall with the length, else O(k·m²). ``balanced`` makes the largest difference in cost
            between neighbouring groups least, for groups that run side by side; up to O(k·m³), far less where
            a well-balanced split exists.
        num_trials: Not used: it is how often a search with random restarts would start.

    Raises:
        DataError: No samples; lengths that are not whole numbers of at least 1; counts that do not fit them.
        ConfigError: ``k`` out of range, an unknown objective, or a cost that is not a finite number of at least 0.

    >>> find_thresholds([1, 1, 1, 1, 4, 4, 16, 64], lambda n: n, 2)
    [4, 16]
    >>> find_thresholds(([1, 4, 16, 64], [64, 16, 4, 1]), lambda n: n, 3, objective="balanced")
    [1, 4, 16]
    """
    values, weights = counted(lengths)
    if objective not in get_args(Objective):
        raise ConfigError(f"objective is {objective!r}; wanted one of {', '.join(get_args(Objective))}")
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= len(values):
        raise ConfigError(
            f"k is {k!r}; wanted a whole number from 1 to the number of distinct lengths, which is {len(values)}"
        )
    if k == len(values):
        return [int(value) for value in values]
    costs = _costs(cost_fn, values)
    cut = least_total if objective == "total" else most_balanced
    return [int(values[end - 1]) for end in cut(costs, np.cumsum(np.concatenate(([0.0], weights))), int(k) + 1)]


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
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise ConfigError(f"{k!r} bounds; wanted a whole number of at least 1")
    if k >= len(values):
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
    found = _whole(np.asarray(lengths)) if len(lengths) else np.zeros(0, dtype=np.int64)
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
    rising = _whole(found)
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
    values = np.asarray(lengths)
    if values.ndim != 1 or not values.size:
        raise DataError(f"lengths of shape {values.shape}; wanted one length for each of at least 1 sample")
    values = _whole(values)
    shortest = int(np.argmin(values))
    if values[shortest] < 1:
        raise DataError(f"sample {shortest} has length {values[shortest]}; wanted at least 1")
    if weights is not None:
        if weights.shape != values.shape or not np.isfinite(weights).all() or (weights < 0).any():
            raise DataError(
                f"counts of shape {weights.shape} for lengths of shape {values.shape}; "
                "wanted one finite count of at least 0 for each length"
            )
        values, weights = values[weights > 0], weights[weights > 0]
        if not values.size:
            raise DataError("all counts are 0; wanted at least 1 sample")
    if values.max() <= 4 * len(values) + 1024:
        # Counting needs no sort, and lengths are small numbers as a rule.
        sums = np.bincount(values, weights)
        distinct = np.flatnonzero(sums)
        return distinct.astype(np.int64), sums[distinct].astype(np.float64)
    distinct, which = np.unique(values, return_inverse=True)
    return distinct, np.bincount(which, weights).astype(np.float64)


def _whole(found: npt.NDArray[np.generic]) -> _Ints:
    if not np.issubdtype(found.dtype, np.integer):
        raise DataError(f"lengths of type {found.dtype}; wanted whole numbers")
    if found.dtype == np.uint64 and found.max() > np.iinfo(np.int64).max:
        raise DataError(f"lengths up to {found.max()}; wanted whole numbers below 2**63")
    return found.astype(np.int64)


def _costs(cost_fn: CostFn, values: _Ints) -> _Floats:
    """``(m,)``: called with one whole number at a time, so any function of a length will do."""
    costs = np.empty(len(values))
    for place, value in enumerate(values.tolist()):
        cost = float(cost_fn(value))
        if not math.isfinite(cost) or cost < 0:
            raise ConfigError(f"cost_fn({value}) is {cost}; wanted a finite number of at least 0")
        costs[place] = cost
    return costs
