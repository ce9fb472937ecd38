"""The threads: one worker per stage, bounded links between them, and one place where failure is known.

::

    caller ──link──► worker 0 ──link──► worker 1 ──link──► … worker S-1
                        └───────────────┴── SharedProgress ───┘
              (who has ended what, who failed first, who stands still)

Every wait in this module ends: by what it waits for, or because :meth:`SharedProgress.stop` was called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

from pipeal.core.errors import ScheduleError
from pipeal.core.options import EngineOptions
from pipeal.core.packet import Packet
from pipeal.engine.devices.threads import set_intra_op_threads
from pipeal.engine.execution.channel import Item, Link, Request, Stopped
from pipeal.engine.runner.compile_gate import Abandoned
from pipeal.engine.schedule import Action, Schedule, Task
from pipeal.engine.stage import Stage
from pipeal.engine.state.snapshot import Snapshot

ACTIONS = tuple(Action)

TICK_S = 0.2
"""How often one who waits for threads looks whether they still move."""


class SharedProgress:
    """What all threads of a pipeline know together: tasks ended, the first failure, the order to stop.

    Args:
        stages: The number of stages.
        links: Closed by :meth:`stop`.

    Attributes:
        failure: The first one.
        changed_at: When something moved last.
        ending: Set by :meth:`stop`.
    """

    def __init__(self, stages: int, links: list[Link]) -> None:
        self.stages = stages
        self.failure: BaseException | None = None
        self.changed_at = perf_counter()
        self._links = links
        self._ended = {(stage, action): 0 for stage in range(stages) for action in ACTIONS}
        self._passed = [0] * stages
        self._snapshots: list[Snapshot] = []
        self._waiters = 0
        self.ending = threading.Event()
        self._changed = threading.Condition()

    def add_links(self, links: Iterable[Link]) -> None:
        """Has more links closed by :meth:`stop`."""
        self._links += links

    def end(self, task: Task) -> None:
        """Notes that a task has ended."""
        with self._changed:
            self._ended[task.stage, task.action] = task.batch + 1
            self.wake()

    def has_ended(self, tasks: tuple[Task, ...]) -> bool:
        """Whether all of ``tasks`` have ended."""
        return all(self._ended[task.stage, task.action] > task.batch for task in tasks)

    def wait(self, tasks: tuple[Task, ...], timeout_s: float | None = None) -> bool:
        """Waits until all of ``tasks`` have ended; False if they had not in time.

        Raises:
            Stopped: :meth:`stop` was called.
        """
        return self.wait_until(lambda: self.has_ended(tasks), timeout_s)

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self.ending.is_set()

    def moved(self) -> None:
        """Notes that something goes on that takes time, and is no task. Wakes no one."""
        self.changed_at = perf_counter()

    def wake(self) -> None:
        """Has those look again who :meth:`wait_until` something is so."""
        with self._changed:
            self.changed_at = perf_counter()
            if self._waiters:
                self._changed.notify_all()

    def expect(self, snapshot: Snapshot) -> None:
        """Takes note of a snapshot on its way, which :meth:`stop` is to end."""
        with self._changed:
            self.let_go()
            self._snapshots.append(snapshot)
            if self.stopped:
                snapshot.give_up(self._why(snapshot), ended=True)

    def end_snapshot(self, stage: int) -> None:
        """Notes that a stage has done with a snapshot."""
        with self._changed:
            self._passed[stage] += 1
            self.let_go()
            self.wake()

    def let_go(self) -> None:
        """Forgets the snapshots that every stage has come by: they are large, and their caller's."""
        with self._changed:
            self._snapshots = [other for other in self._snapshots if other.is_open]

    def wait_for_snapshots(self, count: int, timeout_s: float) -> bool:
        """Waits until every stage has done with ``count`` snapshots; otherwise as :meth:`wait`."""
        return self.wait_until(lambda: min(self._passed) >= count, timeout_s)

    def __str__(self) -> str:
        """How far each stage is, for a person who looks for why nothing moves."""
        # Without the lock: its holder may be what stands still.
        lines = []
        for stage in range(self.stages):
            ended = ", ".join(f"{action} of {self._ended[stage, action]}" for action in ACTIONS)
            lines.append(f"stage {stage} has ended {ended} batches, and passed {self._passed[stage]} snapshots")
        lines.append(f"told to stop: {self.stopped}; waiting for tasks: {self._waiters}; failure: {self.failure!r}")
        return "\n".join(lines)

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits until that is so, looking whenever something has moved; otherwise as :meth:`wait`."""
        with self._changed:
            self._waiters += 1
            try:
                there = self._changed.wait_for(lambda: self.stopped or ready(), timeout_s)
            finally:
                self._waiters -= 1
            if self.stopped:
                raise Stopped
            return there

    def _why(self, snapshot: Snapshot) -> BaseException:
        return self.failure or ScheduleError(f"the pipeline was stopped before every stage had come by the {snapshot}")

    def fail(self, error: BaseException) -> None:
        """Keeps the first failure, and stops everyone."""
        with self._changed:
            if self.failure is None:
                self.failure = error
        self.stop()

    def stop(self) -> None:
        """Ends every wait, now and from now on."""
        with self._changed:
            self.ending.set()
            self._changed.notify_all()
            for snapshot in self._snapshots:
                snapshot.give_up(self._why(snapshot), ended=True)
        for link in self._links:
            link.close()


def refuse_on_worker(stages: Sequence[Stage]) -> None:
    """Refuses what waits for the stages where one of their workers would wait for itself.

    Raises:
        ScheduleError: This is the thread of one's worker: a layer or a hook has called.
    """
    thread = threading.current_thread()
    if isinstance(thread, Worker) and thread.stage in stages:
        raise ScheduleError(
            f"this is called within a batch, on the thread of stage {thread.stage.number}, which it would wait for; "
            "have the layer or hook set a flag, and call it on the thread that submits, as in the on_batch of run()"
        )


class StageThread(threading.Thread):
    """A thread that does for one stage what comes to its inbox. The first exception of any thread goes to the caller.

    Args:
        kind: Of its name.
        stage: The stage.
        progress: Shared with the threads of the other stages.
        inbox: Where things to do come from.
        options: With its intra-op threads on a CPU; None leaves PyTorch's setting. On a GPU it has one.

    Attributes:
        doing: What it does, and since when: for those who wait for it.
    """

    def __init__(self, kind: str, stage: Stage, progress: SharedProgress, inbox: Link, options: EngineOptions) -> None:
        # A daemon: a stage that hangs in foreign code must not keep the process alive.
        super().__init__(name=f"pipeal-{kind}-{stage.number}", daemon=True)
        self.stage = stage
        self.progress = progress
        self.inbox = inbox
        self.options = options
        self.doing: tuple[str, float] = ("starting", perf_counter())

    def run(self) -> None:
        """Works until told to stop."""
        try:
            # The host of a GPU has small tensors, and copies of inputs that are not pinned, which one thread makes.
            on_cpu = "cpu" in self.stage.device.types
            set_intra_op_threads(self.options.threads if on_cpu else 1)
            while True:
                self._work_on([self._next()])
        except (Stopped, Abandoned):
            pass
        except BaseException as error:  # noqa: BLE001  handed to the caller, whatever it is
            self.progress.fail(error)

    def _next(self) -> Item:
        with self._waiting("input"):
            return self.inbox.get()

    def _work_on(self, items: list[Any]) -> None:
        """Does the one thing in a list, from which it is taken: who waits for space must not hold its input as well."""
        request: Request = items.pop()
        self.doing = (request.does, perf_counter())
        request(self.stage)
        self.progress.moved()

    def _waiting(self, reason: str) -> AbstractContextManager[None]:
        self.doing = (f"waiting for {reason}", perf_counter())
        return nullcontext()


class Worker(StageThread):
    """Carries out one stage's tasks, in their order, each as soon as the schedule allows.

    Args:
        stage: The stage.
        schedule: What may run after what.
        progress: Shared with the other workers.
        inbox: Where packets come from.
        outbox: Where they go; None for the last stage.
        options: As for :class:`StageThread`.
    """

    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        progress: SharedProgress,
        inbox: Link,
        outbox: Link | None,
        options: EngineOptions,
    ) -> None:
        super().__init__("stage", stage, progress, inbox, options)
        self.schedule = schedule
        self.outbox = outbox

    def _work_on(self, items: list[Any]) -> None:
        item = items[0]
        if isinstance(item, Packet):
            sequence = item.sequence
            del item
            self._hand_on(self._do(Action.FORWARD, sequence, items.pop()))
            self._do(Action.BACKWARD, sequence)
            self._do(Action.UPDATE, sequence)
        elif isinstance(item, Snapshot):
            self.doing = (f"saving in the {item}", perf_counter())
            self.stage.save(item, self.progress.moved)
            self.progress.end_snapshot(self.stage.number)
            self._hand_on(item)
        else:
            super()._work_on(items)
            if item.goes_on:
                self._hand_on(item)

    def _hand_on(self, item: Item | None) -> None:
        if self.outbox is not None:
            assert item is not None  # a forward gives a packet
            with self._waiting("space"):
                self.outbox.put(item)

    def _do(self, action: Action, sequence: int, packet: Packet | None = None) -> Packet | None:
        task = Task(sequence, self.stage.number, action)
        before = self.schedule.after(task, self.progress.stages)
        if self.progress.stopped:  # a stop waits for one action, not for three
            raise Stopped
        if not self.progress.has_ended(before):
            with self._waiting("join"):
                self.progress.wait(before)
        self.doing = (str(task), perf_counter())
        onward = self.stage.run(action, packet, self._between)
        self.progress.end(task)
        return onward

    def _between(self, layer: int) -> None:
        """Within a forward that has layers learn: one at a time is waited for, or stopped after."""
        if self.progress.stopped:
            raise Stopped
        task, _, _ = self.doing[0].partition(", ")
        self.doing = (f"{task}, layer {layer}", perf_counter())
        self.progress.moved()

    def _waiting(self, reason: str) -> AbstractContextManager[None]:
        super()._waiting(reason)
        return self.stage.clock.waiting(reason)
