"""Which of some candidates is fastest, found within a bound: decided from times alone; the caller measures.

A candidate is first timed on two batches. One that then takes twice as long as the best is dropped; the others go on,
to ten batches if there is time. Those that come close to the best are timed once more before any of them is believed.
One whose first batch, which warms up, takes four times as long as those of the best is dropped at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Generic, Protocol, TypeVar

MOST_S = 20.0
"""The longest that trials may take, in seconds."""

SHARE = 0.05
"""Of the expected time of the run, the share that they may take."""

LOOK_AFTER = 2
"""Batches after which a candidate may be dropped."""

MOST = 10
"""The most batches that a candidate is timed on."""

HOPELESS = 2.0
"""So many times as long as the best: dropped. Twice that, as long as it warms up."""

CLOSE = 1.1
"""So many times as long as the best: timed once more."""

Candidate = TypeVar("Candidate")


class More(Protocol):
    """How much more of a candidate is timed."""

    def __call__(self, seconds: float, warm: bool = True) -> int:
        """Told the seconds per batch so far, of a batch that warms up or of those after it, says how many to time yet.

        None where it is dropped; as it warms up, :data:`LOOK_AFTER` or none.
        """


class TimeLimit:
    """How long trials may take: :data:`MOST_S`, or :data:`SHARE` of the run's expected time if that is less.

    Args:
        run_batches: How many batches the run will train on; None where that is not known.
        clock: Seconds that only grow.
    """

    def __init__(self, run_batches: int | None = None, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._run_batches = run_batches
        self._fastest_s = inf

    def learn(self, seconds_per_batch: float) -> None:
        """Takes how long a batch takes; that of the fastest counts."""
        self._fastest_s = min(self._fastest_s, seconds_per_batch)

    @property
    def bound_s(self) -> float:
        """All of it, as far as is known by now."""
        if self._run_batches is None or self._fastest_s == inf:
            return MOST_S
        return min(MOST_S, SHARE * self._run_batches * self._fastest_s)

    @property
    def spent_s(self) -> float:
        """Since this was made."""
        return self._clock() - self._begin

    @property
    def left_s(self) -> float:
        """What is left; 0 when it is over."""
        return max(0.0, self.bound_s - self.spent_s)


@dataclass
class Times(Generic[Candidate]):
    """What a candidate took.

    Attributes:
        candidate: What was timed.
        rounds: Seconds per batch, each time that it was timed to the end.
        dropped_s: Seconds per batch where it was dropped after :data:`LOOK_AFTER`.
    """

    candidate: Candidate
    rounds: list[float] = field(default_factory=list)
    dropped_s: float | None = None

    @property
    def seconds(self) -> float:
        """Per batch, of the best round."""
        return min(self.rounds) if self.rounds else inf if self.dropped_s is None else self.dropped_s


Measure = Callable[[Candidate, More], float]
"""Times a candidate on a batch that warms up, on :data:`LOOK_AFTER` batches and as many as it is then told, asking
before either; gives seconds per batch."""


class Trials(Generic[Candidate]):
    """Times candidates, the first two in any case, the others while there is time.

    Args:
        measure: Times one; may raise what :attr:`left_out` is told of.
        limit: How long all of it may take.
        rounds: How often those that are close to the best are timed, at most.
        left_out: Whether a candidate that failed is left out; otherwise its error is raised.
    """

    def __init__(
        self,
        measure: Measure[Candidate],
        limit: TimeLimit,
        *,
        rounds: int = 2,
        left_out: Callable[[Candidate, Exception], bool] = lambda _, __: False,
    ) -> None:
        self.times: list[Times[Candidate]] = []
        self._measure = measure
        self._limit = limit
        self._rounds = rounds
        self._left_out = left_out

    def run(self, candidates: Iterable[Candidate], count: int) -> None:
        """Times some more candidates, of which there are about so many, those first that are likely to be fastest.

        Each is asked for when those before it have been timed, so that it may follow from what they took.
        """
        for number, candidate in enumerate(candidates):
            if len(self.times) >= 2 and not self._has_time():
                return
            times = Times(candidate)
            if self._time(times, still=max(1, count - number)):
                self.times.append(times)

    def repeat(self) -> None:
        """Times those once more that are close to the best, in turns, while there is time."""
        while len(close := self._close()) > 1:
            again = [times for times in close if len(times.rounds) < self._rounds]
            if not again:
                return
            for number, times in enumerate(again):
                if not self._has_time():
                    return
                if not self._time(times, still=len(again) - number):
                    self.times.remove(times)

    @property
    def best(self) -> Times[Candidate]:
        """The fastest; of those that are close to it and could not be timed twice, the first that was tried.

        Raises:
            ValueError: There is none.
        """
        close = self._close()
        if len(close) > 1 and self._rounds > 1 and any(len(times.rounds) < 2 for times in close):
            return close[0]
        return min(self.times, key=lambda times: times.seconds)

    def _has_time(self) -> bool:
        """Whether what is left suffices for the fewest batches of one that is as fast as the best."""
        fewest = 1 + LOOK_AFTER
        return self._limit.left_s >= fewest * min(times.seconds for times in self.times)

    def _close(self) -> list[Times[Candidate]]:
        best = min((times.seconds for times in self.times), default=inf)
        return [times for times in self.times if times.rounds and times.seconds <= CLOSE * best]

    def _time(self, times: Times[Candidate], *, still: int) -> bool:
        """Whether it could be timed; ``still`` is how many are to come, itself included."""
        best = min((other.seconds for other in self.times), default=inf)
        dropped = False

        def more(seconds: float, warm: bool = True) -> int:
            nonlocal dropped
            dropped = seconds >= (HOPELESS if warm else 2 * HOPELESS) * best
            if dropped or not warm:
                return 0 if dropped else LOOK_AFTER
            self._limit.learn(seconds)
            return int(min(self._limit.left_s / still / max(seconds, 1e-9), MOST - LOOK_AFTER))

        try:
            seconds = self._measure(times.candidate, more)
        except Exception as error:  # the caller says which are left out
            if self._left_out(times.candidate, error):
                return False
            raise
        self._limit.learn(seconds)
        if dropped:
            times.dropped_s = seconds
        else:
            times.rounds.append(seconds)
        return True
