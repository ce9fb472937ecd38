"""Who carries a schedule out: the caller itself, or one worker per stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Protocol

import torch

from pipeal.core.errors import ScheduleError
from pipeal.core.options import EngineOptions
from pipeal.core.packet import Packet
from pipeal.engine.execution.channel import Link, Stopped
from pipeal.engine.execution.watchdog import stall_report, wait_for_end
from pipeal.engine.execution.worker import TICK_S, SharedProgress, StageThread, Worker
from pipeal.engine.runner.compile_gate import GATE
from pipeal.engine.schedule import Action, Schedule, Task
from pipeal.engine.stage import Stage
from pipeal.engine.state.snapshot import Snapshot

STOP_S = 2.0
"""How long a stop waits for the workers' current actions."""


class Executor(Protocol):
    """Carries out a schedule over stages."""

    @property
    def submitted(self) -> int:
        """How many packets it was given; true also for a signal's handler amid :meth:`submit`, and after a Ctrl-C."""
        ...

    def submit(self, packet: Packet) -> None:
        """Gives the next packet to the first stage; waits while there is no space."""
        ...

    def snapshot(self, snapshot: Snapshot) -> None:
        """Sends a snapshot after what was submitted, as :meth:`submit` does a packet."""
        ...

    def drain(self) -> None:
        """Waits until everything submitted has been updated on, and every stage has done with every snapshot."""
        ...

    def stop(self, why: BaseException | None = None) -> None:
        """Ends what runs, without finishing what waits: in order, or because of an exception."""
        ...


class InlineExecutor:
    """Runs each batch to its end in the caller's thread, in the schedule's own order.

    Attributes:
        submitted: How many batches have come to their end.
    """

    def __init__(self, stages: Sequence[Stage], schedule: Schedule, options: EngineOptions) -> None:
        self.stages = stages
        self.tasks = [(self.stages[task.stage], task.action) for task in schedule.order(len(stages), 1)]
        self.submitted = 0
        self._failure: BaseException | None = None
        self._busy = False
        self._threads_before = torch.get_num_threads()
        if options.threads is not None:
            torch.set_num_threads(options.threads)

    def submit(self, packet: Packet) -> None:
        """Runs the batch; after a failure, which leaves layers half updated, raises it again."""
        self.drain()
        self._busy = True
        try:
            for stage, action in self.tasks:
                onward = stage.run(action, packet if action is Action.FORWARD else None)
                packet = onward or packet
            self.submitted = packet.sequence + 1
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._busy = False

    def snapshot(self, snapshot: Snapshot) -> None:
        """Takes the states at once."""
        self.drain()
        try:
            for stage in self.stages:
                stage.save(snapshot, lambda: None)  # no watchdog over the caller's own thread
        except BaseException as error:
            snapshot.give_up(error, ended=True)
            raise

    def drain(self) -> None:
        """Nothing is ever left to do.

        Raises:
            ScheduleError: It is called within a batch, by a layer, a hook or a signal handler.
            BaseException: What the last batch failed with.
        """
        if self._busy:
            raise ScheduleError(
                "this is called within a batch, amid which layers stand at different ones; have the hook or signal "
                "handler set a flag, and call it after the batch, as in the on_batch of run()"
            )
        if self._failure is not None:
            raise self._failure

    def stop(self, why: BaseException | None = None) -> None:  # noqa: ARG002
        """Gives the caller's thread setting back."""
        self._failure = None  # its frames hold the last batch, and this
        torch.set_num_threads(self._threads_before)


class StageThreads:
    """The threads of stages: started and ended together, and watched by those who wait for them.

    Args:
        threads: One for each stage.
        progress: What they know together.
        options: With the patience of those who wait.
    """

    def __init__(self, threads: Sequence[StageThread], progress: SharedProgress, options: EngineOptions) -> None:
        self.threads = threads
        self.progress = progress
        self.options = options

    def start(self) -> None:
        """Starts all of them, or none."""
        # PyTorch keeps the last number set by any thread as the one that later threads begin with.
        self._threads_before = torch.get_num_threads()
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:
            self.stop()
            raise

    def stop(self, why: BaseException | None = None) -> None:  # noqa: ARG002
        """Lets each thread end what it is doing, and waits for them.

        Raises:
            StallError: A thread did not come back; it is left behind, as a daemon.
        """
        self.progress.stop()
        try:
            wait_for_end(self.threads, STOP_S)
        finally:
            torch.set_num_threads(self._threads_before)

    def wait(self, attempt: Callable[[], bool], state: str) -> None:
        """Tries, for some time each, until it succeeds.

        Args:
            attempt: Whether it succeeded.
            state: For a file with stacks.

        Raises:
            StallError: Nothing moved for ``stall_timeout_s``.
            ScheduleError: Another thread called :meth:`stop`.
            Exception: Whatever a stage raised first.
        """
        waiting_since = perf_counter()
        limit_s = self.options.stall_timeout_s
        with suppress(Stopped):
            while not attempt():
                if GATE.busy():
                    waiting_since = perf_counter()  # a compilation may take minutes, and others wait for it
                if perf_counter() - max(self.progress.changed_at, waiting_since) > limit_s:
                    raise stall_report(self.threads, limit_s, self.options.dump_folder, (state, self.progress))
            return
        raise self.progress.failure or ScheduleError("the pipeline was closed, by another thread, during this wait")


class ThreadedExecutor(StageThreads):
    """One persistent worker per stage.

    Args:
        stages: The stages.
        schedule: What may run after what.
        options: With the threads of each worker; None leaves PyTorch's setting.
    """

    def __init__(self, stages: Sequence[Stage], schedule: Schedule, options: EngineOptions) -> None:
        self.schedule = schedule
        self._snapshots = 0
        links = [Link(options.queue_depth) for _ in stages]
        progress = SharedProgress(len(stages), links)
        self._inlet = links[0]
        workers = [
            Worker(stage, schedule, progress, inbox, outbox, options)
            for stage, inbox, outbox in zip(stages, links, [*links[1:], None], strict=True)
        ]
        super().__init__(workers, progress, options)
        self.start()

    @property
    def submitted(self) -> int:
        """How many packets are in the first link, or were."""
        return self._inlet.packets

    def submit(self, packet: Packet) -> None:
        """Puts the packet into the first link; raises as :meth:`StageThreads.wait`."""
        self._wait(lambda: self._inlet.put(packet, TICK_S))

    def snapshot(self, snapshot: Snapshot) -> None:
        """Puts the snapshot into the first link; raises as :meth:`submit`."""
        self.progress.expect(snapshot)
        self._wait(lambda: self._inlet.put(snapshot, TICK_S))
        self._snapshots += 1

    def drain(self) -> None:
        """Waits for the last update of every stage, and the last snapshot; raises as :meth:`submit`."""
        if self._snapshots:
            self._wait(lambda: self.progress.wait_for_snapshots(self._snapshots, TICK_S))
        if submitted := self.submitted:
            last = tuple(Task(submitted - 1, thread.stage.number, Action.UPDATE) for thread in self.threads)
            self._wait(lambda: self.progress.wait(last, TICK_S))

    def _wait(self, attempt: Callable[[], bool]) -> None:
        self.wait(attempt, f"schedule {self.schedule.name}; {self.submitted} batches submitted")
