"""What samplers share that plan a whole epoch, from the lengths of all samples, a seed and the epoch's number.

Every sampler yields lists of indices, each index once per epoch, and fits
``torch.utils.data.DataLoader(batch_sampler=...)``. Iterators over one sampler do not disturb each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeal.core.errors import ConfigError, DataError

__all__ = ["EpochBatchSampler", "EpochSampler", "LengthGroupedBatchSampler", "padding_share"]

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


class EpochSampler(ABC):
    """What the samplers share: a checked array of lengths, and a plan that (seed, epoch) decides.

    Args:
        lengths: ``(N,)`` whole numbers, at least 1 each.
        shuffle: False gives the same batches in the same order in every epoch.
        seed: At least 0.

    Attributes:
        padded_lengths: ``(N,)`` int64: a batch is to be padded to the largest of these among its samples.

    Raises:
        DataError: No samples, or lengths that are not whole numbers of at least 1.
        ConfigError: A seed below 0.
    """

    def __init__(self, lengths: Lengths, *, shuffle: bool, seed: int) -> None:
        self.lengths = _checked(lengths)
        self.padded_lengths = self.lengths
        self.shuffle = shuffle
        self.seed = at_least("seed", seed, 0)
        self.epoch = 0
        self._planned: tuple[int, Plan] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iterator (and ``len``) is for; begun iterators go on as they are.

        Raises:
            ConfigError: An epoch below 0.
        """
        self.epoch = at_least("epoch", epoch, 0)

    def __len__(self) -> int:
        """The number of batches in the chosen epoch."""
        return len(self._current().starts)

    def __iter__(self) -> Iterator[list[int]]:
        plan = self._current()
        for start, end in zip(plan.starts.tolist(), plan.ends.tolist(), strict=True):
            yield plan.order[start:end].tolist()

    def _current(self) -> Plan:
        planned = self._planned
        if planned is None or planned[0] != self.epoch:
            planned = self.epoch, self._plan(np.random.default_rng((self.seed, self.epoch)))
            self._planned = planned
        return planned[1]

    @abstractmethod
    def _plan(self, random: np.random.Generator) -> Plan:
        """Plans an epoch; all randomness comes from ``random``."""

    def _longest_first(self, random: np.random.Generator) -> _Indices:
        """The samples by falling length; equal ones in random order, or as they stand without shuffling."""
        order = random.permutation(len(self.lengths)) if self.shuffle else np.arange(len(self.lengths))
        # A stable sort keeps the order of equal lengths.
        return order[np.argsort(-self.lengths[order], kind="stable")]


class LengthGroupedBatchSampler(EpochSampler):
    """Batches of ``batch_size`` samples of similar length: neighbours in the order of lengths.

    Kept random: the order of equal lengths, the place of the one smaller batch, the order of the batches.

    >>> list(LengthGroupedBatchSampler([3, 9, 2, 8], batch_size=2, shuffle=False))
    [[1, 3], [0, 2]]
    """

    def __init__(self, lengths: Lengths, batch_size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(lengths, shuffle=shuffle, seed=seed)
        self.batch_size = at_least("batch_size", batch_size, 1)

    def _plan(self, random: np.random.Generator) -> Plan:
        order = self._longest_first(random)
        whole, rest = divmod(len(order), self.batch_size)
        sizes = np.full(whole + bool(rest), self.batch_size)
        if rest:
            sizes[random.integers(len(sizes)) if self.shuffle else -1] = rest
        ends = np.cumsum(sizes)
        plan = Plan(order, ends - sizes, ends)
        return plan.shuffled(random) if self.shuffle else plan


def padding_share(lengths: Lengths, batches: Iterable[Sequence[int]]) -> float:
    """The share of padding in all tokens of the batches, each padded to its longest sample.

    >>> padding_share([1, 3, 4], [[0, 1], [2]])
    0.2

    Raises:
        DataError: No batch, an empty one, or bad lengths.
    """
    checked = _checked(lengths)
    lists = list(batches)
    sizes = np.array([len(batch) for batch in lists], dtype=np.int64)
    if not sizes.size or not sizes.all():
        raise DataError("no batches, or one without samples; wanted at least one sample in each")
    used = checked[np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=int(sizes.sum()))]
    longest = np.maximum.reduceat(used, np.cumsum(sizes) - sizes)
    padded = int((longest * sizes).sum())
    return (padded - int(used.sum())) / padded


def _checked(lengths: Lengths) -> npt.NDArray[np.int64]:
    found = np.asarray(lengths)
    if found.ndim != 1 or not found.size:
        raise DataError(f"lengths of shape {found.shape}; wanted one length for each of at least 1 sample")
    if not np.issubdtype(found.dtype, np.integer):
        raise DataError(f"lengths of type {found.dtype}; wanted whole numbers")
    shortest = int(np.argmin(found))
    if found[shortest] < 1:
        raise DataError(f"sample {shortest} has length {found[shortest]}; wanted at least 1")
    longest = int(np.argmax(found))
    if found[longest] > np.iinfo(np.int64).max:
        raise DataError(f"sample {longest} has length {found[longest]}; wanted less than 2^63")
    return found.astype(np.int64)


def at_least(name: str, value: int, least: int) -> int:
    """A whole number, checked.

    Raises:
        ConfigError: It is not one, or below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{name} is {value!r}; wanted a whole number of at least {least}")
    return int(value)
