"""The batches that a stream of known samples gives, epoch by epoch: the kind ``stream``."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from pipeal.core.errors import ConfigError, DataError
from pipeal.data.batching.binned import BinnedBatchIterator, PadTo
from pipeal.data.batching.bounds import checked_bounds, length_bounds
from pipeal.data.batching.packing import Oversize
from pipeal.data.batching.samplers import EpochSampler, Known, Lengths, Plan

__all__ = ["BinnedBatchSampler"]

_BOUNDS_FROM = 5_000
"""How many lengths the bounds of a run are made of: what one would look at before reading the stream."""


class BinnedBatchSampler(EpochSampler):
    """Cuts batches as :class:`BinnedBatchIterator` does, from the samples in an order that is drawn for each epoch.

    Args:
        lengths: ``(N,)`` whole numbers, at least 1 each.
        bounds: As for the iterator.
        budget: The most that a batch may cost.
        pad_to: The ``bound`` of the longest sample, or the ``longest`` sample itself.
        oversize: What to do with samples above the last bound.
        shuffle: False reads the samples as they stand.
        seed: At least 0.
        options: Further ones of the iterator: ``cost``, ``max_samples``, ``buffer_samples``, ``max_wait``.

    Attributes:
        dropped: How many over-size samples no batch has.

    Raises:
        DataError: Bad lengths, bounds that do not rise, or an over-size sample under ``raise``.
        ConfigError: An option out of range, or a budget that does not hold one sample of the last bound.

    >>> list(BinnedBatchSampler([1, 4, 2, 1], [2, 4], budget=4, shuffle=False))
    [[1], [0, 2], [3]]
    """

    def __init__(
        self,
        lengths: Lengths,
        bounds: Lengths,
        budget: float,
        *,
        pad_to: PadTo = "bound",
        oversize: Oversize = "raise",
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(lengths, shuffle=shuffle, seed=seed)
        length = self.lengths.tolist().__getitem__
        own = {"bounds": bounds, "budget": budget, "length": length, "pad_to": pad_to, "oversize": oversize}
        self._options = {**own, **options}
        self._stream([])  # options out of range are told now
        rising = checked_bounds(bounds)
        over = self.lengths > rising[-1]
        if oversize == "raise" and over.any():
            longest = int(np.argmax(self.lengths))
            raise DataError(
                f"sample {longest} has length {self.lengths[longest]}, above the last bound {rising[-1]}; cut it, add "
                "a bound, or choose oversize drop or single"
            )
        if oversize == "drop" and over.all():
            raise DataError(f"all {len(over)} samples are above the last bound {rising[-1]}; add a bound")
        self.dropped = int(over.sum()) if oversize == "drop" else 0
        if pad_to == "bound":
            self.padded_lengths = np.where(over, self.lengths, rising[np.searchsorted(rising[:-1], self.lengths)])

    def _stream(self, samples: list[int]) -> BinnedBatchIterator[int]:
        return BinnedBatchIterator(samples, **self._options)

    def _plan(self, random: np.random.Generator) -> Plan:
        count = len(self.lengths)
        order = random.permutation(count) if self.shuffle else np.arange(count)
        batches = [batch.samples for batch in self._stream(order.tolist())]
        ends = np.cumsum([len(batch) for batch in batches])
        return Plan(np.fromiter(chain.from_iterable(batches), np.int64, ends[-1]), np.append(0, ends[:-1]), ends)


def make_sampler(known: Known, *, budget_tokens: int, bounds: int, **options: Any) -> BinnedBatchSampler:
    """The sampler that ``data.batching`` asks for; its other options are the sampler's own.

    Raises:
        ConfigError: The budget does not hold the longest sample that may come.
    """
    if budget_tokens < known.longest:
        raise ConfigError(
            f"data.batching.budget_tokens: found {budget_tokens}, but a text may have {known.longest} words, which is "
            "all that kind stream knows beforehand; raise the budget or cut the texts (data.max_len)"
        )
    seen = np.random.default_rng(known.seed).permutation(known.lengths)[:_BOUNDS_FROM]
    rising = length_bounds(np.append(seen, known.longest), bounds)
    return BinnedBatchSampler(known.lengths, rising, budget_tokens, seed=known.seed, **options)
