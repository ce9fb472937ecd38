"""Cutting a stream into batches that fit: a sample joins the open batch, or closes it and opens the next."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeal.core.errors import ConfigError, DataError, a_type
from pipeal.data.checks import one_of

__all__ = ["SizeTypeError"]

Cost: TypeAlias = Literal["sum", "padded"] | Callable[[int, float], float]
"""What a batch costs: the sum of its sizes, ``n × longest``, or any function of ``(n, longest)``."""

Oversize: TypeAlias = Literal["raise", "drop", "single"]
"""What to do with a sample that alone is over the limit: raise, drop (and count) it, or batch it alone."""

SizeOf: TypeAlias = Callable[[Any], Any] | Mapping[Any, Any] | Sequence[Any] | np.ndarray[Any, Any] | Tensor
Log: TypeAlias = Callable[[str], None]
_T = TypeVar("_T")


class SizeTypeError(ConfigError, TypeError):
    """Something of the wrong kind was given for sizes or for the samples to batch."""


@dataclass
class Tally:
    """What one pass has cut so far.

    Attributes:
        batches: Batches given out.
        samples: Samples in them.
        dropped: Samples left out because they alone are over the limit.
        first_dropped: The first of those, in words.
    """

    batches: int = 0
    samples: int = 0
    dropped: int = 0
    first_dropped: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.batches} batches of {self.samples} samples, {self.dropped} dropped"


class Packer:
    """Cuts any stream, in its order, into batches that cost ``limit`` at most.

    Sizes may be whole or floating numbers of any type, also of numpy and PyTorch: they are added up as Python's own,
    which do not overflow.

    Args:
        limit: The most that a batch may cost; above 0.
        cost: What a batch costs; a function must not fall when ``n`` or ``longest`` rises.
        oversize: What becomes of a sample that costs more than ``limit`` alone.

    Raises:
        ConfigError: A limit that is not a number above 0, an unknown cost or policy.
    """

    def __init__(self, limit: float, cost: Cost = "sum", oversize: Oversize = "drop") -> None:
        self.limit = above_zero("the limit of a batch (max_total_size)", limit)
        self.oversize: Oversize = one_of("oversize", oversize, Oversize)
        if cost not in ("sum", "padded") and not callable(cost):
            raise ConfigError(f"cost is {cost!r}; wanted 'sum', 'padded' or a function of (n, longest)")
        self.cost = cost

    @property
    def options(self) -> tuple[object, ...]:
        """Its arguments, with a stable ``repr``: of a cost function only the name."""
        cost = self.cost if isinstance(self.cost, str) else getattr(self.cost, "__qualname__", type(self.cost).__name__)
        return self.limit, cost, self.oversize

    def cost_of(self, sizes: Sequence[Any]) -> float:
        """What a batch of these sizes costs.

        >>> Packer(9, "padded").cost_of([1, 2, 3])
        9
        """
        if self.cost == "sum":
            return sum(size if type(size) in _PLAIN else as_size(size, place) for place, size in enumerate(sizes))
        return self._cost_of(len(sizes), as_size(max(sizes), "of the largest size"))

    def pack(
        self,
        data: Iterable[_T],
        sizes: Iterable[Any],
        tally: Tally,
        *,
        by_position: bool = False,
        info: Log | None = None,
        warn: Log | None = None,
    ) -> Iterator[list[_T]]:
        """Yields the batches; a batch is out before the size of the sample after next is asked for.

        Args:
            data: The samples, or their indices.
            sizes: The size of each.
            tally: Kept up to date.
            by_position: Messages name a sample by its position in the stream, not by itself.
            info: Is told at the end what was cut.
            warn: Is told of each dropped sample; without it, one Python warning at the end counts them.

        Raises:
            DataError: A size that is negative or not finite; a sample over the limit, if that is to be raised.
            SizeTypeError: A size that is no number.
        """
        try:
            yield from self._cut(data, sizes, tally, by_position, warn)
        finally:
            if tally.dropped and warn is None:
                warnings.warn(f"{tally.dropped} samples were dropped, the first: {tally.first_dropped}", stacklevel=2)
            if info is not None:
                info(str(tally))

    def _cut(
        self, data: Iterable[_T], sizes: Iterable[Any], tally: Tally, by_position: bool, warn: Log | None
    ) -> Iterator[list[_T]]:
        # A loop for millions of samples: what it reads is local, and it calls nothing that it need not.
        limit, plain, infinite = self.limit, _PLAIN, math.inf
        summed, grown_by = self.cost == "sum", self.cost if callable(self.cost) else None
        batch: list[_T] = []
        cost: float = 0
        longest: float = 0
        for position, (sample, size) in enumerate(zip(data, sizes, strict=True)):
            if type(size) not in plain or not 0 <= size < infinite:
                size = as_size(size, position if by_position else sample)
            taller = size if size > longest else longest
            if summed:
                grown = cost + size
            elif grown_by is None:
                grown = (len(batch) + 1) * taller
            else:
                grown = grown_by(len(batch) + 1, taller)
                if type(grown) not in plain or not grown >= 0:
                    grown = as_cost(grown, len(batch) + 1, taller)
            if grown <= limit:
                batch.append(sample)
                cost = grown
                longest = taller
                continue
            alone = grown if not batch else self._cost_of(1, size)
            if alone > limit and self.oversize != "single":
                self._refuse(position if by_position else sample, size, alone, tally, warn)
                continue
            if batch:
                tally.batches += 1
                tally.samples += len(batch)
                yield batch
            # One that is over the limit alone is closed by the next sample, whatever that costs.
            batch, cost, longest = [sample], alone, size
        if batch:
            tally.batches += 1
            tally.samples += len(batch)
            yield batch

    def _cost_of(self, n: int, longest: float) -> float:
        """The cost of ``n`` samples; of one if it is the sum."""
        return as_cost(self.cost(n, longest), n, longest) if callable(self.cost) else n * longest

    def _refuse(self, name: object, size: float, alone: float, tally: Tally, warn: Log | None) -> None:
        costs = "" if alone == size else f" and costs {alone} alone"
        found = f"sample {name} has size {size}{costs}, more than the limit of {self.limit}"
        if self.oversize == "raise":
            raise DataError(f"{found}; raise the limit, cut the sample, or choose oversize='drop' or 'single'")
        tally.dropped += 1
        tally.first_dropped = tally.first_dropped or found
        if warn is not None:
            warn(f"{found}: dropped")


class Sizes:
    """The sizes of samples, from a function, a mapping, a sequence or an array.

    Raises:
        SizeTypeError: It is none of these.
    """

    def __init__(self, sizeof: SizeOf) -> None:
        if isinstance(sizeof, (np.ndarray, Tensor)):
            if sizeof.ndim != 1:
                shape = tuple(sizeof.shape)
                raise SizeTypeError(f"sizeof is an array of shape {shape}; wanted one size per sample, (N,)")
            sizeof = sizeof if isinstance(sizeof, np.ndarray) else _as_array(sizeof)
        elif not callable(sizeof) and (not isinstance(sizeof, (Mapping, Sequence)) or isinstance(sizeof, (str, bytes))):
            raise SizeTypeError(f"sizeof is {a_type(sizeof)}; wanted a function, a mapping or a sequence of sizes")
        self._from: Any = sizeof

    def of(self, samples: Iterable[Any]) -> Iterator[Any]:
        """The size of each, as it is asked for.

        Raises:
            DataError: A mapping, sequence or array has none for a sample.
            SizeTypeError: None can be looked up there by such a sample.
        """
        return map(self._from if callable(self._from) else self._looked_up, samples)

    def of_all(self, indices: list[int]) -> Iterator[Any]:
        """The same for indices that are all known, which are looked up at once where that runs no code of others.

        An array is not made into a list of Python's numbers beforehand: each of many buckets that share it would.
        """
        with suppress(LookupError):  # looked up one by one, the one that has no size is named
            if isinstance(self._from, np.ndarray):
                return iter(self._from[np.fromiter(indices, np.int64, len(indices))].tolist())
            if isinstance(self._from, (list, tuple, dict)):
                return iter([*map(self._from.__getitem__, indices)])
        return self.of(indices)

    def _looked_up(self, sample: Any) -> Any:
        try:
            return self._from[sample]
        except LookupError as error:
            raise DataError(f"no size for sample {sample!r} among {len(self._from)}; sizeof must cover all") from error
        except TypeError as error:
            raise SizeTypeError(
                f"no size of {a_type(sample)} can be looked up in {a_type(self._from)}; wanted a "
                "function that gives the size of a sample"
            ) from error


def _as_array(found: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as numpy has it; what numpy has no type for (bfloat16) becomes a wider one."""
    found = found.detach().cpu()
    return found.double().numpy() if found.dtype == torch.bfloat16 else found.numpy()


