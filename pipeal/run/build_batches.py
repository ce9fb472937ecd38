"""Where ``data.batching`` becomes a sampler."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler

from pipeal.config import BatchingConfig
from pipeal.core.errors import ConfigError, DataError
from pipeal.data import (
    BinnedBatchSampler,
    BucketBatchSampler,
    EpochBatchSampler,
    FixedBatchSampler,
    PlannedBatchSampler,
    SizeAwareBatchSampler,
    TokenBudgetBatchSampler,
    create_buckets,
    length_bounds,
)

_BOUNDS_FROM = 5_000
"""How many lengths the bounds of a stream are made of: what one would look at before reading it."""


def batch_sampler(
    lengths: npt.NDArray[np.int64], batching: BatchingConfig, longest: int, seed: int
) -> EpochBatchSampler:
    """The sampler that a configuration asks for.

    Args:
        lengths: ``(N,)``, of the training samples.
        batching: The configuration.
        longest: What samples were cut at: all that is known of the lengths of a stream beforehand.
        seed: What is drawn follows from it and the epoch.

    Raises:
        ConfigError: An option that does not fit the others.
        DataError: A sample that is over the budget, or all of them where such are dropped.
    """
    budget, most = batching.budget_tokens, batching.max_samples
    match batching.kind:
        case "fixed":
            return FixedBatchSampler(lengths, batching.batch_size, seed=seed)
        case "bucket":
            sizes = torch.from_numpy(lengths)
            return BucketBatchSampler(
                sizes,
                create_buckets(sizes, batching.bucket_width, batching.bucket_samples).bucket_boundaries,
                BatchSampler,
                {"batch_size": batching.batch_size, "drop_last": False},
                seed=seed,
                largest_first=batching.largest_first,
            )
        case "size-aware":
            sampler = SizeAwareBatchSampler(
                range(len(lengths)),
                lengths,
                budget,
                warn_logger=_unsaid,
                cost=batching.cost,
                oversize=batching.oversize,
                shuffle=True,
                seed=seed,
                largest_first=batching.largest_first,
            )
            # It looks at the sizes in a pass: one here, since later a run would have left files.
            if not len(sampler):
                raise DataError(f"all {len(lengths)} samples are over the budget of {budget}; raise the budget")
            return sampler
        case "token-budget":
            return TokenBudgetBatchSampler(lengths, budget, max_samples=most, seed=seed)
        case "plan":
            return PlannedBatchSampler(
                lengths,
                budget,
                max_samples=most,
                shapes=batching.shapes,
                oversize=batching.oversize,
                spare_batches=batching.spare_batches,
                largest_first=batching.largest_first,
                seed=seed,
            )
        case "stream":
            if budget < longest:
                raise ConfigError(
                    f"data.batching.budget_tokens: found {budget}, but a text may have {longest} words, which is all "
                    "that kind stream knows beforehand; raise the budget or cut the texts (data.max_len)"
                )
            seen = np.random.default_rng(seed).permutation(lengths)[:_BOUNDS_FROM]
            bounds = length_bounds(np.append(seen, longest), batching.bounds)
            return BinnedBatchSampler(
                lengths,
                bounds,
                budget,
                max_samples=most,
                buffer_samples=batching.buffer_samples,
                max_wait=batching.max_wait,
                pad_to=batching.pad_to,
                seed=seed,
            )


def _unsaid(message: str) -> None:
    """What is dropped is told once, by whoever reads the data, not in every pass."""
