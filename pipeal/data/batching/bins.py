"""Which bins of a stream the next batch comes from, and how many samples it takes: by their counts alone."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeal.data.batching.cuts import SortedSamples

_OVERHEAD = 1 / 8
"""What a batch costs besides its tokens, as a share of a full one: weighs fewer batches against less padding."""

_Ints: TypeAlias = npt.NDArray[np.int64]


def least_wasteful(held: _Ints, bounds: _Ints, fits: _Ints, must: int | None = None) -> tuple[int, int]:
    """The bin to begin a batch with, and its size, so that real tokens are most of what the batch costs.

    Args:
        held: ``(K,)``, how many samples wait in each bin.
        bounds: ``(K,)``, rising: the greatest length that each bin takes.
        fits: ``(K,)``, how many samples a batch of each bound can hold.
        must: A bin of which at least one sample has to be in the batch.

    >>> held, bounds, fits = np.array([3, 1]), np.array([2, 4]), np.array([4, 2])
    >>> least_wasteful(held, bounds, fits), least_wasteful(held, bounds, fits, must=1)
    ((0, 3), (1, 1))
    """
    best, choice = 0.0, (0, 0)
    for top in np.flatnonzero(held).tolist():
        # Down to each bin below: how many samples, the last bin perhaps in part, and their tokens.
        room = int(fits[top])
        counts = np.minimum(np.cumsum(held[top::-1]), room)
        tokens = np.cumsum(np.diff(counts, prepend=0) * bounds[top::-1])
        wasted = counts * bounds[top] - tokens + _OVERHEAD * room * bounds[top]
        gains = counts / wasted
        if must is not None:
            if must > top or (must < top and counts[top - must - 1] >= room):
                continue
            gains[: top - must] = 0
        down_to = int(gains.argmax())
        if gains[down_to] > best:
            best, choice = float(gains[down_to]), (top, int(counts[down_to]))
    return choice


def first_of_the_rest(held: _Ints, bounds: _Ints, fits: _Ints) -> tuple[int, int]:
    """The first batch of a plan for all that waits: its bin, and its size. Arguments as for :func:`least_wasteful`."""
    rest = SortedSamples(np.repeat(bounds[::-1], held[::-1]), np.repeat(fits[::-1], held[::-1]))
    fewest = rest.fewest()
    # A few more batches than the fewest pad less.
    batches = min(fewest + int(fewest * _OVERHEAD), int(held.sum()))
    return int(np.flatnonzero(held)[-1]), int(rest.least_padding(rest.windows(batches), batches)[1])