def as_size(size: Any, name: object) -> float:
    """A size as a Python number of unlimited range, checked.

    Raises:
        DataError: It is negative or not finite.
        SizeTypeError: It is no number.

    >>> as_size(np.uint8(200), 0) * 2
    400
    """
    number = as_number(size)
    if number is None:
        raise SizeTypeError(f"sample {name} has size {size!r}, {a_type(size)}; wanted a number")
    if not 0 <= number < math.inf:
        raise DataError(f"sample {name} has size {number}; wanted a finite size of at least 0")
    return number


def as_number(value: Any) -> float | None:
    """An ``int`` or ``float`` (a fraction stays one) from a number of any library, or None."""
    if isinstance(value, (np.ndarray, np.generic, Tensor)):
        if value.size != 1 if isinstance(value, (np.ndarray, np.generic)) else value.numel() != 1:
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, Fraction):
        return value  # type: ignore[return-value]  # adds up and compares with the others
    return int(value) if isinstance(value, Integral) else float(value)


def as_cost(found: Any, n: int, longest: float) -> float:
    """What a cost function gave for ``n`` samples, checked.

    Raises:
        ConfigError: It is no number of at least 0.
    """
    number = as_number(found)
    if number is None or math.isnan(number) or number < 0:
        raise ConfigError(f"cost({n}, {longest}) gave {found!r}; wanted a number of at least 0")
    return number


_PLAIN = frozenset((int, float))


def above_zero(name: str, limit: Any) -> float:
    """A limit as a Python number.

    Raises:
        ConfigError: It is no number above 0.
    """
    number = as_number(limit)
    if number is None or not number > 0:
        raise ConfigError(f"{name} is {limit!r}; wanted a number above 0")
    return number
