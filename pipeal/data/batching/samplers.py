"""What samplers share that plan a whole epoch, from the lengths of all samples, a seed and the epoch's number.

Every sampler yields lists of indices, each index once per epoch, and fits
``torch.utils.data.DataLoader(batch_sampler=...)``. Iterators over one sampler do not disturb each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pipeal.core.errors import DataError, first_line
from pipeal.data.batching.passes import PassSampler

__all__ = ["EpochBatchSampler", "EpochSampler", "padding_share"]

Lengths: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
_Indices: TypeAlias = npt.NDArray[np.int64]


class EpochBatchSampler(Protocol):
    """Batches of indices that know which epoch they are for; all batch samplers of :mod:`pipeal.data` are such."""

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of each batch."""
        ...

    def __len__(self) -> int:
        """The number of batches."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch."""
        ...


@dataclass(frozen=True, eq=False)
class Known:
    """What a run knows of the samples that a sampler is to batch.

    Attributes:
        lengths: ``(N,)`` int64, of the training samples.
        longest: What samples were cut at: all that is known of the lengths of a stream beforehand.
        seed: What is drawn follows from it and the epoch.
    """

    lengths: _Indices
    longest: int
    seed: int


@dataclass(frozen=True)
class Plan:
    """The batches of an epoch: batch ``b`` is ``order[starts[b]:ends[b]]``."""

    order: _Indices
    starts: _Indices
    ends: _Indices

    def shuffled(self, random: np.random.Generator) -> Plan:
        """The same batches in another order."""
        turn = random.permutation(len(self.starts))
        return Plan(self.order, self.starts[turn], self.ends[turn])


class EpochSampler(PassSampler):
    """A sampler that plans a whole epoch at once, from an array of lengths.

    Passes, ranks, resuming and their arguments are those of :class:`pipeal.data.batching.passes.PassSampler`, but that
    the epoch stays as it is until :meth:`set_epoch` chooses another one.

    Args:
        lengths: ``(N,)`` whole numbers, at least 1 each.
        shuffle: False gives the same batches in the same order in every epoch.
        seed: At least 0.
        passes: Further arguments of a pass: ``rank``, ``world_size``, ``largest_first``.

    Attributes:
        padded_lengths: ``(N,)`` int64: a batch is to be padded to the largest of these among its samples.

    Raises:
        DataError: No samples, or lengths that are not whole numbers of at least 1.
        ConfigError: A seed below 0.
    """

    def __init__(self, lengths: Lengths, *, shuffle: bool, seed: int, **passes: Any) -> None:
        super().__init__(seed=seed, **passes)
        self.lengths = checked_lengths(lengths)
        self.padded_lengths = self.lengths
        self.shuffle = bool(shuffle)
        self._counts_passes = False
        self._planned: tuple[tuple[int, int], Plan] | None = None

    def _batches(self, epoch: int) -> Iterable[list[int]]:
        plan = self._plan_of(epoch)
        pairs = zip(plan.starts.tolist(), plan.ends.tolist(), strict=True)
        return (plan.order[start:end].tolist() for start, end in pairs)

    def _count(self, epoch: int) -> int:
        return len(self._plan_of(epoch).starts)

    def _costs(self, batches: Sequence[list[int]]) -> Sequence[float]:
        return [len(batch) * int(self.padded_lengths[batch].max()) for batch in batches]

    def _options(self) -> tuple[object, ...]:
        # What else decides the batches shows in the check sum of those that were consumed.
        return self.shuffle, crc32(self.lengths.tobytes()), crc32(self.padded_lengths.tobytes())

    def _plan_of(self, epoch: int) -> Plan:
        drawn_from = self.seed, epoch
        if self._planned is None or self._planned[0] != drawn_from:
            self._planned = drawn_from, self._plan(np.random.default_rng(drawn_from))
        return self._planned[1]

    @abstractmethod
    def _plan(self, random: np.random.Generator) -> Plan:
        """Plans an epoch; all randomness comes from ``random``."""

    def _longest_first(self, random: np.random.Generator) -> _Indices:
        """The samples by falling length; equal ones in random order, or as they stand without shuffling."""
        order = random.permutation(len(self.lengths)) if self.shuffle else np.arange(len(self.lengths))
        # A stable sort keeps the order of equal lengths.
        return order[np.argsort(-self.lengths[order], kind="stable")]


def padding_share(lengths: Lengths, batches: Iterable[Sequence[int]]) -> float:
    """The share of padding in all tokens of the batches, each padded to its longest sample.

    >>> padding_share([1, 3, 4], [[0, 1], [2]])
    0.2

    Raises:
        DataError: No batch, an empty one, or bad lengths.
    """
    checked = checked_lengths(lengths)
    lists = list(batches)
    sizes = np.array([len(batch) for batch in lists], dtype=np.int64)
    if not sizes.size or not sizes.all():
        raise DataError("no batches, or one without samples; wanted at least one sample in each")
    used = checked[np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=int(sizes.sum()))]
    longest = np.maximum.reduceat(used, np.cumsum(sizes) - sizes)
    padded = int((longest * sizes).sum())
    return (padded - int(used.sum())) / padded


def checked_lengths(lengths: Lengths) -> _Indices:
    """Lengths as an array.

    Raises:
        DataError: No samples, or lengths that are not whole numbers of at least 1.
    """
    try:
        found = np.asarray(lengths)
    except (TypeError, ValueError) as error:  # the samples in the place of their lengths, or a type numpy lacks
        raise DataError(
            f"lengths that make no array ({first_line(error)}); wanted one whole number for each sample, such as "
            "[len(sample) for sample in samples]"
        ) from error
    if found.ndim != 1 or not found.size:
        raise DataError(f"lengths of shape {found.shape}; wanted one length for each of at least 1 sample")
    whole = whole_numbers(found)
    shortest = int(np.argmin(whole))
    if whole[shortest] < 1:
        raise DataError(f"sample {shortest} has length {whole[shortest]}; wanted at least 1")
    return whole


def whole_numbers(found: npt.NDArray[Any]) -> _Indices:
    """Lengths, or bounds of lengths, as int64.

    Raises:
        DataError: They are not whole, or not below 2**63.
    """
    if not np.issubdtype(found.dtype, np.integer):
        raise DataError(f"lengths of type {found.dtype}; wanted whole numbers")
    if found.dtype == np.uint64 and found.max() > np.iinfo(np.int64).max:
        raise DataError(f"lengths up to {found.max()}; wanted whole numbers below 2**63")
    return found.astype(np.int64)
