"""Learning rates over the course of a training, as a factor that travels with the packets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pipeal.config.schema import USUAL_RATE, Decay, Per

LONG_ENOUGH = 160
"""Updates that a run with the usual rate takes to learn."""

STEEPEST = 3.0
"""How many times the usual rate a shorter run takes, at most."""

WARM_UP_SHARE = 5
"""One in so many updates is warm-up ..."""

WARM_UP_MOST = 50
"""... until there are so many of them."""


@dataclass(frozen=True)
class Course:
    """How long to train, and with what learning rates.

    Attributes:
        epochs: Passes over the training batches.
        decay: The course of the learning rate.
        per: When it changes.
        end_over_base: The last learning rate over the first.
        warmup: Batches over which the learning rate rises from nothing.
        accumulate: Batches that one update learns from; those that an epoch ends with may be fewer.
    """

    epochs: int
    decay: Decay = "none"
    per: Per = "batch"
    end_over_base: float = 0.0
    warmup: int = 0
    accumulate: int = 1

    def to_come(self, done: int, batches: int) -> int:
        """How many batches of the update under way are to come, behind so many of an epoch of so many batches.

        >>> [Course(epochs=1, accumulate=3).to_come(done, batches=5) for done in range(5)]
        [3, 2, 1, 2, 1]
        """
        return min(self.accumulate - done % self.accumulate, batches - done)


class UsualCourse(NamedTuple):
    """What suits a run where nothing is given: its learning rate, and the updates over which it rises to that."""

    rate: float
    warmup: int


def usual_course(updates: int) -> UsualCourse:
    """The learning rate and the warm-up that suit a run of so many updates, in AL and in BP form.

    A short run makes up for its few updates by larger ones: down to a third of ``LONG_ENOUGH``, rate times updates
    stay what they are there. Two significant digits are enough of a rate.

    >>> usual_course(54)
    UsualCourse(rate=0.003, warmup=10)
    >>> usual_course(108), usual_course(270)
    (UsualCourse(rate=0.0015, warmup=21), UsualCourse(rate=0.001, warmup=50))
    """
    steeper = min(STEEPEST, max(1.0, LONG_ENOUGH / updates))
    return UsualCourse(float(f"{USUAL_RATE * steeper:.2g}"), min(WARM_UP_MOST, updates // WARM_UP_SHARE))


def cosine(base: float, end: float, share: float) -> float:
    """Half a cosine from ``base`` to ``end``, as published: ``base·q + end·(1 − q)`` with ``q = (1 + cos π·share)/2``.

    >>> cosine(1.0, 0.0, 0.0), cosine(1.0, 0.5, 1.0)
    (1.0, 0.5)
    """
    q = 0.5 * (1 + math.cos(math.pi * share))
    return base * q + end * (1 - q)


def epoch_scale(course: Course, epoch: int, batches: int, first_batch: int) -> Callable[[int], float]:
    """The factor for each batch of an epoch, as a function of the batch number.

    Args:
        course: That of the training.
        epoch: This epoch, from 0.
        batches: How many batches this epoch has.
        first_batch: The number of this epoch's first batch.
    """

    def scale(batch: int) -> float:
        risen = min(1.0, (batch + 1) / course.warmup) if course.warmup else 1.0
        if course.decay == "none":
            return risen
        within = (batch - first_batch) / batches if course.per == "batch" else 0.0
        return risen * cosine(1.0, course.end_over_base, (epoch + within) / course.epochs)

    return scale
