"""Batches of similar size: samples sorted into ranges of size, and a batch sampler for each range.

Names and results as in NVIDIA's ``bionemo-size-aware-batching``; what is shuffled has its results with
``compatible=True``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain, islice, pairwise
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from pipeal.core.errors import ConfigError, DataError, a_type
from pipeal.data.batching.generator_passes import GeneratorPasses
from pipeal.data.batching.packing import SizeTypeError
from pipeal.data.batching.passes import PassSampler
from pipeal.data.batching.samplers import Known
from pipeal.data.batching.size_ranges import bucket_of, create_buckets, real_numbers, rising_bounds

__all__ = ["BucketBatchSampler", "EmptyBucketsError"]

_NO_SAMPLES: tuple[list[int], ...] = ()
"""The batches of a bucket that holds no sample."""


class EmptyBucketsError(DataError, RuntimeError):
    """No sample has a size within the bounds of the buckets."""


class BucketBatchSampler(PassSampler):
    """Batches of samples from one range of size each, made by a batch sampler per range.

    Passes, ranks, resuming and their arguments are those of :class:`pipeal.data.batching.passes.PassSampler`; the
    costliest batch is the one of most padded size, ``n × longest``.

    Args:
        sizes: ``(N,)`` of any integer or floating type.
        bucket_boundaries: ``(K + 1,)`` likewise, none twice; sorted they bound ``K`` ranges, each with its lower bound
            and without its upper one. Here, and nowhere else in pipeal, they may come in any order, since the document
            says so. Samples outside all ranges are left out, with a warning.
        base_batch_sampler_class: Makes the batches of a range; called in every pass as
            ``base_batch_sampler_class(indices, **shared, **individual)`` with the list of the range's indices. Ranges
            without samples need none.
        base_batch_sampler_shared_kwargs: Keyword arguments for all ranges.
        base_batch_sampler_individual_kwargs: Per keyword, one value for each range.
        shuffle: Shuffle the indices of each range, and the order of all batches; otherwise the ranges come one after
            the other by rising size, their samples as they stand.
        generator: One number is drawn from it, now, to be the seed; ``seed`` has no effect then.
        compatible: Shuffle to the very batches that ``bionemo-size-aware-batching`` documents for ``generator``, or
            without one for ``torch.Generator().manual_seed(seed)``. There each pass goes on where the generator and
            the indices were left: to begin with epoch ``e``, all passes before it are drawn. Otherwise an epoch
            follows from ``(seed, epoch)`` alone. A copy of the generator is drawn from, so nothing else disturbs it; to
            restore a state, build the sampler with the generator as it stood then. Without ``shuffle`` there is no
            difference.

    Attributes:
        sizes: As given.
        bucket_boundaries: ``(K + 1,)``, sorted.
        num_buckets: K.
        bucket_sizes: ``(K,)`` int64, the samples in each range.
        bucket_element_indices: The indices in each range, rising.
        num_samples: How many samples there are in all ranges.
        outside: How many there are in none.
        base_batch_sampler_class: As given.
        base_batch_sampler_shared_kwargs: As given, ``{}`` for None.
        base_batch_sampler_individual_kwargs: The keyword arguments of each range, K dictionaries.
        shuffle: Whether to.
        generator: As given.

    Raises:
        DataError: ``sizes`` is not a 1-D tensor of finite real numbers (a ``ValueError``).
        ConfigError: The bounds are not, or one comes twice; keyword arguments that are no dictionary of such, or not
            one value for each range (a ``ValueError``).
        SizeTypeError: ``base_batch_sampler_class`` is no class, or ``generator`` no generator; a CUDA generator where
            ``compatible`` wants one of the CPU.
        EmptyBucketsError: No sample lies within the bounds (a ``RuntimeError``).

    >>> sampler = BucketBatchSampler(
    ...     torch.tensor([1, 7, 2, 8, 3]),
    ...     torch.tensor([0, 5, 10]),
    ...     torch.utils.data.BatchSampler,
    ...     {"batch_size": 2, "drop_last": False},
    ...     shuffle=False,
    ... )
    >>> list(sampler)
    [[0, 2], [4], [1, 3]]
    """

    def __init__(
        self,
        sizes: Tensor,
        bucket_boundaries: Tensor,
        base_batch_sampler_class: type[Any],
        base_batch_sampler_shared_kwargs: dict[str, Any] | None = None,
        base_batch_sampler_individual_kwargs: dict[str, Iterable[Any]] | None = None,
        shuffle: bool | None = True,
        generator: torch.Generator | None = None,
        *,
        compatible: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        largest_first: bool = False,
    ) -> None:
        self._sizes = real_numbers("sizes", sizes, DataError)
        if not np.isfinite(self._sizes).all():
            first = int(np.argmin(np.isfinite(self._sizes)))
            raise DataError(f"sample {first} has size {self._sizes[first]}; wanted a finite number")
        self._bounds = bounds = rising_bounds(bucket_boundaries)
        if not isinstance(base_batch_sampler_class, type):
            raise SizeTypeError(f"base_batch_sampler_class is {base_batch_sampler_class!r}; wanted a class")
        if shuffle not in (True, False, None):
            raise ConfigError(f"shuffle is {shuffle!r}; wanted True or False")
        if generator is not None:
            if not isinstance(generator, torch.Generator):
                raise SizeTypeError(f"generator is {a_type(generator)}; wanted a torch.Generator")
            if compatible and generator.device.type != "cpu":
                raise SizeTypeError(f"generator is on {generator.device}; compatible=True wants one of the CPU")
            self._state = generator.get_state()
            seed = int(torch.randint(2**53, (), generator=generator, device=generator.device))
        super().__init__(seed=seed, rank=rank, world_size=world_size, largest_first=largest_first)
        self.sizes, self.bucket_boundaries = sizes, bucket_boundaries.sort().values
        self.num_buckets = len(bounds) - 1
        self.shuffle = shuffle is None or bool(shuffle)
        self.generator = generator
        self.compatible = compatible
        self.base_batch_sampler_class = base_batch_sampler_class
        self.base_batch_sampler_shared_kwargs = base_batch_sampler_shared_kwargs or {}
        self.base_batch_sampler_individual_kwargs = individual = _individual_kwargs(
            base_batch_sampler_individual_kwargs, self.num_buckets
        )
        _check_keywords("shared", base_batch_sampler_shared_kwargs)
        self._kwargs = [{**self.base_batch_sampler_shared_kwargs, **own} for own in individual]
        place = bucket_of(self._sizes, bounds)
        order = np.argsort(place, kind="stable")  # one sort, as the buckets may be tens of thousands
        edges = np.searchsorted(place[order], np.arange(self.num_buckets + 1)).tolist()
        self._members = [order[begin:end] for begin, end in pairwise(edges)]
        self.bucket_sizes = torch.tensor([len(members) for members in self._members])
        self.num_samples = inside = int(self.bucket_sizes.sum())
        self.outside = len(self._sizes) - inside
        self._published: tuple[int, GeneratorPasses] | None = None
        if not inside:
            raise EmptyBucketsError(
                f"none of {len(self._sizes)} samples has a size from {bounds[0]} to below {bounds[-1]}; move the bounds"
            )
        if self.outside:
            warnings.warn(
                f"{self.outside} of {len(self._sizes)} samples have sizes outside {bounds[0]} to {bounds[-1]} and are "
                "left out",
                stacklevel=2,
            )
        self._latest_bases = self._bases(self._orders(0))

    @property
    def bucket_element_indices(self) -> list[list[int]]:
        """The indices in each range, rising."""
        return [members.tolist() for members in self._members]

    @property
    def base_batch_samplers(self) -> list[Any]:
        """The base samplers of the pass begun last, of all ranges that hold samples."""
        return [base for base in self._latest_bases if base is not _NO_SAMPLES]

    @property
    def dropped(self) -> int:
        """How many samples the base samplers of the pass begun last have dropped so far, if they count them."""
        return sum(getattr(base, "dropped", 0) for base in self._latest_bases)

    def _batches(self, epoch: int) -> Iterable[list[int]]:
        if self.compatible and self.shuffle:
            return self._passes().batches(epoch)
        batches = ([*map(int, batch)] for base in self._begin_bases(self._orders(epoch)) for batch in base)
        if not self.shuffle:
            return batches
        found = list(batches)
        # The third number keeps it apart from the shuffling of indices.
        turn = np.random.default_rng((self.seed, epoch, 1)).permutation(len(found))
        return [found[place] for place in turn.tolist()]

    def _begin_bases(self, orders: list[list[int]]) -> list[Any]:
        self._latest_bases = self._bases(orders)
        return self._latest_bases

    def _bases(self, orders: list[list[int]]) -> list[Any]:
        """The base sampler of each bucket over its indices."""
        return [
            self.base_batch_sampler_class(order, **kwargs) if order else _NO_SAMPLES
            for order, kwargs in zip(orders, self._kwargs, strict=True)
        ]

    def _orders(self, epoch: int) -> list[list[int]]:
        """The indices of each bucket in an epoch."""
        if self.compatible and self.shuffle:
            return self._passes().orders(epoch)
        random = np.random.default_rng((self.seed, epoch))
        return [
            (random.permutation(members) if self.shuffle and len(members) else members).tolist()
            for members in self._members
        ]

    def _passes(self) -> GeneratorPasses:
        """The passes that are documented; a restored state may have brought another seed."""
        if self._published is None or self._published[0] != self.seed:
            state = torch.Generator().manual_seed(self.seed).get_state() if self.generator is None else self._state
            self._published = self.seed, GeneratorPasses(self._members, self._begin_bases, state)
        return self._published[1]

    def _count(self, epoch: int) -> int:
        base = self.base_batch_sampler_class
        if not hasattr(base, "__len__"):
            raise TypeError(f"{base.__name__} has no len(), so the number of batches is not known before a pass")
        return sum(map(len, self._bases(self._orders(epoch))))

    def _options(self) -> tuple[object, ...]:
        plain = [
            {key: value for key, value in kwargs.items() if isinstance(value, (int, float, str))}
            for kwargs in self._kwargs
        ]
        name = self.base_batch_sampler_class.__qualname__
        options = self.shuffle, name, self._bounds, crc32(self._sizes.tobytes()), plain
        if not (self.compatible and self.shuffle):
            return options
        return *options, None if self.generator is None else crc32(self._state.numpy().tobytes())

    def _costs(self, batches: Sequence[list[int]]) -> Sequence[float]:
        sizes = iter(self._sizes[np.fromiter(chain.from_iterable(batches), np.int64)].tolist())
        return [len(batch) * max(islice(sizes, len(batch))) for batch in batches]


def make_sampler(
    known: Known, *, batch_size: int, bucket_width: int, bucket_samples: int, largest_first: bool
) -> BucketBatchSampler:
    """The sampler that ``data.batching`` asks for."""
    sizes = torch.from_numpy(known.lengths)
    bounds = create_buckets(sizes, bucket_width, bucket_samples).bucket_boundaries
    base = {"batch_size": batch_size, "drop_last": False}
    return BucketBatchSampler(sizes, bounds, BatchSampler, base, seed=known.seed, largest_first=largest_first)


def _check_keywords(name: str, found: object) -> None:
    if found is not None and not (isinstance(found, dict) and all(isinstance(key, str) for key in found)):
        raise ConfigError(f"base_batch_sampler_{name}_kwargs is {found!r}; wanted a dictionary of keyword arguments")


def _individual_kwargs(found: dict[str, Iterable[Any]] | None, buckets: int) -> list[dict[str, Any]]:
    """The keyword arguments that each bucket's base sampler has for itself."""
    _check_keywords("individual", found)
    kwargs: list[dict[str, Any]] = [{} for _ in range(buckets)]
    for key, value in (found or {}).items():
        if not isinstance(value, Iterable):
            raise ConfigError(f"the values of {key!r} are {value!r}; wanted one for each bucket")
        values = list(value)
        if len(values) != buckets:
            raise ConfigError(f"{len(values)} values of {key!r} for {buckets} buckets; wanted one for each")
        for own, chosen in zip(kwargs, values, strict=True):
            own[key] = chosen
    return kwargs
