"""Batches of dynamic length: as many samples, in the order they come, as stay within a limit of size.

Names and results as in NVIDIA's ``bionemo-size-aware-batching``, whose budget is the sum of sizes. Beyond it: a budget
of padded size, a policy for samples over the limit, epochs, ranks, exact resuming.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, tee
from operator import index as as_index
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler

from pipeal.core.errors import ConfigError, DataError, a_type
from pipeal.core.samples import Samples, as_iterable
from pipeal.data.batching.packing import Cost, Log, Oversize, Packer, SizeOf, Sizes, SizeTypeError, Tally
from pipeal.data.batching.passes import PassSampler
from pipeal.data.batching.samplers import Known

__all__ = ["SizeAwareBatchSampler", "size_aware_batching"]

_Data = TypeVar("_Data")


def size_aware_batching(
    dataset: Samples[_Data],
    sizeof: SizeOf,
    max_total_size: float,
    collate_fn: Callable[[list[_Data]], Any] | None = None,
    info_logger: Log | None = None,
    warn_logger: Log | None = None,
    *,
    cost: Cost = "sum",
    oversize: Oversize = "drop",
) -> Iterator[Any]:
    """Batches any stream in one go over it, each batch within a limit.

    A batch is out as soon as the next sample would not fit into it, so the stream may be endless.

    Args:
        dataset: The samples: an iterable, or a data set with ``__getitem__`` and ``__len__``.
        sizeof: The size of a sample: a function, or a mapping from samples.
        max_total_size: The most that a batch may cost, above 0.
        collate_fn: Makes a batch of a list of samples; by default it stays the list.
        info_logger: Is told at the end how many batches and samples there were.
        warn_logger: Is told of each sample that is dropped; without it, one Python warning counts them.
        cost: ``sum`` of the sizes, ``padded`` for ``n × longest``, or any function of ``(n, longest)``.
        oversize: What becomes of a sample over the limit: ``drop`` (the document's way), ``raise``, or ``single``
            for a batch of its own.

    Returns:
        An iterator over the batches.

    Raises:
        SizeTypeError: ``dataset`` is no such thing, ``sizeof`` neither function nor mapping; a size is no number.
        ConfigError: A limit that is not above 0, an unknown cost or policy.
        DataError: A size that is negative or not finite; with ``raise``, a sample over the limit.

    >>> list(size_aware_batching(["a", "bb", "ccc", "d"], len, 4))
    [['a', 'bb'], ['ccc', 'd']]
    >>> list(size_aware_batching(["a", "bb", "ccc", "d"], len, 4, cost="padded"))
    [['a', 'bb'], ['ccc'], ['d']]
    """
    found = as_iterable(dataset, SizeTypeError)
    packer, sizes = Packer(max_total_size, cost, oversize), Sizes(sizeof)
    samples, sized = tee(found)
    batches = packer.pack(samples, sizes.of(sized), Tally(), by_position=True, info=info_logger, warn=warn_logger)
    return batches if collate_fn is None else _collated(batches, collate_fn)


class SizeAwareBatchSampler(PassSampler):
    """Batches of indices whose sizes stay within a limit, in the order of another sampler.

    Passes, ranks, resuming and their arguments are those of :class:`pipeal.data.batching.passes.PassSampler`.

    Args:
        sampler: The indices: a sampler, or any iterable of whole numbers. Its ``set_epoch``, if it has one, is called
            with this sampler's. An iterator serves one pass only.
        sizeof: The size at each index: a function, a mapping or a sequence (an array, too). Sizes must not change.
        max_total_size: The most that a batch may cost, above 0.
        info_logger: Is told at the end of each pass what was cut.
        warn_logger: Is told of each sample that is dropped; without it, one Python warning per pass counts them.
        cost: ``sum`` of the sizes, ``padded`` for ``n × longest``, or any function of ``(n, longest)``.
        oversize: What becomes of a sample over the limit: ``drop`` (the document's way; :attr:`dropped` counts),
            ``raise``, or ``single`` for a batch of its own.
        shuffle: Shuffle the indices in every epoch, by ``(seed, epoch)``.

    Raises:
        SizeTypeError: ``sampler`` or ``sizeof`` is of the wrong kind (a ``TypeError``).
        ConfigError: A limit that is not above 0, or another argument out of range (a ``ValueError``).

    Without samples there are no batches.

    >>> list(SizeAwareBatchSampler(range(5), [2, 2, 2, 2, 2], max_total_size=4))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        sampler: Sampler[Any] | Iterable[int],
        sizeof: SizeOf,
        max_total_size: float,
        info_logger: Log | None = None,
        warn_logger: Log | None = None,
        *,
        cost: Cost = "sum",
        oversize: Oversize = "drop",
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        largest_first: bool = False,
    ) -> None:
        if not isinstance(sampler, (Sampler, Iterable)):
            raise SizeTypeError(f"sampler is {a_type(sampler)}; wanted a Sampler or an iterable of indices")
        self._sizes = Sizes(sizeof)
        self._packer = Packer(max_total_size, cost, oversize)
        super().__init__(seed=seed, rank=rank, world_size=world_size, largest_first=largest_first)
        self.sampler = sampler
        self.sizeof = sizeof
        self.max_total_size = max_total_size
        self.shuffle = shuffle
        self._info, self._warn = info_logger, warn_logger
        self._tally = Tally()
        self._used_up = False
        self._counted: tuple[tuple[int, int], int] | None = None
        if _size(sampler) is None and (world_size > 1 or largest_first or shuffle):
            raise ConfigError(
                f"{a_type(sampler)} without len() may be endless; world_size, largest_first and shuffle need "
                "a whole epoch: pass a sampler with __len__, or a list"
            )

    @property
    def dropped(self) -> int:
        """How many samples over the limit the pass begun last has dropped so far."""
        return self._tally.dropped

    def _batches(self, epoch: int) -> Iterable[list[int]]:
        self._tally = tally = Tally()
        return self._packed(epoch, tally, self._info, self._warn)

    def _packed(self, epoch: int, tally: Tally, info: Log | None, warn: Log | None) -> Iterator[list[int]]:
        order = self._order(epoch)
        if isinstance(order, list):
            return self._packer.pack(order, self._sizes.of_all(order), tally, info=info, warn=warn)
        indices, sized = tee(order)
        return self._packer.pack(indices, self._sizes.of(sized), tally, info=info, warn=warn)

    def _count(self, epoch: int) -> int:
        if not self._repeatable():
            raise TypeError(
                f"the number of batches over {a_type(self.sampler)} is not known before a pass; it is over a "
                "sequence (shuffle=True shuffles it) or a sampler with set_epoch and __len__"
            )
        decided_by = (self.seed, epoch) if self.shuffle else (0, 0)
        if self._counted is None or self._counted[0] != decided_by or not _fixed(self.sampler):
            self._counted = decided_by, sum(1 for _ in self._packed(epoch, Tally(), None, _silent))
        return self._counted[1]

    def _options(self) -> tuple[object, ...]:
        return self.shuffle, *self._packer.options

    def _costs(self, batches: Sequence[list[int]]) -> Sequence[float]:
        sizes = self._sizes.of_all([*chain.from_iterable(batches)])
        return [self._packer.cost_of([*islice(sizes, len(batch))]) for batch in batches]

    def _enter(self, epoch: int) -> None:
        super()._enter(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def _order(self, epoch: int) -> Iterable[int]:
        """The indices of a pass; of a sampler that ends, all at once, so that no other pass can come between."""
        sampler = self.sampler
        if _size(sampler) is None:
            if isinstance(sampler, Iterator):
                if self._used_up:
                    raise DataError(
                        f"the sampler is an iterator ({type(sampler).__name__}) and its one pass is taken; pass "
                        "something that can be iterated over again, such as a list"
                    )
                self._used_up = True
            indices = map(as_index, sampler)
            # A generator looks at its epoch when its first item is asked for, and the next pass's is set before that.
            return chain([*islice(indices, 1)], indices)
        if isinstance(sampler, (np.ndarray, Tensor)):
            sampler = sampler.tolist()
        order = [*map(as_index, sampler)]
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(np.array(order, dtype=np.int64)).tolist()
        return order

    def _repeatable(self) -> bool:
        """Whether iterating over the sampler twice in an epoch gives the same, and draws nothing from a generator."""
        return _fixed(self.sampler) or (hasattr(self.sampler, "set_epoch") and _size(self.sampler) is not None)


def make_sampler(known: Known, *, budget_tokens: int, **options: Any) -> SizeAwareBatchSampler:
    """The sampler that ``data.batching`` asks for; its other options are the sampler's own.

    Raises:
        DataError: All samples are over the budget, and dropped.
    """
    samples = range(len(known.lengths))
    sampler = SizeAwareBatchSampler(
        samples, known.lengths, budget_tokens, warn_logger=_silent, shuffle=True, seed=known.seed, **options
    )
    # It looks at the sizes in a pass: one here, since later a run would have left files.
    if not len(sampler):
        raise DataError(f"all {len(samples)} samples are over the budget of {budget_tokens}; raise the budget")
    return sampler


def _collated(batches: Iterator[list[_Data]], collate_fn: Callable[[list[_Data]], Any]) -> Iterator[Any]:
    for batch in batches:
        yield collate_fn(batch)


def _fixed(sampler: object) -> bool:
    plain = isinstance(sampler, (Collection, Tensor)) and not isinstance(sampler, Sampler)
    return plain or type(sampler) is SequentialSampler


def _size(sampler: object) -> int | None:
    try:
        return len(sampler)  # type: ignore[arg-type]
    except TypeError:
        return None


def _silent(message: str) -> None:
    """Counting is not a pass: it reports nothing. Nor does a run in every pass: it tells once what is dropped."""
