"""Batches of similar size: samples sorted into ranges of size, and a batch sampler for each range.

Names and results as in NVIDIA's ``bionemo-size-aware-batching``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeal.data.packing import SizeTypeError
from pipeal.data.passes import PassSampler
from pipeal.data.ranks import Uneven
from pipeal.errors import ConfigError, DataError

_MOST_BUCKETS = 10**7


class EmptyBucketsError(DataError, RuntimeError):
    """No sample has a size within the bounds of the buckets."""


class Buckets(NamedTuple):
    """Ranges of size, and how many samples each holds.

    Attributes:
        bucket_boundaries: ``(K + 1,)`` int64, rising; bucket ``k`` holds the sizes from bound ``k`` up to, but not
            including, bound ``k + 1``.
        bucket_sizes: ``(K,)`` int64.
    """

    bucket_boundaries: Tensor
    bucket_sizes: Tensor


def create_buckets(sizes: Tensor, max_width: int, min_bucket_count: int) -> Buckets:
    """Cuts the range of the sizes into buckets as narrow as ``min_bucket_count`` samples in each allow.

    From the smallest size up, a bucket takes one size after the other until it holds enough samples, and ends where
    the next size begins; it never grows wider than ``max_width``. Gaps between sizes become empty buckets of that
    width.

    Args:
        sizes: ``(N,)`` of any integer type.
        max_width: The widest that a bucket may be, at least 1.
        min_bucket_count: How many samples are enough, at least 1.

    Raises:
        DataError: No sizes, sizes of another shape, or sizes that are not whole numbers (a ``ValueError``).
        ConfigError: ``max_width`` or ``min_bucket_count`` is not a whole number above 0 (a ``ValueError``).

    >>> create_buckets(torch.tensor([3, 4, 4, 5, 17]), max_width=5, min_bucket_count=3)
    Buckets(bucket_boundaries=tensor([ 3,  5, 10, 15, 18]), bucket_sizes=tensor([3, 1, 0, 1]))
    """
    found = _numbers("sizes", sizes, DataError)
    if not found.size:
        raise DataError("no sizes; wanted at least 1")
    if not np.issubdtype(found.dtype, np.integer):
        raise DataError(f"sizes of type {sizes.dtype}; wanted whole numbers")
    for name, value in (("max_width", max_width), ("min_bucket_count", min_bucket_count)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ConfigError(f"{name} is {value!r}; wanted a whole number of at least 1")
    # Python's numbers: a distance between two int64 need not be one.
    values, counts = (part.tolist() for part in np.unique(found, return_counts=True))
    width, enough = int(max_width), int(min_bucket_count)
    if (values[-1] - values[0]) // width > _MOST_BUCKETS:
        raise DataError(
            f"sizes from {values[0]} to {values[-1]} need more than {_MOST_BUCKETS} buckets of width {width}, most of "
            "them empty; raise max_width, or cut the sizes"
        )
    if values[-1] >= np.iinfo(np.int64).max:
        raise DataError(f"sizes up to {values[-1]}; wanted less than 2**63 - 1, to have room for a bound above")
    bounds, held = [values[0]], []
    begin = 0
    while begin < len(values):
        end, count = begin + 1, counts[begin]
        while end < len(values) and count < enough and values[end] - bounds[-1] < width:
            count += counts[end]
            end += 1
        beyond = values[end] if end < len(values) else values[-1] + 1
        # A bound in every max_width of the way there; what is left of it belongs to the next bucket.
        steps = max(1, (beyond - bounds[-1]) // width)
        reach = min(beyond, bounds[-1] + width)
        bounds.extend([reach, *range(reach + width, bounds[-1] + steps * width + 1, width)])
        held.extend([count, *[0] * (steps - 1)])
        begin = end
    return Buckets(torch.tensor(bounds, dtype=torch.int64), torch.tensor(held, dtype=torch.int64))


class BucketBatchSampler(PassSampler):
    """Batches of samples from one range of size each, made by a batch sampler per range.

    Passes, ranks, resuming and their arguments are those of :class:`pipeal.data.passes.PassSampler`; the costliest
    batch is the one of most padded size, ``n × longest``.

    Args:
        sizes: ``(N,)`` of any integer or floating type.
        bucket_boundaries: ``(K + 1,)`` likewise, none twice; sorted they bound ``K`` ranges, each with its lower bound
            and without its upper one. Here, and nowhere else in pipeal, they may come in any order, since the document
            says so. Samples outside all ranges are left out, with a warning.
        base_batch_sampler_class: Makes the batches of a range; called anew in every pass as
            ``base_batch_sampler_class(indices, **shared, **individual)`` with the list of the range's indices. Ranges
            without samples need none.
        base_batch_sampler_shared_kwargs: Keyword arguments for all ranges.
        base_batch_sampler_individual_kwargs: Per keyword, one value for each range.
        shuffle: Shuffle the indices of each range, and the order of all batches; otherwise the ranges come one after
            the other by rising size, their samples as they stand.
        generator: One number is drawn from it, now, to be the seed; ``seed`` has no effect then.

    Raises:
        DataError: ``sizes`` is not a 1-D tensor of finite real numbers (a ``ValueError``).
        ConfigError: The bounds are not, or one comes twice; keyword arguments that are no dictionary of such, or not
            one value for each range (a ``ValueError``).
        SizeTypeError: ``base_batch_sampler_class`` is no class, or ``generator`` no generator.
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
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        uneven: Uneven = "split",
        largest_first: bool = False,
    ) -> None:
        self._sizes = _numbers("sizes", sizes, DataError)
        _check_finite(self._sizes)
        self._bounds = bounds = _bounds(bucket_boundaries)
        if not isinstance(base_batch_sampler_class, type):
            raise SizeTypeError(f"base_batch_sampler_class is {base_batch_sampler_class!r}; wanted a class")
        if shuffle not in (True, False, None):
            raise ConfigError(f"shuffle is {shuffle!r}; wanted True or False")
        if generator is not None:
            if not isinstance(generator, torch.Generator):
                raise SizeTypeError(f"generator is a {type(generator).__name__}; wanted a torch.Generator")
            seed = int(torch.randint(2**53, (), generator=generator, device=generator.device))
        super().__init__(seed=seed, rank=rank, world_size=world_size, uneven=uneven, largest_first=largest_first)
        self.shuffle = shuffle is None or bool(shuffle)
        self._base = base_batch_sampler_class
        self._kwargs = _kwargs_per_bucket(
            base_batch_sampler_shared_kwargs, base_batch_sampler_individual_kwargs, len(bounds) - 1
        )
        place = _bucket_of(self._sizes, bounds)
        self._members = [np.flatnonzero(place == bucket) for bucket in range(len(bounds) - 1)]
        inside = sum(map(len, self._members))
        self.outside = len(self._sizes) - inside
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
        self._latest_bases = self._bases(0)

    @property
    def dropped(self) -> int:
        """How many samples the base samplers of the pass begun last have dropped so far, if they count them."""
        return sum(getattr(base, "dropped", 0) for base in self._latest_bases)

    def _batches(self, epoch: int) -> Iterable[list[int]]:
        self._latest_bases = bases = self._bases(epoch)
        batches = ([*map(int, batch)] for base in bases for batch in base)
        return self._in_random_order(batches, epoch) if self.shuffle else batches

    def _in_random_order(self, batches: Iterable[list[int]], epoch: int) -> Iterable[list[int]]:
        found = list(batches)
        # The third number keeps it apart from the shuffling of indices.
        turn = np.random.default_rng((self.seed, epoch, 1)).permutation(len(found))
        return [found[place] for place in turn.tolist()]

    def _bases(self, epoch: int) -> list[Any]:
        """The base samplers of an epoch, of all buckets that hold samples."""
        random = np.random.default_rng((self.seed, epoch))
        bases = []
        for members, kwargs in zip(self._members, self._kwargs, strict=True):
            if len(members):
                indices = random.permutation(members) if self.shuffle else members
                bases.append(self._base(indices.tolist(), **kwargs))
        return bases

    def _count(self, epoch: int) -> int:
        if not hasattr(self._base, "__len__"):
            raise TypeError(f"{self._base.__name__} has no len(), so the number of batches is not known before a pass")
        return sum(map(len, self._bases(epoch)))

    def _options(self) -> tuple[object, ...]:
        plain = [
            {key: value for key, value in kwargs.items() if isinstance(value, (int, float, str))}
            for kwargs in self._kwargs
        ]
        return self.shuffle, self._base.__qualname__, self._bounds, crc32(self._sizes.tobytes()), plain

    def _costs(self, batches: Sequence[list[int]]) -> Sequence[float]:
        sizes = iter(self._sizes[np.fromiter(chain.from_iterable(batches), np.int64)].tolist())
        return [len(batch) * max(islice(sizes, len(batch))) for batch in batches]


