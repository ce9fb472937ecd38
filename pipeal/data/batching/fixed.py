"""As many samples in each batch: random ones (the kind ``fixed``), or of similar length."""

from __future__ import annotations

import numpy as np

from pipeal.data.batching.samplers import EpochSampler, Known, Lengths, Plan
from pipeal.data.checks import at_least

__all__ = ["FixedBatchSampler", "LengthGroupedBatchSampler"]


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


class LengthGroupedBatchSampler(FixedBatchSampler):
    """Batches of ``batch_size`` samples of similar length: neighbours in the order of lengths.

    Kept random: the order of equal lengths, the place of the one smaller batch, the order of the batches.

    >>> list(LengthGroupedBatchSampler([3, 9, 2, 8], batch_size=2, shuffle=False))
    [[1, 3], [0, 2]]
    """

    def _plan(self, random: np.random.Generator) -> Plan:
        order = self._longest_first(random)
        whole, rest = divmod(len(order), self.batch_size)
        sizes = np.full(whole + bool(rest), self.batch_size)
        if rest:
            sizes[random.integers(len(sizes)) if self.shuffle else -1] = rest
        ends = np.cumsum(sizes)
        plan = Plan(order, ends - sizes, ends)
        return plan.shuffled(random) if self.shuffle else plan


def make_sampler(known: Known, *, batch_size: int) -> FixedBatchSampler:
    """The sampler that ``data.batching`` asks for."""
    return FixedBatchSampler(known.lengths, batch_size, seed=known.seed)
