"""How many samples of a length fit into a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeal.core.errors import ConfigError
from pipeal.data.batching.packing import above_zero, as_cost

BatchCost: TypeAlias = Callable[[int, int], float]
"""What a batch of ``n`` samples costs whose longest has that length; falls with neither."""

_Ints: TypeAlias = npt.NDArray[np.int64]


def fitting(distinct: _Ints, budget: float, cost: BatchCost | None, most: int) -> _Ints:
    """How many samples a batch can hold whose longest has a certain length.

    Args:
        distinct: ``(m,)``, rising: the lengths.
        budget: The most that a batch may cost, above 0.
        cost: What it costs; by default its padded tokens, ``n × longest``. Called O(log n) times for each length.
        most: The most samples in any batch.

    Returns:
        ``(m,)``, not rising: 0 where not even one such sample fits, at most ``most``.

    Raises:
        ConfigError: A budget that is not above 0; a cost below 0, or one that falls as samples get longer.

    >>> fitting(np.array([2, 5, 20]), 16, None, 100)
    array([8, 3, 0])
    """
    number = above_zero("budget", budget)
    if cost is None:
        return np.minimum(min(number, np.iinfo(np.int64).max) // distinct, most).astype(np.int64)

    def within(n: int, longest: int) -> bool:
        return as_cost(cost(n, longest), n, longest) <= number

    fits = np.zeros(len(distinct), dtype=np.int64)
    at_least = 0
    for place, longest in reversed(list(enumerate(distinct.tolist()))):
        if at_least and not within(at_least, longest):
            raise ConfigError(
                f"cost({at_least}, {longest}) is {cost(at_least, longest)}, but as many longer samples cost at most "
                f"{budget:g}; wanted a cost that does not fall as samples get longer"
            )
        # A power of two steps up to the first number that is too many, then bisection below it.
        fitting, step = at_least, 1
        while fitting + step <= most and within(fitting + step, longest):
            fitting, step = fitting + step, 2 * step
        too_many = min(fitting + step, most + 1)
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            fitting, too_many = (middle, too_many) if within(middle, longest) else (fitting, middle)
        fits[place] = at_least = fitting
    return fits