def _numbers(name: str, found: Tensor, error: type[ConfigError] | type[DataError]) -> npt.NDArray[Any]:
    """A 1-D tensor of real numbers as int64 or float64, exactly."""
    if not isinstance(found, Tensor):
        raise error(f"{name} is a {type(found).__name__}; wanted a 1-D tensor of real numbers")
    if found.ndim != 1 or found.dtype == torch.bool or found.is_complex():
        raise error(f"{name} is a tensor of shape {tuple(found.shape)} and {found.dtype}; wanted 1-D and real numbers")
    if found.is_floating_point():
        return found.detach().cpu().to(torch.float64).numpy()
    whole = found.cpu().numpy()
    if whole.size and whole.max() > np.iinfo(np.int64).max:
        raise error(f"{name} reaches {whole.max()}; wanted whole numbers below 2**63")
    return whole.astype(np.int64)


def _check_finite(sizes: npt.NDArray[Any]) -> None:
    if not np.isfinite(sizes).all():
        place = int(np.argmin(np.isfinite(sizes)))
        raise DataError(f"sample {place} has size {sizes[place]}; wanted a finite number")


def _bounds(found: Tensor) -> list[float]:
    """The bounds, sorted, as Python's numbers."""
    bounds = sorted(_numbers("bucket_boundaries", found, ConfigError).tolist())
    if len(bounds) < 2:
        raise ConfigError(f"{len(bounds)} bucket_boundaries; wanted at least 2, the bounds of 1 bucket")
    if any(bound != bound for bound in bounds):
        raise ConfigError("bucket_boundaries contain a NaN; wanted real numbers")
    twice = [bound for bound, following in pairwise(bounds) if bound == following]
    if twice:
        raise ConfigError(f"bucket_boundaries contain {twice[0]} twice; wanted each bound once")
    return bounds


