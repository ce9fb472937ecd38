"""Drivers of inference: one thread per stage, so that several batches are under way at once.

::

    caller ── trip 4 ──► [stage 0] ⇄ [stage 1] ⇄ [stage 2]      each thread makes the oldest visit that waits for it,
       ▲                  trip 3      trip 1      trip 2        then hands its trip to the stage where it goes next
       └── trip 0 ◄──────────┘

A visit waits for nothing but its stage's thread, and a trip for nothing but its visit: nothing can deadlock. What is
under way is bounded by whoever submits. Every wait ends: by what it waits for, or because of :meth:`Drivers.stop`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from time import perf_counter
from types import TracebackType

import torch

from pipeal.core.errors import StallError
from pipeal.core.options import EngineOptions
from pipeal.engine.devices.threads import set_intra_op_threads
from pipeal.engine.execution.channel import Stopped
from pipeal.engine.execution.executors import STOP_S
from pipeal.engine.execution.watchdog import stall_report, wait_for_end
from pipeal.engine.execution.worker import TICK_S, StageThread
from pipeal.engine.inference.trips import Arrived, Trip, Visit, make
from pipeal.engine.runner.compile_gate import GATE, Abandoned
from pipeal.engine.runner.error_context import add_note
from pipeal.engine.stage import Stage


class Drivers:
    """One thread per stage; ``with`` it.

    Args:
        stages: The stages that the trips lead to.
        options: With the intra-op threads of each thread on a CPU.

    Attributes:
        stopped: Set once the threads are to end; also ends a visit's wait for the compiler.
    """

    def __init__(self, stages: Sequence[Stage], options: EngineOptions) -> None:
        self.options = options
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._arrival = threading.Condition(self._lock)
        self._arrived: dict[int, Arrived] = {}
        self._failure: BaseException | None = None
        self._changed_at = perf_counter()
        self._drivers = {stage.number: _Driver(stage, self) for stage in stages}

    def __enter__(self) -> Drivers:
        # PyTorch keeps the last number set by any thread as the one that later threads begin with.
        self._threads_before = torch.get_num_threads()
        try:
            for driver in self._drivers.values():
                driver.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            self._put(sent, trip, next(trip))
            sent += 1
            while sent - due >= most or self._has_arrived(due):
                yield self._result(due)
                due += 1
        while due < sent:
            yield self._result(due)
            due += 1

    def stop(self) -> None:
        """Lets each thread end its current visit, and waits for them.

        Raises:
            StallError: A thread did not come back; it is left behind, as a daemon.
        """
        self._close()
        try:
            wait_for_end(self._drivers.values(), STOP_S)
        finally:
            torch.set_num_threads(self._threads_before)

    def _has_arrived(self, number: int) -> bool:
        with self._lock:
            return number in self._arrived

    def _result(self, number: int) -> Arrived:
        waiting_since, limit_s = perf_counter(), self.options.stall_timeout_s
        with self._lock:
            while number not in self._arrived:
                if self._failure is not None:
                    raise self._failure
                self._arrival.wait(TICK_S)
                if GATE.busy():  # a stage compiles, which may take minutes
                    waiting_since = perf_counter()
                still = perf_counter() - max(self._changed_at, waiting_since)
                if still > limit_s and number not in self._arrived:
                    raise stall_report(self._drivers.values(), limit_s, self.options.dump_folder, ["predicting"])
            return self._arrived.pop(number)

    def _put(self, number: int, trip: Trip, visit: Visit) -> None:
        driver = self._drivers[visit.stage.number]
        with self._lock:
            self._changed_at = perf_counter()
            heappush(driver.inbox, (number, trip, visit))
            driver.called.notify()

    def _arrive(self, number: int, arrived: Arrived) -> None:
        with self._lock:
            self._changed_at = perf_counter()
            self._arrived[number] = arrived
            self._arrival.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Keeps the first failure, and stops everyone."""
        with self._lock:
            if self._failure is None:
                self._failure = error
        self._close()

    def _close(self) -> None:
        with self._lock:
            self.stopped.set()
            self._arrival.notify_all()
            for driver in self._drivers.values():
                driver.called.notify_all()


class _Driver(StageThread):
    """Makes the visits to one stage."""

    def __init__(self, stage: Stage, drivers: Drivers) -> None:
        self.inbox: list[tuple[int, Trip, Visit]] = []
        super().__init__("inference", stage, self.inbox)
        self.drivers = drivers
        self.called = threading.Condition(drivers._lock)

    def run(self) -> None:
        """Works until the drivers are stopped. The first exception of any thread goes to the caller."""
        try:
            set_intra_op_threads(self.drivers.options.threads)
            with suppress(Stopped, Abandoned):
                while True:
                    self.doing = ("waiting for input", perf_counter())
                    self._drive(*self._next())
        except BaseException as error:  # noqa: BLE001  handed to the caller, whatever it is
            self.drivers._fail(error)

    def _next(self) -> tuple[int, Trip, Visit]:
        with self.called:
            self.called.wait_for(lambda: self.drivers.stopped.is_set() or bool(self.inbox))
            if self.drivers.stopped.is_set():
                raise Stopped
            return heappop(self.inbox)

    def _drive(self, number: int, trip: Trip, visit: Visit) -> None:
        """Makes a visit, and those that follow on the same stage; then lets the trip go."""
        while visit.stage is self.stage:
            if self.drivers.stopped.is_set():
                raise Stopped
            self.doing = (visit.does, perf_counter())
            arrived = make(visit)
            try:
                visit = trip.send(arrived)
            except StopIteration as end:
                self.drivers._arrive(number, end.value)
                return
        self.drivers._put(number, trip, visit)
