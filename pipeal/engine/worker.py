"""The threads: one worker per stage, bounded links between them, and one place where failure is known.

::

    caller ──link──► worker 0 ──link──► worker 1 ──link──► … worker S-1
                        └───────────────┴── Ledger ───┘
              (who has ended what, who failed first, who stands still)

Every wait in this module ends: by what it waits for, or because :meth:`Ledger.stop` was called.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Sized
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Protocol

import torch

from pipeal.engine.gate import GATE
from pipeal.engine.schedule import Action, Schedule, Task
from pipeal.engine.stage import Parcel, Stage
from pipeal.errors import StallError

ACTIONS = (Action.FORWARD, Action.BACKWARD, Action.UPDATE)

TICK_S = 0.2
"""How often one who waits for threads looks whether they still move."""


class Stopped(Exception):  # noqa: N818  not an error: the way out of a wait
    """The pipeline was told to stop."""


class Link:
    """A bounded queue between two threads that can be closed from any other.

    Args:
        depth: How many parcels may wait in it.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._parcels: deque[Parcel] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, parcel: Parcel, timeout_s: float | None = None) -> bool:
        """Adds a parcel as soon as there is space; False if there was none in time.

        Raises:
            Stopped: The link was closed.
        """
        with self._changed:
            there = self._changed.wait_for(lambda: self._closed or len(self._parcels) < self.depth, timeout_s)
            if self._closed:
                raise Stopped
            if there:
                self._parcels.append(parcel)
                self._changed.notify_all()
            return there

    def get(self) -> Parcel:
        """Takes the oldest parcel as soon as there is one.

        Raises:
            Stopped: The link was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._parcels))
            if self._closed:
                raise Stopped
            self._changed.notify_all()
            return self._parcels.popleft()

    def close(self) -> None:
        """Wakes everyone who waits and lets nobody wait again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Ledger:
    """What all threads of a pipeline know together: tasks ended, the first failure, the order to stop.

    Args:
        stages: The number of stages.
        links: Closed by :meth:`stop`.
    """

    def __init__(self, stages: int, links: list[Link]) -> None:
        self.stages = stages
        self.failure: BaseException | None = None
        self.changed_at = perf_counter()
        self._links = links
        self._ended = {(stage, action): 0 for stage in range(stages) for action in ACTIONS}
        self._waiters = 0
        self._stopped = False
        self._changed = threading.Condition()

    def end(self, task: Task) -> None:
        """Notes that a task has ended."""
        with self._changed:
            self._ended[task.stage, task.action] = task.batch + 1
            self.changed_at = perf_counter()
            if self._waiters:
                self._changed.notify_all()

    def has_ended(self, tasks: tuple[Task, ...]) -> bool:
        """Whether all of ``tasks`` have ended."""
        return all(self._ended[task.stage, task.action] > task.batch for task in tasks)

    def wait(self, tasks: tuple[Task, ...], timeout_s: float | None = None) -> bool:
        """Waits until all of ``tasks`` have ended; False if they had not in time.

        Raises:
            Stopped: :meth:`stop` was called.
        """
        with self._changed:
            self._waiters += 1
            try:
                there = self._changed.wait_for(lambda: self._stopped or self.has_ended(tasks), timeout_s)
            finally:
                self._waiters -= 1
            if self._stopped:
                raise Stopped
            return there

    def fail(self, error: BaseException) -> None:
        """Keeps the first failure, and stops everyone."""
        with self._changed:
            if self.failure is None:
                self.failure = error
        self.stop()

    def stop(self) -> None:
        """Ends every wait, now and from now on."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for link in self._links:
            link.close()


class Worker(threading.Thread):
    """Carries out one stage's tasks, in their order, each as soon as the schedule allows.

    Args:
        stage: The stage.
        schedule: What may run after what.
        ledger: Shared with the other workers.
        inbox: Where parcels come from.
        outbox: Where they go; None for the last stage.
        threads: Intra-op threads of this worker on a CPU; None leaves PyTorch's setting.
    """

    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        ledger: Ledger,
        inbox: Link,
        outbox: Link | None,
        threads: int | None,
    ) -> None:
        # A daemon: a stage that hangs in foreign code must not keep the process alive.
        super().__init__(name=f"pipeal-stage-{stage.number}", daemon=True)
        self.stage = stage
        self.schedule = schedule
        self.ledger = ledger
        self.inbox = inbox
        self.outbox = outbox
        self.threads = threads
        self.doing: tuple[str, float] = ("starting", perf_counter())

    def run(self) -> None:
        """Works until the ledger is closed. The first exception of any worker goes to the caller."""
        try:
            if self.threads is not None:
                torch.set_num_threads(self.threads)
            while True:
                with self._waiting("input"):
                    parcels = [self.inbox.get()]
                self._work_on(parcels)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  handed to the caller, whatever it is
            self.ledger.fail(error)

    def _work_on(self, parcels: list[Parcel]) -> None:
        """Empties its one-element argument: a worker that waits for space must not hold its input as well."""
        sequence = parcels[0].sequence
        onward = self._do(Action.FORWARD, sequence, parcels.pop())
        if self.outbox is not None:
            assert onward is not None
            with self._waiting("space"):
                self.outbox.put(onward)
        del onward
        self._do(Action.BACKWARD, sequence)
        self._do(Action.UPDATE, sequence)

    def _do(self, action: Action, sequence: int, parcel: Parcel | None = None) -> Parcel | None:
        task = Task(sequence, self.stage.number, action)
        before = self.schedule.after(task, self.ledger.stages)
        if not self.ledger.has_ended(before):
            with self._waiting("join"):
                self.ledger.wait(before)
        self.doing = (str(task), perf_counter())
        onward = self.stage.run(action, parcel)
        self.ledger.end(task)
        return onward

    def _waiting(self, reason: str) -> AbstractContextManager[None]:
        self.doing = (f"waiting for {reason}", perf_counter())
        return self.stage.clock.waiting(reason)


class Watched(Protocol):
    """A thread of a stage, as whoever waits for it sees it."""

    @property
    def stage(self) -> Stage:
        """Whose thread it is."""
        ...

    @property
    def doing(self) -> tuple[str, float]:
        """What it does, and since when."""
        ...

    @property
    def inbox(self) -> Sized:
        """What waits for it."""
        ...

    @property
    def ident(self) -> int | None:
        """The thread's number; None before it has started."""
        ...

    def is_alive(self) -> bool:
        """Whether it runs."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        ...


def wait_for_end(threads: Iterable[Watched], timeout_s: float) -> None:
    """Waits for threads that were told to stop; for as long as one compiles, which may take minutes, at no charge.

    Args:
        threads: Those that have started.
        timeout_s: How long all may take together.

    Raises:
        StallError: A thread did not come back; it is left behind, as a daemon.
    """
    started = [thread for thread in threads if thread.ident is not None]
    until = perf_counter() + timeout_s
    for thread in started:
        while thread.is_alive() and perf_counter() < until:
            thread.join(min(TICK_S, max(0.0, until - perf_counter())))
            if GATE.busy():
                until = perf_counter() + timeout_s
    left = [thread for thread in started if thread.is_alive()]
    if left:
        raise stall_report(left, timeout_s)


def stall_report(threads: Iterable[Watched], timeout_s: float) -> StallError:
    """Names the stage that stands still and shows where every thread is."""
    now = perf_counter()
    workers = list(threads)
    acting = [worker for worker in workers if not worker.doing[0].startswith("waiting")]
    oldest = min(acting or workers, key=lambda worker: worker.doing[1])
    frames = sys._current_frames()
    lines = [
        f"stage {oldest.stage.number} stands still: {oldest.doing[0]} for {now - oldest.doing[1]:.1f} s on "
        f"{oldest.stage.device} (limit {timeout_s:g} s without progress)"
    ]
    for worker in workers:
        what, since = worker.doing
        lines.append(f"stage {worker.stage.number}: {what}, for {now - since:.1f} s, {len(worker.inbox)} waiting")
        frame = frames.get(worker.ident or 0)
        if frame is not None:
            lines += ["".join(traceback.format_stack(frame)).rstrip()]
    return StallError("\n".join(lines))
