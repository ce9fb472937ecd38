"""Drivers of inference: one thread per stage, so that several batches are under way at once.

::

    caller ── trip 4 ──► [stage 0] ⇄ [stage 1] ⇄ [stage 2]      each thread makes the visits in the order in which they
       ▲                  trip 3      trip 1      trip 2        come to it, and hands each trip to where it goes next
       └── trip 0 ◄──────────┘

A visit waits for nothing but its stage's thread, and a trip for nothing but its visit: nothing can deadlock. What is
under way is bounded by the caller. Every wait ends: by what it waits for, or because of :meth:`Drivers.stop`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from pipeal.core.errors import StallError, add_note
from pipeal.core.options import EngineOptions
from pipeal.engine.execution.channel import Link, Stopped
from pipeal.engine.execution.executors import StageThreads
from pipeal.engine.execution.worker import TICK_S, SharedProgress, StageThread
from pipeal.engine.inference.trips import Arrived, Trip, Visit, make
from pipeal.engine.stage import Stage


class Drivers(StageThreads):
    """One thread per stage; ``with`` it.

    Args:
        stages: The stages that the trips lead to.
        options: With the intra-op threads of each thread on a CPU.
    """

    def __init__(self, stages: Sequence[Stage], options: EngineOptions) -> None:
        self._inboxes = {stage.number: Link(0) for stage in stages}  # bounded by how many trips are under way
        self._arrived: dict[int, Arrived] = {}
        progress = SharedProgress(0, list(self._inboxes.values()))
        threads = [StageThread("inference", stage, progress, self._inboxes[stage.number], options) for stage in stages]
        self._thread_of = {thread.stage.number: thread for thread in threads}
        super().__init__(threads, progress, options)

    def __enter__(self) -> Drivers:
        self.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Ends the threads, without finishing what is under way."""
        try:
            self.stop()
        except StallError as left_behind:
            if error is None or isinstance(error, GeneratorExit):
                raise
            add_note(error, str(left_behind))

    def drive(self, trips: Iterable[Trip], most: int) -> Iterator[Arrived]:
        """Sets trips on their way, and yields what they bring, in order.

        Args:
            trips: Taken one at a time, as there is space.
            most: How many may be under way, those included that have arrived and are not yet yielded.

        Raises:
            Exception: Whatever a stage raised first, with a note of stage, layer, batch, device and shapes.
            StallError: No stage made progress for ``stall_timeout_s``.
        """
        due = sent = 0
        for trip in trips:
            with suppress(Stopped):  # a stage has failed, as the wait for the next arrival will say
                self._call_at(_Call(sent, trip, next(trip), self))
            sent += 1
            while sent - due >= most or due in self._arrived:
                yield self._result(due)
                due += 1
        while due < sent:
            yield self._result(due)
            due += 1

    def make(self, call: _Call, stage: Stage) -> None:
        """On the thread of a stage: makes a visit there and those that follow on it, then hands the trip on.

        Raises:
            Stopped: The threads are to end.
        """
        thread = self._thread_of[stage.number]
        while call.visit.stage is stage:
            thread.doing = (call.visit.does, perf_counter())
            arrived = make(call.visit)
            try:
                call.visit = call.trip.send(arrived)
            except StopIteration as end:
                self._arrived[call.number] = end.value
                self.progress.wake()
                return
        self._call_at(call)

    def _call_at(self, call: _Call) -> None:
        self._inboxes[call.visit.stage.number].push(call)

    def _result(self, number: int) -> Arrived:
        if number not in self._arrived:  # what has arrived is given out, also after a failure
            self.wait(lambda: self.progress.wait_until(lambda: number in self._arrived, TICK_S), "predicting")
        return self._arrived.pop(number)


@dataclass(eq=False)
class _Call:
    """The next visit of a trip: a :class:`~pipeal.engine.execution.channel.Request` to the thread of its stage."""

    number: int
    trip: Trip
    visit: Visit
    drivers: Drivers
    goes_on = False

    @property
    def does(self) -> str:
        return self.visit.does

    def __call__(self, stage: Stage) -> None:
        self.drivers.make(self, stage)
