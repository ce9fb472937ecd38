"""The fewest batches that a budget allows, and the least padding in them, with all lengths known: the kind ``plan``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pipeal.core.errors import DataError
from pipeal.data.batching.bounds import length_bounds, round_up
from pipeal.data.batching.budget import BatchCost, fitting
from pipeal.data.batching.cuts import SortedSamples
from pipeal.data.batching.packing import Oversize
from pipeal.data.batching.ranks import steps_of
from pipeal.data.batching.samplers import EpochSampler, Known, Lengths, Plan
from pipeal.data.checks import at_least, one_of

__all__ = ["PlannedBatchSampler"]

_Ints: TypeAlias = npt.NDArray[np.int64]


class PlannedBatchSampler(EpochSampler):
    """The fewest batches that fit a budget, with the least padding at that number; exact and resumable.

    Without shuffling, the plan is the same in every epoch: the fewest batches, and (without ``shapes``) no other plan
    with so many has less padding. With it three things are drawn again for every epoch: the order of equal lengths, the
    order of the batches and, without ``shapes``, an offset of all cuts within the room that the fewest batches leave
    (least padding is then sought near that offset).

    On several ranks the number of batches is rounded up to a multiple of the world size, by cutting smaller ones. Only
    where there are fewer samples than that, some are given to two ranks (:attr:`repeated`).

    Args:
        lengths: ``(N,)`` whole numbers, at least 1 each.
        budget: The most that a batch may cost: padded tokens, ``n × longest``, or what ``cost`` counts.
        cost: ``cost(n, longest)``, which falls with neither. Called a few times for each distinct length.
        max_samples: The most samples in a batch.
        shapes: Round lengths up to at most so many bounds, for kernels that are compiled for each shape; see
            :attr:`padded_lengths` and :func:`pipeal.data.batching.bounds.length_bounds`. Batches are then of the same
            shapes in every epoch, and as full as the budget allows: one shape for each bound, and one of what is left
            over (more with ``spare_batches``, which pad less, with a ``world_size`` that takes some batches more, and
            with over-size samples, each of its own length). Only which samples of a bound share a batch is drawn again.
        oversize: What to do with samples that cost more than the budget by themselves: ``raise`` an error, ``drop``
            them (:attr:`dropped`), or make each a ``single`` batch over the budget.
        spare_batches: So many batches more than the fewest: less padding, and more room for an offset.
        largest_first: Begin with the batches (one for each rank) that cost most: what does not fit into memory then
            fails at once.
        shuffle: See above.
        seed: At least 0.
        rank: From 0 to ``world_size - 1``.
        world_size: At least 1.

    Attributes:
        padded_lengths: ``(N,)`` int64: a batch is to be padded to the largest of these among its samples.
        dropped: How many over-size samples no batch has.

    Raises:
        DataError: Bad lengths, an over-size sample under ``raise``, or nothing left under ``drop``.
        ConfigError: An option out of range, or a cost that falls where it should not.

    >>> list(PlannedBatchSampler([3, 9, 2, 8], budget=16, shuffle=False))
    [[1], [3], [0, 2]]
    """

    def __init__(
        self,
        lengths: Lengths,
        budget: float,
        *,
        cost: BatchCost | None = None,
        max_samples: int | None = None,
        shapes: int | None = None,
        oversize: Oversize = "raise",
        spare_batches: int = 0,
        largest_first: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(
            lengths, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size, largest_first=largest_first
        )
        if int(self.lengths.max()) * len(self.lengths) > np.iinfo(np.int64).max:
            raise DataError(f"{len(self.lengths)} lengths up to {self.lengths.max()}; wanted a padded sum below 2**63")
        self.budget = budget if cost is not None else at_least("budget", budget, 1)
        self.cost = cost
        self.max_samples = None if max_samples is None else at_least("max_samples", max_samples, 1)
        self.shapes = None if shapes is None else at_least("shapes", shapes, 1)
        self.oversize: Oversize = one_of("oversize", oversize, Oversize)
        self.spare_batches = at_least("spare_batches", spare_batches, 0)
        self._fit_to_budget()

    def _fit_to_budget(self) -> None:
        """What the lengths and the budget decide for all epochs."""
        # Lengths are far fewer than samples: everything that is costly is done once for each.
        distinct, which = np.unique(self.lengths, return_inverse=True)
        fits = fitting(distinct, self.budget, self.cost, min(self.max_samples or len(which), len(which)))
        alone = fits == 0
        if alone.any() and self.oversize == "raise":
            longest = int(np.argmax(self.lengths))
            raise DataError(
                f"sample {longest} has length {self.lengths[longest]}, which is over the budget of {self.budget:g} by "
                "itself; raise the budget, cut the samples (max_len), or choose oversize drop or single"
            )
        if alone.all() and self.oversize == "drop":
            raise DataError(f"all {len(which)} samples are over the budget of {self.budget:g}; raise the budget")
        padded = distinct.copy()
        if self.shapes is not None and not alone.all():
            counts = np.bincount(which)
            bounds = length_bounds((distinct[~alone], counts[~alone]), self.shapes)
            padded[~alone] = round_up(distinct[~alone], bounds)
            # A bound is itself a length, so what is rounded up to it fits as often as it does.
            fits = fits[np.searchsorted(distinct, padded)]
        self.padded_lengths = padded[which]
        dropping = self.oversize == "drop" and alone.any()
        self._kept = np.flatnonzero(~alone[which]) if dropping else np.arange(len(which))
        self.dropped = len(which) - len(self._kept)
        # Sorted by counting; the narrow type lets numpy sort by radix when a plan is made.
        rising = np.arange(len(distinct)) if self.shapes is None else np.unique(padded, return_inverse=True)[1]
        self._places = (rising[-1] - rising).astype(np.uint16 if len(distinct) < 1 << 16 else np.int64)[which]
        counts = np.bincount(which[self._kept], minlength=len(distinct))[::-1]
        fits = np.maximum(fits, 1)
        self._samples = SortedSamples(np.repeat(padded[::-1], counts), np.repeat(fits[::-1], counts))
        self._fits = fits
        wanted = min(self._samples.fewest() + self.spare_batches, len(self._kept))
        # With fewer samples than that, each is a batch, and some are given to two ranks.
        self._total = min(steps_of(wanted, self.world_size) * self.world_size, len(self._kept))
        self._windows = self._samples.windows(self._total)
        self._cuts: _Ints | None = None  # of every epoch
        if self.shapes is not None:
            least = self._samples.least_padding if self.spare_batches else self._samples.full
            self._cuts = least(self._windows, self._total)

    def _count(self, epoch: int) -> int:  # noqa: ARG002  as many in every epoch
        return self._total

    def _options(self) -> tuple[object, ...]:
        return *super()._options(), self.shapes, self.oversize, self.spare_batches, crc32(self._fits.tobytes())

    def _costs(self, batches: Sequence[list[int]]) -> Sequence[float]:
        if self.cost is None:
            return super()._costs(batches)
        return [self.cost(len(batch), int(self.padded_lengths[batch[0]])) for batch in batches]  # the longest is first

    def _plan(self, random: np.random.Generator) -> Plan:
        order, cuts, windows = self._kept, self._cuts, self._windows
        if self.shuffle:
            order = random.permutation(order)
        # A stable sort keeps the order of equal lengths.
        order = order[np.argsort(self._places[order], kind="stable")]
        if cuts is None:
            windows = self._samples.drawn(windows, random) if self.shuffle else windows
            cuts = self._samples.least_padding(windows, self._total)
        plan = Plan(order, cuts[:-1], cuts[1:])
        return plan.shuffled(random) if self.shuffle else plan


def make_sampler(known: Known, *, budget_tokens: int, **options: Any) -> PlannedBatchSampler:
    """The sampler that ``data.batching`` asks for; its other options are the sampler's own."""
    return PlannedBatchSampler(known.lengths, budget_tokens, seed=known.seed, **options)
