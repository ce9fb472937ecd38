"""Learning rates over the course of a training, as a factor that travels with the packets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

Decay: TypeAlias = Literal["none", "cosine"]
Per: TypeAlias = Literal["batch", "epoch"]


def cosine(base: float, end: float, share: float) -> float:
    """Half a cosine from ``base`` to ``end``, as published: ``base·q + end·(1 − q)`` with ``q = (1 + cos π·share)/2``.

    >>> cosine(1.0, 0.0, 0.0), cosine(1.0, 0.5, 1.0)
    (1.0, 0.5)
    """
    q = 0.5 * (1 + math.cos(math.pi * share))
    return base * q + end * (1 - q)


def epoch_scale(
    decay: Decay,
    per: Per,
    *,
    end_over_base: float,
    warmup: int = 0,
    epoch: int,
    epochs: int,
    batches: int,
    first_batch: int,
) -> Callable[[int], float]:
    """The factor for each batch of an epoch, as a function of the batch number.

    Args:
        decay: ``none`` or ``cosine``.
        per: Whether the factor changes with every batch or with every epoch.
        end_over_base: The last learning rate over the first.
        warmup: The number of batches over which the factor rises to its course from nothing.
        epoch: This epoch, from 0.
        epochs: How many there are.
        batches: How many batches this epoch has.
        first_batch: The number of this epoch's first batch.
    """

    def scale(batch: int) -> float:
        risen = min(1.0, (batch + 1) / warmup) if warmup else 1.0
        if decay == "none":
            return risen
        within = (batch - first_batch) / batches if per == "batch" else 0.0
        return risen * cosine(1.0, end_over_base, (epoch + within) / epochs)

    return scale
