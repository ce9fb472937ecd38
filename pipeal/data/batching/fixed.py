"""A number of random samples in each batch: the kind ``fixed``."""

from __future__ import annotations

import numpy as np

from pipeal.data.batching.samplers import EpochSampler, Known, Lengths, Plan, at_least

__all__ = ["FixedBatchSampler"]


class FixedBatchSampler(EpochSampler):
    """Batches of ``batch_size`` random samples, whatever their lengths; the last one may be smaller.

    >>> list(FixedBatchSampler([3, 1, 2], batch_size=2, shuffle=False))
    [[0, 1], [2]]
    """

    def __init__(self, lengths: Lengths, batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(lengths, shuffle=shuffle, seed=seed)
        self.batch_size = at_least("batch_size", batch_size, 1)

    def _plan(self, random: np.random.Generator) -> Plan:
        count = len(self.lengths)
        starts = np.arange(0, count, self.batch_size)
        order = random.permutation(count) if self.shuffle else np.arange(count)
        return Plan(order, starts, np.minimum(starts + self.batch_size, count))


def make_sampler(known: Known, *, batch_size: int) -> FixedBatchSampler:
    """The sampler that ``data.batching`` asks for."""
    return FixedBatchSampler(known.lengths, batch_size, seed=known.seed)