def _bucket_of(sizes: npt.NDArray[Any], bounds: list[float]) -> npt.NDArray[np.int64]:
    """The bucket of each size; −1 below the first bound, ``K`` from the last one on."""
    if np.issubdtype(sizes.dtype, np.integer):
        # A whole number reaches a bound where it reaches the next whole number: no rounding to floats.
        limits = np.iinfo(np.int64)
        reached = [math.ceil(max(bound, limits.min)) for bound in bounds if bound <= limits.max]
        return np.searchsorted(np.array(reached, dtype=np.int64), sizes, side="right") - 1
    return np.searchsorted(np.array(bounds, dtype=np.float64), sizes, side="right") - 1


def _kwargs_per_bucket(
    shared: dict[str, Any] | None, individual: dict[str, Iterable[Any]] | None, buckets: int
) -> list[dict[str, Any]]:
    """The keyword arguments of each bucket's base sampler."""
    for name, found in (("shared", shared), ("individual", individual)):
        if found is not None and not (isinstance(found, dict) and all(isinstance(key, str) for key in found)):
            raise ConfigError(
                f"base_batch_sampler_{name}_kwargs is {found!r}; wanted a dictionary of keyword arguments"
            )
    values = {key: _list(key, value) for key, value in (individual or {}).items()}
    for key, value in values.items():
        if len(value) != buckets:
            raise ConfigError(f"{len(value)} values of {key!r} for {buckets} buckets; wanted one for each")
    return [{**(shared or {}), **{key: value[bucket] for key, value in values.items()}} for bucket in range(buckets)]


def _list(key: str, value: Iterable[Any]) -> list[Any]:
    if not isinstance(value, Iterable):
        raise ConfigError(f"the values of {key!r} are {value!r}; wanted one for each bucket")
    return list(value)
