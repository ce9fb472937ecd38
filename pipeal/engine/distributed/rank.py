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
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import torch

from pipeal.core.options import EngineOptions
from pipeal.core.tree import Tree
from pipeal.engine.distributed.channel import BrokenWireError, Message, Wire
from pipeal.engine.distributed.host_transfer import Carrier
from pipeal.engine.distributed.io_threads import CLOSE, Handler, io_thread, packet_of, receive_all, send_all
from pipeal.engine.distributed.nccl_transfer import GpuCarrier
from pipeal.engine.distributed.process_groups import Groups, Seat
from pipeal.engine.distributed.requests import Requests
from pipeal.engine.distributed.world import World
from pipeal.engine.execution.channel import Link
from pipeal.engine.execution.worker import ACTIONS, TICK_S, SharedProgress, Worker
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
        options: The depth of a queue counts the packets on their way to a stage, from its neighbour's hand to its own,
            but for those that a long way has beside.

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
        self.world, self.seats, self.groups = world, seats, groups
        self.stage, self.schedule, self.options = stage, schedule, options
        self.rank, self.replica = world.rank, world.mesh.replica_of(world.rank)
        self.closed = False
        self.on_reply: Callable[[Mapping[str, Any], Tree], None] | None = None
        self._io_threads: dict[str, threading.Thread] = {}
        self._unclosed: dict[str, set[int]] = {}
        self._threads_before: int | None = None
        self._make_links()
        self._make_wires()
        links = [link for link in (self.inbox, self.outbox, self.backbox) if link is not None]
        self.progress = RemoteProgress(self, links)
        self.worker = Worker(stage, schedule, self.progress, self.inbox, self.outbox, options)
        self.requests = Requests(self)

    def _make_links(self) -> None:
        """To and from the worker. A packet that is being sent has a place at the sender, too."""
        depth, number = self.options.queue_depth, self.stage.number
        # Of a depth of 1 there would be none left here.
        self.inbox = Link(depth if number == 0 else max(1, depth - 1))
        self.outbox = Link(1) if number < self.world.mesh.stages - 1 else None
        self.backbox = Link(1)

    def _make_wires(self) -> None:
        """To other ranks. All ranks number them alike."""
        endpoint, pinned = self.world.endpoint, self.stage.device.lags
        self._numbers = self.world.wire_numbers(7)
        onward, back, *others = self._numbers
        # An order to begin, one packet in the hands of the stage, and those that its inbox holds.
        self.onward = Wire(endpoint, onward, pinned=pinned, fills=1 + max(2, self.options.queue_depth))
        self.back = Wire(endpoint, back, pinned=pinned)
        wires = (Wire(endpoint, number) for number in others)
        self.orders, self.commands, self.news, self.results, self.ended = wires

    def start(self, snapshot_came: Callable[[Snapshot], None]) -> None:
        """Starts the worker and the I/O threads between neighbours.

        Args:
            snapshot_came: Told of a snapshot from another rank, before the stage gets it.
        """
        before, after = self.rank - 1, self.rank + 1
        self.run("lost", self._watch_peers)
        if self.stage.number > 0:
            carrier = self._carrier(self.onward, before)
            handlers: dict[str, Handler] = {
                "packet": partial(self._receive_packet, carrier),
                "snapshot": partial(self._receive_snapshot, snapshot_came),
                **self.requests.handlers(carrier),
                CLOSE: self.hear_close,
            }
            self.receive("from-before", self.onward, [before], handlers, drop=carrier.drop)
            self.send("to-before", self.backbox, self._carrier(self.back, before), before)
        if self.outbox is not None:
            back = self._carrier(self.back, after)
            self.send("to-after", self.outbox, self._carrier(self.onward, after), after)
            self.receive("from-after", self.back, [after], self.requests.handlers(back), drop=back.drop)
        if tellers := self._who_tell_me():
            self.receive("ended", self.ended, tellers, {"ended": self._hear_ended})
        self._threads_before = torch.get_num_threads()
        self.worker.start()

    def send(self, name: str, link: Link, carrier: Carrier, peer: int) -> None:
        """Starts an I/O thread that sends what comes to a link."""
        self.run(name, lambda: send_all(link, carrier, peer, self.progress))

    def receive(
        self,
        name: str,
        wire: Wire,
        peers: Iterable[int],
        handlers: Mapping[str, Handler],
        *,
        drop: Callable[[Message], object] | None = None,
    ) -> None:
        """Starts an I/O thread that receives what comes over a wire from some peers, until all have closed it."""
        failed, dropped = self.progress.fail, drop or wire.drop
        unclosed = self._unclosed[name] = set(peers)
        self.run(name, lambda: receive_all(wire, handlers, failed, drop=dropped, unclosed=unclosed))

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Starts any I/O thread."""
        self._io_threads[name] = io_thread(name, work, self.progress.fail)

    def close(self) -> None:
        """Ends the worker, and the I/O threads once they have said so to their peers. A second time does nothing."""
        if self.closed:
            return
        self.closed = True
        self.progress.stop()
        for stage in self._listeners_of(self.stage.number):
            with suppress(BrokenWireError):
                self.ended.post(self.world.mesh.rank_of(self.replica, stage), CLOSE, {})

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

    def end(self) -> None:
        """Ends what still waits at a wire; at the very end."""
        self.world.endpoint.close_wires(self._numbers)

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

    def _carrier(self, wire: Wire, peer: int) -> Carrier:
        """The way to a neighbour, or from it."""
        # The onward group goes from the lower rank to the higher, the other one back.
        pair = self.groups.pairs.get((min(peer, self.rank), wire is self.back))
        if pair is None:
            return Carrier(wire, self.stage.device)
        return GpuCarrier(wire, pair, int(peer > self.rank), self.stage.device)

    def _receive_packet(self, carrier: Carrier, message: Message) -> None:
        self.inbox.wait_for_space()
        (x, y), ready = carrier.body(message)
        facts = message.facts
        self.progress.hear(Task(facts["sequence"], self.stage.number - 1, Action.FORWARD))
        self.inbox.put(packet_of(facts, x, y, ready))

    def _receive_snapshot(self, came: Callable[[Snapshot], None], message: Message) -> None:
        found = Snapshot(message.facts["batch"], [index for index, _ in self.stage.layers])
        found.number, found.note = message.facts["number"], message.facts["note"]
        self.progress.expect(found)
        came(found)
        self.inbox.put(found)

    def _hear_ended(self, message: Message) -> None:
        facts = message.facts
        self.progress.hear(Task(facts["batch"], facts["stage"], Action(facts["action"])))

    def _who_tell_me(self) -> list[int]:
        mesh, number = self.world.mesh, self.stage.number
        return [mesh.rank_of(self.replica, one) for one in range(mesh.stages) if number in self._listeners_of(one)]

    def _listeners_of(self, stage: int) -> set[int]:
        return set(chain(*listeners(self.schedule, stage, self.world.mesh.stages).values()))

    def _watch_peers(self) -> None:
        """Ends every wait here when a peer is lost; the caller may wait for a snapshot, and look at nothing else."""
        while not self.progress.stopped:
            if self.world.lost.wait(TICK_S):
                self.world.check()


class RemoteProgress(SharedProgress):
    """A progress that also knows what stages of other processes have ended, as far as the schedule asks for it.

    Args:
        node: This rank; it tells other stages of a task's end, and knows what is behind a connection that broke.
        links: Closed by :meth:`stop`.
    """

    def __init__(self, node: Node, links: list[Link]) -> None:
        super().__init__(node.world.mesh.stages, links)
        self._node = node
        self._listeners = listeners(node.schedule, node.stage.number, self.stages)

    def end(self, task: Task) -> None:
        """Notes that a task of this process's stage has ended, and tells who waits for it."""
        super().end(task)
        for stage in self._listeners[task.action]:
            facts = {"batch": task.batch, "stage": task.stage, "action": task.action.value}
            self._node.ended.post(self._node.world.mesh.rank_of(self._node.replica, stage), "ended", facts)

    def fail(self, error: BaseException) -> None:
        """Keeps the first failure, and stops everyone; also while an end in order is under way."""
        super().fail(error if self.failure is not None else self._node.world.explained(error))

    def hear(self, task: Task) -> None:
        """Notes that a task of another stage has ended."""
        super().end(task)


_BATCHES = range(1, 17)
"""Those that a schedule is asked about: it may treat some otherwise than the next. A stage that is told of more than it
waits for loses nothing; one that is not told of what it waits for stands still."""


def listeners(schedule: Schedule, stage: int, stages: int) -> dict[Action, list[int]]:
    """The other stages that must be told when this one has ended an action.

    A packet that arrives tells by itself that the stage before has ended its forward.

    >>> from pipeal.engine.schedule import SCHEDULES
    >>> [listeners(SCHEDULES["al-fm"], stage, 3)[Action.UPDATE] for stage in range(3)]
    [[], [0], [0]]
    >>> listeners(SCHEDULES["pipelined"], 1, 3)[Action.FORWARD]
    []
    """
    found: dict[Action, list[int]] = {action: [] for action in ACTIONS}
    for other in range(stages):
        if other == stage:
            continue
        after = (schedule.after(Task(batch, other, action), stages) for batch in _BATCHES for action in ACTIONS)
        before = {task for tasks in after for task in tasks}
        for action in {task.action for task in before if task.stage == stage}:
            if action is not Action.FORWARD or other != stage + 1:
                found[action].append(other)
    return found
