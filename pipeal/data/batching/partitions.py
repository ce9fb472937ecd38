"""The exact dynamic program that cuts distinct lengths into neighbouring groups.

With the distinct lengths ``x_1 < … < x_m``, their weights summed up to ``W_j`` and the cost ``c`` of one sample of a
length, a group that holds the lengths after ``x_i`` up to ``x_j`` costs ``w(i, j) = c(x_j) · (W_j − W_i)``: all its
samples are padded to ``x_j``. For ``i < i'`` and ``j < j'``

    w(i, j) + w(i', j') − w(i, j') − w(i', j) = (c(x_j') − c(x_j)) · (W_i − W_i')

which is at most 0 where ``c`` does not fall: the quadrangle inequality (F. Yao, STOC 1980). Then the best last cut of
the prefix up to ``j`` moves only to the right as ``j`` grows, and the cuts of a layer are found by divide and conquer
in O(m log m) instead of O(m²).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Ints: TypeAlias = npt.NDArray[np.int64]
_Floats: TypeAlias = npt.NDArray[np.float64]
_Layer: TypeAlias = tuple[_Ints, _Floats]

_BLOCK = 1 << 20
"""How many sums are compared at a time: bounds the memory of costs that fall, whose layers take O(m²)."""


def least_total(costs: _Floats, sums: _Floats, groups: int) -> list[int]:
    """The cuts of least summed cost.

    Args:
        costs: ``(m,)``: ``c(x_1) … c(x_m)``.
        sums: ``(m + 1,)``: ``W_0 = 0 … W_m``.
        groups: From 2 to m.

    Returns:
        The ``groups - 1`` inner cuts, rising: how many distinct lengths lie before each.
    """
    # Layer g holds, for every end j, the least cost of the first j lengths in g groups.
    m = len(costs)
    ends = np.arange(1, m - groups + 2)
    best = np.full(m + 1, np.inf)
    best[ends] = costs[ends - 1] * sums[ends]
    layer = _monotone_layer if (np.diff(costs) >= 0).all() else _dense_layer
    cuts = []
    for group in range(2, groups + 1):
        # Each group needs a length of its own: so many ends lie before it, so many behind.
        ends = np.arange(group, m - groups + group + 1) if group < groups else np.array([m])
        chosen, least = layer(best, sums, costs[ends - 1], group - 1, ends)
        best = np.full(m + 1, np.inf)
        best[ends] = least + costs[ends - 1] * sums[ends]
        cuts.append((int(ends[0]), chosen))
    end, inner = m, []
    for first, chosen in reversed(cuts):
        end = int(chosen[end - first])
        inner.append(end)
    return inner[::-1]


def _monotone_layer(best: _Floats, sums: _Floats, costs: _Floats, least_cut: int, ends: _Ints) -> _Layer:
    """For each end the first best cut below it, where best cuts rise with the ends: coarse ends first, then between.

    All ends of one level are searched at once: their ranges overlap at their borders only.
    """
    count = len(ends)
    # Slots 0 and beyond ``count`` stand for the outermost cuts: end ``p`` is slot ``p + 1``.
    chosen = np.full(count + 2, ends[-1] - 1)
    chosen[0] = least_cut
    least = np.empty(count)
    stride = 1 << (count.bit_length() - 1)
    while stride:
        slots = np.arange(stride, count + 1, 2 * stride)
        low = chosen[slots - stride]
        high = np.minimum(chosen[np.minimum(slots + stride, count + 1)], ends[slots - 1] - 1)
        chosen[slots], least[slots - 1] = _best_in(best, sums, costs[slots - 1], low, high)
        stride //= 2
    return chosen[1:-1], least


def _dense_layer(best: _Floats, sums: _Floats, costs: _Floats, least_cut: int, ends: _Ints) -> _Layer:
    """The same without the quadrangle inequality: every cut below every end is tried."""
    low = np.full(len(ends), least_cut)
    parts = np.array_split(np.arange(len(ends)), max(1, len(ends) * len(sums) // _BLOCK))
    found = [_best_in(best, sums, costs[part], low[part], ends[part] - 1) for part in parts if part.size]
    return np.concatenate([chosen for chosen, _ in found]), np.concatenate([least for _, least in found])


def _best_in(best: _Floats, sums: _Floats, costs: _Floats, low: _Ints, high: _Ints) -> _Layer:
    """For each cost the first ``i`` in ``low..high`` where ``best[i] - cost · sums[i]`` is least, and that value."""
    sizes = high - low + 1
    begins = np.cumsum(sizes) - sizes
    i = np.arange(int(sizes.sum())) + np.repeat(low - begins, sizes)
    tried = best[i] - np.repeat(costs, sizes) * sums[i]
    least = np.minimum.reduceat(tried, begins)
    hits = np.flatnonzero(tried == np.repeat(least, sizes))
    return i[hits[np.searchsorted(hits, begins)]], least
