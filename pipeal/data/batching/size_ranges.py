"""Ranges of size: bounds, cut from the sizes of samples, and which samples lie between them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeal.core.errors import ConfigError, DataError, a_type
from pipeal.data.checks import at_least

__all__ = ["Buckets", "create_buckets"]

_MOST_BUCKETS = 10**7


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
    found = real_numbers("sizes", sizes, DataError)
    if not found.size:
        raise DataError("no sizes; wanted at least 1")
    if not np.issubdtype(found.dtype, np.integer):
        raise DataError(f"sizes of type {sizes.dtype}; wanted whole numbers")
    width, enough = at_least("max_width", max_width, 1), at_least("min_bucket_count", min_bucket_count, 1)
    # Python's numbers: a distance between two int64 need not be one.
    values, counts = (part.tolist() for part in np.unique(found, return_counts=True))
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


def real_numbers(name: str, found: Tensor, error: type[ConfigError] | type[DataError]) -> npt.NDArray[Any]:
    """A 1-D tensor of real numbers as int64 or float64, exactly.

    Args:
        name: What a message calls it.
        found: The tensor.
        error: Is raised for anything else.
    """
    if not isinstance(found, Tensor):
        raise error(f"{name} is {a_type(found)}; wanted a 1-D tensor of real numbers")
    if found.ndim != 1 or found.dtype == torch.bool or found.is_complex():
        raise error(f"{name} is a tensor of shape {tuple(found.shape)} and {found.dtype}; wanted 1-D and real numbers")
    if found.is_floating_point():
        return found.detach().cpu().to(torch.float64).numpy()
    whole = found.cpu().numpy()
    if whole.size and whole.max() > np.iinfo(np.int64).max:
        raise error(f"{name} reaches {whole.max()}; wanted whole numbers below 2**63")
    return whole.astype(np.int64)


def rising_bounds(found: Tensor) -> list[float]:
    """The bounds, sorted, as Python's numbers.

    Raises:
        ConfigError: Fewer than two, one twice, or what is no 1-D tensor of real numbers.
    """
    bounds = sorted(real_numbers("bucket_boundaries", found, ConfigError).tolist())
    if len(bounds) < 2:
        raise ConfigError(f"{len(bounds)} bucket_boundaries; wanted at least 2, the bounds of 1 bucket")
    if any(bound != bound for bound in bounds):
        raise ConfigError("bucket_boundaries contain a NaN; wanted real numbers")
    twice = [bound for bound, following in pairwise(bounds) if bound == following]
    if twice:
        raise ConfigError(f"bucket_boundaries contain {twice[0]} twice; wanted each bound once")
    return bounds


def bucket_of(sizes: npt.NDArray[Any], bounds: list[float]) -> npt.NDArray[np.int64]:
    """The bucket of each size; −1 below the first bound, ``K`` from the last one on."""
    if np.issubdtype(sizes.dtype, np.integer):
        # A whole number reaches a bound where it reaches the next whole number: no rounding to floats.
        limits = np.iinfo(np.int64)
        reached = [math.ceil(max(bound, limits.min)) for bound in bounds if bound <= limits.max]
        return np.searchsorted(np.array(reached, dtype=np.int64), sizes, side="right") - 1
    return np.searchsorted(np.array(bounds, dtype=np.float64), sizes, side="right") - 1
