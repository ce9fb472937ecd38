"""The batches that a stream of known samples gives: training as on a stream, epoch by epoch."""

from __future__ import annotations

from functools import partial
from itertools import chain

import numpy as np

from pipeal.core.errors import DataError
from pipeal.data.batching.bounds import checked_bounds
from pipeal.data.batching.budget import BatchCost
from pipeal.data.batching.packing import Oversize
from pipeal.data.batching.samplers import EpochSampler, Lengths, Plan
from pipeal.data.batching.stream import BinnedBatchIterator, PadTo

__all__ = ["BinnedBatchSampler"]


class BinnedBatchSampler(EpochSampler):
    """Cuts batches as :class:`BinnedBatchIterator` does, from the samples in an order that is drawn for each epoch.

    Args:
        lengths: ``(N,)`` whole numbers, at least 1 each.
        bounds: As for the iterator, and so are all further ones.
        budget: The most that a batch may cost.
        cost: What it costs.
        max_samples: The most samples in a batch.
        buffer_samples: The most samples that wait at a time.
        max_wait: The most samples that are read while one waits.
        pad_to: The ``bound`` of the longest sample, or the ``longest`` sample itself.
        oversize: What to do with samples above the last bound.
        shuffle: False reads the samples as they stand.
        seed: At least 0.

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
        cost: BatchCost | None = None,
        max_samples: int | None = None,
        buffer_samples: int = 10_000,
        max_wait: int | None = None,
        pad_to: PadTo = "bound",
        oversize: Oversize = "raise",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(lengths, shuffle=shuffle, seed=seed)
        self._stream = partial(
            BinnedBatchIterator[int],
            bounds=bounds,
            budget=budget,
            length=self.lengths.tolist().__getitem__,
            cost=cost,
            max_samples=max_samples,
            buffer_samples=buffer_samples,
            max_wait=max_wait,
            pad_to=pad_to,
            oversize=oversize,
        )
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

    def _plan(self, random: np.random.Generator) -> Plan:
        count = len(self.lengths)
        order = random.permutation(count) if self.shuffle else np.arange(count)
        batches = [batch.samples for batch in self._stream(order.tolist())]
        ends = np.cumsum([len(batch) for batch in batches])
        return Plan(np.fromiter(chain.from_iterable(batches), np.int64, ends[-1]), np.append(0, ends[:-1]), ends)
