"""Where to cut samples, sorted from the longest to the shortest, into batches: as few as can be, then least padding.

Batches that are contiguous in that order are enough: swapping samples until they are so makes no batch longer, and
none bigger. A batch that begins at sample ``i`` ends at ``i + fits[i]`` at the latest, where ``fits`` does not fall
along the order (shorter samples, more of them). So taking as many as fit, longest first, leaves the fewest batches,
and cut ``b`` of any plan lies between what the batches behind it can still hold and what those before it can reach.

Within a run of equal lengths an earlier cut never pads more: the sample it hands to the next batch is padded to its
own length there. So some plan of least padding has every cut either at the first sample of a run, or as early as the
next batch can hold. That leaves few places, and the dynamic program over them is exact.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Ints: TypeAlias = npt.NDArray[np.int64]

_BAND = 1 / 6
"""How far a cut may stray from its drawn place to save padding, as a share of all its places."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Where each cut may lie, both places included, and one plan that keeps to it.

    Attributes:
        low: ``(B + 1,)``, rising.
        high: ``(B + 1,)``, rising.
        plan: ``(B + 1,)``: cuts within the windows that fit; equal neighbours are empty batches.
    """

    low: list[int]
    high: list[int]
    plan: list[int]


@dataclass(frozen=True, eq=False)
class SortedSamples:
    """Samples from the longest to the shortest.

    Attributes:
        lengths: ``(N,)``, falling: what a batch that begins there is padded to.
        fits: ``(N,)``, not falling, at least 1: how many samples a batch that begins there can hold.
    """

    lengths: _Ints
    fits: _Ints

    def fewest(self) -> int:
        """How many batches there are if each takes as many samples as fit, longest first: no plan has fewer."""
        reach, end, batches = self._reach.tolist(), 0, 0
        while end < len(self.lengths):
            end, batches = reach[end], batches + 1
        return batches

    def windows(self, batches: int) -> Windows:
        """Every place of every cut in a plan with at most so many batches.

        Args:
            batches: At least the fewest.
        """
        n, reach, earliest = len(self.lengths), self._reach, self._earliest
        low, high = [n], [0]
        for _ in range(batches):
            low.append(int(earliest[low[-1]]))
            high.append(int(reach[high[-1]]))
        return Windows(low[::-1], high, high)

    def drawn(self, windows: Windows, random: np.random.Generator) -> Windows:
        """Narrower windows around an offset that is drawn once and moves all cuts alike.

        Batches are full but for what all of them together leave over. The offset decides how much of that is left
        over before each cut: nothing at 1, all of it at 0.
        """
        share = float(random.random())
        low, high, plan = [0], [0], [0]
        reach = self._reach
        for least, most in zip(windows.low[1:], windows.high[1:], strict=True):
            wanted = least + int(share * (most - least + 1))
            band = int(_BAND * (most - least))
            plan.append(max(least, min(wanted, int(reach[plan[-1]]))))
            low.append(max(least, min(plan[-1], wanted - band)))
            high.append(min(most, wanted + band))
        return Windows(low, high, plan)

    def least_padding(self, windows: Windows, batches: int) -> _Ints:
        """The cuts that pad least within the windows: ``(batches + 1,)``, from 0 to ``N``.

        Args:
            windows: One window more than there are batches.
            batches: No more than ``N``.
        """
        # Nothing more was to be gained by cutting, so any cut will do: no cut makes padding.
        return _halved(self._least(windows), batches)

    @staticmethod
    def full(windows: Windows, batches: int) -> _Ints:
        """The cuts of batches that hold all that fits, longest first, but for the last; arguments and result are those
        of :meth:`least_padding`. Of few different lengths, these batches are of few shapes."""
        return _halved(np.unique(windows.high), batches)

    def _least(self, windows: Windows) -> _Ints:
        """From the last cut to the first: the least padded sum behind each place, and the next cut that gives it.

        Neighbouring cuts whose windows lie in one run are not told apart: any batches between them are padded to the
        length of that run, so ``count`` batches count as one that is as many times as big. What is left is a few cuts
        for each run, however many batches there are.
        """
        n, reach, earliest = len(self.lengths), self._reach, self._earliest
        lengths, fits = np.append(self.lengths, 0), np.append(self.fits, 0)
        runs = np.flatnonzero(np.diff(lengths, prepend=-1))
        starts = runs.tolist()
        kept = self._kept(windows, runs)
        places, sums = np.array([n]), np.zeros(1, dtype=np.int64)
        trail = []
        for b, count in zip(kept[-2::-1], np.diff(kept)[::-1].tolist(), strict=True):
            low, high, planned = windows.low[b], windows.high[b], windows.plan[b]
            chained = earliest[places] if count == 1 else places - count * fits[low]
            in_window = runs[bisect_left(starts, low) : bisect_right(starts, high)]
            before = np.unique(np.concatenate((chained, in_window, (low, planned))))
            before = before[np.searchsorted(before, low) : np.searchsorted(before, high, side="right")]
            latest = reach[before] if count == 1 else before + count * fits[low]
            begins = np.searchsorted(places, before)
            sizes = np.searchsorted(places, latest, side="right") - begins
            if not sizes.all():
                before, begins, sizes = before[sizes > 0], begins[sizes > 0], sizes[sizes > 0]
            flat = np.cumsum(sizes) - sizes
            after = np.arange(int(sizes.sum())) + np.repeat(begins - flat, sizes)
            tried = places[after] * np.repeat(lengths[before], sizes) + sums[after]
            least = np.minimum.reduceat(tried, flat)
            hits = np.flatnonzero(tried == np.repeat(least, sizes))
            trail.append((places, after[hits[np.searchsorted(hits, flat)]], count))
            places, sums = before, least - before * lengths[before]
        state, cuts = 0, [0]
        for after_places, best, count in reversed(trail):
            begin, state = cuts[-1], int(best[state])
            end, most = int(after_places[state]), int(fits[begin])
            cuts.extend(max(begin, end - left * most) for left in range(count - 1, -1, -1))
        # Two cuts at one place are a batch that was not needed.
        return np.array([0, *(end for begin, end in pairwise(cuts) if end > begin)])

    @staticmethod
    def _kept(windows: Windows, runs: _Ints) -> list[int]:
        """The numbers of the cuts to choose: those whose window is in the same run as the one before's go with it."""
        first, last = (np.searchsorted(runs, side, side="right") for side in (windows.low, windows.high))
        goes_with = (first[1:] == last[1:]) & (first[:-1] == last[:-1]) & (first[1:] == first[:-1])
        kept: list[int] = np.flatnonzero(np.append(True, ~goes_with)).tolist()
        return kept

    @cached_property
    def _reach(self) -> _Ints:
        """``(N + 1,)``: where a batch that begins there ends at the latest; at ``N`` nothing is left to take."""
        n = len(self.lengths)
        return np.append(np.minimum(np.arange(n) + np.minimum(self.fits, n), n), n)

    @cached_property
    def _earliest(self) -> _Ints:
        """``(N + 1,)``: where a batch with that end begins at the earliest: so many begin too early for it."""
        ends = np.bincount(self._reach[:-1], minlength=len(self._reach))
        return np.cumsum(ends) - ends


def _halved(cuts: _Ints, batches: int) -> _Ints:
    """Halves the largest batch until there are enough batches."""
    while len(cuts) <= batches:
        sizes = np.diff(cuts)
        biggest = int(sizes.argmax())
        cuts = np.insert(cuts, biggest + 1, cuts[biggest] + sizes[biggest] // 2)
    return cuts
