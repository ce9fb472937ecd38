"""One rank of a distributed pipeline: a worker with its stage, the wires to other ranks, and the threads at them.

::

                    orders: rank 0 ──► first stages of the other replicas
    onward:  rank 0 ══► rank 1 ══► rank 2       packets, snapshots, requests, predictions on their way up
    back:    rank 0 ◄══ rank 1 ◄══ rank 2       predictions on their way down
    commands: rank 0 ──► all     news, results: all ──► rank 0     ended: any ──► any, where a schedule joins
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

from pipeal.core.options import EngineOptions
from pipeal.core.tree import Tree
from pipeal.engine.distributed.channel import BrokenWireError, Message, Wire
from pipeal.engine.distributed.host_transfer import Carrier, HostCarrier
from pipeal.engine.distributed.io_threads import CLOSE, Handler, IoThread, packet_of, receive_all, send_all
from pipeal.engine.distributed.nccl_transfer import GpuCarrier
from pipeal.engine.distributed.process_groups import Groups, Seat
from pipeal.engine.distributed.remote_errors import told
from pipeal.engine.distributed.remote_progress import RemoteProgress, listeners
from pipeal.engine.distributed.requests import Requests
from pipeal.engine.distributed.world import World
from pipeal.engine.execution.channel import Link
from pipeal.engine.execution.executors import STOP_S
from pipeal.engine.execution.worker import ACTIONS, TICK_S, Worker
from pipeal.engine.schedule import Action, Schedule, Task
from pipeal.engine.stage import Stage
from pipeal.engine.state.snapshot import Snapshot


class Node:
    """What every rank has. Rank 0 adds an executor, the others a server.

    Args:
        world: The processes.
        seats: What the ranks run on.
        groups: The process groups.
        stage: This rank's stage.
        schedule: What may run after what.
        options: The depth of a queue counts the packets on their way to a stage, from its neighbour's hand to its own.

    Attributes:
        closed: Whether this rank has been told to end, or has ended itself.
        on_reply: On rank 0, what takes this rank's own replies.
    """

    def __init__(
        self,
        world: World,
        seats: list[Seat],
        groups: Groups,
        stage: Stage,
        schedule: Schedule,
        options: EngineOptions,
    ) -> None:
        mesh, queue_depth = world.mesh, options.queue_depth
        self.options = options
        self.world, self.seats, self.groups, self.stage, self.schedule = world, seats, groups, stage, schedule
        self.rank, self.replica = world.rank, mesh.replica_of(world.rank)
        self.closed = False
        self.on_reply: Callable[[Mapping[str, Any], Tree], None] | None = None
        self._io_threads: dict[str, IoThread] = {}
        self._unclosed: dict[str, set[int]] = {}
        self._threads_before: int | None = None
        last = stage.number == mesh.stages - 1
        # A packet that is being sent has a place at the sender, too. Of a depth of 1 there would be none left here.
        self.inbox = Link(queue_depth if stage.number == 0 else max(1, queue_depth - 1))
        self.outbox = None if last else Link(1)
        self.backbox = Link(1)
        pinned = stage.device.lags
        self.onward = Wire(groups.packets, 0, pinned=pinned)
        self.back = Wire(groups.packets, 1, pinned=pinned)
        self.orders = Wire(groups.packets, 2)
        self.commands, self.news, self.results, self.ended = (Wire(groups.control, number) for number in range(4))
        links = [self.inbox, self.backbox, *([] if self.outbox is None else [self.outbox])]
        self.progress = RemoteProgress(stage.number, mesh.stages, links, schedule, self._tell_ended, self.explained)
        self.worker = Worker(stage, schedule, self.progress, self.inbox, self.outbox, options)
        self.requests = Requests(self)

    def start(self, snapshot_came: Callable[[Snapshot], None]) -> None:
        """Starts the worker and the I/O threads between neighbours.

        Args:
            snapshot_came: Told of a snapshot from another rank, before the stage gets it.
        """
        number = self.stage.number
        before, after = self.rank - 1, self.rank + 1
        self.run("lost", self._watch_peers)

        def snapshot(message: Message) -> None:
            found = Snapshot(message.facts["batch"], [index for index, _ in self.stage.layers])
            found.number, found.note = message.facts["number"], message.facts["note"]
            self.progress.expect(found)
            snapshot_came(found)
            self.inbox.put(found)

        if number > 0:
            carrier = self._carrier(self.onward, before)
            handlers: dict[str, Handler] = {
                "packet": lambda message: self._receive_packet(carrier, message),
                "snapshot": snapshot,
                **self.requests.handlers(carrier),
                CLOSE: self.hear_close,
            }
            self.receive("from-before", self.onward, before, handlers, drop=carrier.drop)
            self.send("to-before", self.backbox, self._carrier(self.back, before), before)
        if self.outbox is not None:
            back = self._carrier(self.back, after)
            self.send("to-after", self.outbox, self._carrier(self.onward, after), after)
            self.receive("from-after", self.back, after, self.requests.handlers(back), drop=back.drop)
        tellers = self._who_tell_me()
        if tellers:
            self.receive("ended", self.ended, None, {"ended": self._hear_ended}, closings=tellers)
        self._threads_before = torch.get_num_threads()
        self.worker.start()

    def send(self, name: str, link: Link, carrier: Carrier, peer: int) -> None:
        """Starts an I/O thread that sends what comes to a link."""

        def has_failed() -> bool:
            return self.progress.failure is not None

        self.run(name, lambda: send_all(link, carrier, peer, self.progress.fail, has_failed))

    def receive(
        self,
        name: str,
        wire: Wire,
        peer: int | None,
        handlers: Mapping[str, Handler],
        *,
        drop: Callable[[Message], object] | None = None,
        closings: Iterable[int] = (),
    ) -> None:
        """Starts an I/O thread that receives what comes over a wire, of a peer, or of any until all have closed it."""
        failed, dropped = self.progress.fail, drop or wire.drop
        unclosed = self._unclosed[name] = set(closings) if peer is None else {peer}
        self.run(name, lambda: receive_all(wire, peer, handlers, failed, drop=dropped, unclosed=unclosed))

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Starts any I/O thread."""
        io_thread = IoThread(name, work, self.progress.fail)
        self._io_threads[name] = io_thread
        io_thread.start()

    def close(self) -> None:
        """Ends the worker, and the I/O threads once they have said so to their peers. A second time does nothing."""
        if self.closed:
            return
        self.closed = True
        self.progress.stop()
        for stage in self._listeners_of(self.stage.number):
            with suppress(BrokenWireError):
                self.ended.post(self.world.mesh.rank_of(self.replica, stage), CLOSE, {})

    def abort(self) -> None:
        """Ends what waits on GPUs for other ranks, when something has failed."""
        self.groups.abort(STOP_S)

    def hear_close(self, message: Message) -> None:
        """The line of stages before this one has ended: in order, or rank 0 will say why."""
        if not message.facts["failed"]:
            self.close()

    def unclosed(self, *io_threads: str) -> list[int]:
        """The ranks whose last words some I/O threads still wait for."""
        return sorted({rank for io_thread in io_threads for rank in set(self._unclosed.get(io_thread, ()))})

    def join(self, timeout_s: float) -> list[str]:
        """Waits for all threads; the names of those that are left. Gives the caller's thread setting back."""
        until = perf_counter() + timeout_s
        threads: list[threading.Thread] = [self.worker, *self._io_threads.values()]
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - perf_counter()))
        if self._threads_before is not None:  # PyTorch keeps what the worker has set for threads to come
            torch.set_num_threads(self._threads_before)
        return [thread.name for thread in threads if thread.is_alive()]

    def reply(self, kind: str, facts: Mapping[str, Any], tree: Tree = None) -> None:
        """Tells rank 0 what came of something; all tensors are on the CPU."""
        if self.on_reply is not None:
            self.on_reply(facts, tree)
            return
        self.results.send(0, kind, facts, tree)

    def has_ended(self, io_thread: str, timeout_s: float) -> bool:
        """Whether an I/O thread has ended, or does within that time, or was never there."""
        found = self._io_threads.get(io_thread)
        if found is None:
            return True
        found.join(timeout_s)
        return not found.is_alive()

    def abandon(self) -> None:
        """Ends the stage's waits for the compiler."""
        self.stage.abandon()
        self.requests.guide.stopped.set()

    def tell_failure(self, error: BaseException) -> None:
        """Tells rank 0 that this rank has failed."""
        self.news.post(0, "failed", told(error))

    def explained(self, error: BaseException) -> BaseException:
        """Behind a connection that broke is a peer that is lost; it may have said why it ended."""
        if not isinstance(error, BrokenWireError):
            return error
        if error.peer is not None:
            return self.world.peer_lost(error.peer, error)
        return self.groups.peer_lost(self.world, [rank for rank in range(self.world.size) if rank != self.rank], error)

    def _carrier(self, wire: Wire, peer: int) -> Carrier:
        """The way to a neighbour, or from it."""
        # The onward group goes from the lower rank to the higher, the other one back.
        pair = self.groups.pairs.get((min(peer, self.rank), wire is self.back))
        if pair is None:
            return HostCarrier(wire, self.stage.device)
        return GpuCarrier(wire, pair, int(peer > self.rank), self.stage.device)

    def _receive_packet(self, carrier: Carrier, message: Message) -> None:
        self.inbox.wait_for_space()
        (x, y), ready = carrier.body(message)
        facts = message.facts
        self.progress.hear(Task(facts["sequence"], self.stage.number - 1, Action.FORWARD))
        self.inbox.put(packet_of(facts, x, y, ready))

    def _tell_ended(self, stage: int, task: Task) -> None:
        facts = {"batch": task.batch, "stage": task.stage, "action": task.action.value}
        self.ended.post(self.world.mesh.rank_of(self.replica, stage), "ended", facts)

    def _hear_ended(self, message: Message) -> None:
        facts = message.facts
        self.progress.hear(Task(facts["batch"], facts["stage"], Action(facts["action"])))

    def _who_tell_me(self) -> list[int]:
        mesh, number = self.world.mesh, self.stage.number
        return [
            mesh.rank_of(self.replica, stage)
            for stage in range(self.progress.stages)
            if number in self._listeners_of(stage)
        ]

    def _listeners_of(self, stage: int) -> set[int]:
        found = (listeners(self.schedule, stage, self.progress.stages, action) for action in ACTIONS)
        return {other for others in found for other in others}

    def _watch_peers(self) -> None:
        """Ends every wait here when a peer is lost; the caller may wait for a snapshot, and look at nothing else."""
        while not self.progress.stopped:
            if self.world.lost.wait(TICK_S):
                self.world.check()
