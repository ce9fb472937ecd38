"""As many samples of similar length as a budget holds, greedily: the kind ``token-budget``."""

from __future__ import annotations

import numpy as np

from pipeal.core.errors import DataError
from pipeal.data.batching.samplers import EpochSampler, Known, Lengths, Plan, at_least

__all__ = ["TokenBudgetBatchSampler"]


class TokenBudgetBatchSampler(EpochSampler):
    """As many samples of similar length as a padded budget holds: ``max(length) × n <= budget_tokens``.

    Longest first, each batch takes as many samples as fit; without shuffling no other cutting gives fewer
    batches. Kept random: the order of equal lengths, the size of the first batch and with it all later cuts
    (which costs one batch at most), the order of the batches.

    Args:
        lengths: ``(N,)`` whole numbers, at least 1 each.
        budget_tokens: The most tokens in a batch, padding included.
        max_samples: The most samples in a batch.
        shuffle: False gives the same batches in every epoch, longest first.
        seed: At least 0.

    Raises:
        DataError: Bad lengths, or a sample that is longer than the budget.
        ConfigError: A budget or ``max_samples`` below 1.

    >>> list(TokenBudgetBatchSampler([3, 9, 2, 8], budget_tokens=16, shuffle=False))
    [[1], [3, 0], [2]]
    """

    def __init__(
        self,
        lengths: Lengths,
        budget_tokens: int,
        *,
        max_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(lengths, shuffle=shuffle, seed=seed)
        self.budget_tokens = at_least("budget_tokens", budget_tokens, 1)
        self.max_samples = None if max_samples is None else at_least("max_samples", max_samples, 1)
        longest = int(np.argmax(self.lengths))
        if self.lengths[longest] > self.budget_tokens:
            raise DataError(
                f"sample {longest} has length {self.lengths[longest]}, more than the budget of "
                f"{self.budget_tokens} tokens; raise budget_tokens or cut the samples (max_len)"
            )

    def _plan(self, random: np.random.Generator) -> Plan:
        order = self._longest_first(random)
        fits = self.budget_tokens // self.lengths[order]
        if self.max_samples is not None:
            fits = np.minimum(fits, self.max_samples)
        # How many a batch takes depends on where the one before it ended: a loop, but one step per batch.
        takes, count = fits.tolist(), len(order)
        if self.shuffle:
            takes[0] = int(random.integers(1, takes[0] + 1))
        cuts = [0]
        while cuts[-1] < count:
            cuts.append(cuts[-1] + takes[cuts[-1]])
        cuts[-1] = count
        edges = np.array(cuts, dtype=np.int64)
        plan = Plan(order, edges[:-1], edges[1:])
        return plan.shuffled(random) if self.shuffle else plan


def make_sampler(known: Known, *, budget_tokens: int, max_samples: int | None) -> TokenBudgetBatchSampler:
    """The sampler that ``data.batching`` asks for."""
    return TokenBudgetBatchSampler(known.lengths, budget_tokens, max_samples=max_samples, seed=known.seed)
