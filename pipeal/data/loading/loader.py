"""Batches of tensors, in the order a sampler gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeal.data.batching.ranks import WHOLE, Share
from pipeal.data.batching.samplers import EpochBatchSampler
from pipeal.data.text.corpus import Corpus

__all__ = ["Batch", "BatchLoader", "EpochBatches"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of one shape, and what throughput is counted in.

    Attributes:
        x: Texts: ``(B, T)`` int64, padded on the right. Images: ``(B, 3, S, S)`` float32.
        y: ``(B,)`` int64; of blocks of characters ``(B, T)``.
        indices: Which samples of the data set these are. Where ``x`` and ``y`` hold a rank's share
            (:class:`pipeal.data.Share`), this and the counts are those of the whole batch.
        tokens: The tokens without padding; 0 for images.
        padded: The tokens with padding, ``B × T``; 0 for images.
    """

    x: Tensor
    y: Tensor
    indices: list[int]
    tokens: int
    padded: int

    def __len__(self) -> int:
        return len(self.indices)


class EpochBatches(Protocol):
    """What is trained and evaluated on: batches that know which epoch they are for."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the chosen epoch."""
        ...

    def __len__(self) -> int:
        """How many they are."""
        ...

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Chooses the epoch, and the batch that iterators begin with."""
        ...

    def close(self) -> None:
        """Ends what prepares batches, if anything does."""
        ...


class BatchLoader:
    """Iterates over the batches of one epoch.

    Args:
        corpus: The samples.
        sampler: Which of them form a batch. If it has ``padded_lengths``, one for each sample, a batch is padded to the
            largest of these among its samples, else to the longest of its samples.
        pin_memory: Put the tensors into page-locked memory, for copies that do not block. Without a CUDA
            device there is nothing to copy to and the switch has no effect.
        share: Which of the samples of each batch become tensors here.
    """

    def __init__(
        self, corpus: Corpus, sampler: EpochBatchSampler, *, pin_memory: bool = False, share: Share = WHOLE
    ) -> None:
        self.corpus = corpus
        self.sampler = sampler
        self.share = share
        self.padded_lengths: npt.NDArray[np.int64] = getattr(sampler, "padded_lengths", corpus.lengths)
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self._first = 0

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Chooses the epoch that the next iterators are for, and the batch they begin with, counted from 0."""
        self.sampler.set_epoch(epoch)
        self._first = first

    def __len__(self) -> int:
        """The number of batches in the chosen epoch."""
        return len(self.sampler)

    def close(self) -> None:
        """Nothing runs that would have to end; other loaders have workers."""

    def __iter__(self) -> Iterator[Batch]:
        for indices in islice(self.sampler, self._first, None):
            own = self.share.of(indices)
            x, y = self.corpus.batch(own, int(self.padded_lengths[own].max()))
            if self.pin_memory:
                x, y = x.pin_memory(), y.pin_memory()
            padded = len(indices) * int(self.padded_lengths[indices].max())
            yield Batch(x, y, indices, int(self.corpus.lengths[indices].sum()), padded)
