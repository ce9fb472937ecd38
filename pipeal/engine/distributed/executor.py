"""Rank 0's side of a distributed pipeline: it gives batches to the line, asks all ranks, and knows who has failed."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from time import perf_counter
from typing import Any

from pipeal.core.errors import DataError, PeerLostError, ScheduleError, StallError, add_note
from pipeal.core.packet import Packet
from pipeal.core.tree import Tree
from pipeal.engine.distributed.channel import BrokenWireError, Message
from pipeal.engine.distributed.host_transfer import Carrier
from pipeal.engine.distributed.io_threads import CLOSE, FAREWELL_S, facts_of
from pipeal.engine.distributed.rank import Node
from pipeal.engine.distributed.remote_errors import rebuilt, told
from pipeal.engine.distributed.requests import Order
from pipeal.engine.distributed.watchdog import Watch
from pipeal.engine.execution.channel import Item, Link, Stopped
from pipeal.engine.execution.executors import STOP_S
from pipeal.engine.execution.worker import TICK_S
from pipeal.engine.runner.compile_gate import GATE
from pipeal.engine.state.mapped_file import away
from pipeal.engine.state.snapshot import LayerState, Snapshot


class DistributedExecutor:
    """Carries out a schedule over processes; see :class:`pipeal.engine.execution.executors.Executor`.

    Args:
        node: Rank 0.

    Attributes:
        node: As given.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self._replies: dict[int, queue.SimpleQueue[tuple[Mapping[str, Any], Tree]]] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._tokens = count()
        self._numbers = count(1)
        self._watch = Watch(node)
        mesh = node.world.mesh
        self._others = [rank for rank in range(node.world.size) if rank != node.rank]
        self._heads = {mesh.rank_of(replica, 0): Link(node.options.queue_depth) for replica in range(1, mesh.replicas)}
        node.progress.add_links(self._heads.values())
        for head, link in self._heads.items():
            node.send(f"orders-{head}", link, Carrier(node.orders, node.stage.device), head)
        if self._others:
            handlers = {"failed": self._hear_failure, "beat": self._watch.hear}
            results = {
                **dict.fromkeys(("rested", "report"), self._hear_reply),
                "snapshot": self._hear_snapshot,
                "leg failed": self._hear_failed_leg,
            }
            node.receive("news", node.news, self._others, handlers)
            node.receive("results", node.results, self._others, results)
        node.on_reply = self._keep_reply
        node.start(lambda _: None)

    @property
    def submitted(self) -> int:
        """How many packets are in the line of this replica, or were."""
        return self.node.inbox.packets

    def submit(self, packet: Packet) -> None:
        """Puts the packet into the line, and has every other replica take a batch of its own.

        Raises:
            StallError: No stage made progress for too long.
            PeerLostError: A rank is lost.
            Exception: Whatever a stage raised first, on whatever rank.
        """
        self.tell_heads("take", facts_of(packet))
        self.wait(lambda: self.node.inbox.put(packet, TICK_S))

    def tell_heads(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Tells the first stage of every other replica to do something with its feed; raises as :meth:`submit`.

        Args:
            kind: ``take`` a batch, ``feed`` an epoch from a batch on, or ``leave out`` some batches.
            facts: What it needs to know; what JSON can hold.
        """
        self._to_heads(Order(kind, facts))

    def snapshot(self, snapshot: Snapshot) -> None:
        """Puts the snapshot into the line; raises as :meth:`submit`."""
        snapshot.number = next(self._numbers)
        self.node.progress.expect(snapshot)
        for number, other in list(self._snapshots.items()):  # the thread that hears of them takes some away, too
            if not other.is_open:
                self._snapshots.pop(number, None)
        self._snapshots[snapshot.number] = snapshot
        self.wait(lambda: self.node.inbox.put(snapshot, TICK_S))

    def drain(self) -> None:
        """Waits until all ranks have done with all that was submitted; raises as :meth:`submit`."""
        self.ask("rest")

    def order(self, what: str, facts: Mapping[str, Any] | None = None, *, heads: bool = True) -> None:
        """Sends an order down the line of this replica, and with ``heads`` of the others; raises as :meth:`submit`."""
        order = self.node.requests.order(what, facts or {})
        if heads:
            self._to_heads(order)
        self.wait(lambda: self.node.inbox.put(order, TICK_S))

    def push(self, item: Item) -> None:
        """Puts something into the line that is bounded elsewhere; raises as :meth:`submit`."""
        with suppress(Stopped):
            self.node.inbox.push(item)
            return
        raise self._failure()

    def ask(self, what: str) -> list[tuple[Mapping[str, Any], Tree]]:
        """What all ranks reply to an order; raises as :meth:`submit`."""
        token, found = next(self._tokens), list[tuple[Mapping[str, Any], Tree]]()
        replies = self._replies[token] = queue.SimpleQueue()
        self.order(what, {"token": token})

        def all_there() -> bool:
            with suppress(queue.Empty):
                found.append(replies.get(timeout=TICK_S))
            if self.node.progress.stopped:
                raise Stopped
            return len(found) == self.node.world.size

        self.wait(all_there)
        del self._replies[token]
        return found

    def await_fences(self) -> None:
        """Waits until every rank has reported on all snapshots, or has failed to; raises as :meth:`submit`."""
        for snapshot in list(self._snapshots.values()):
            self.wait(lambda snapshot=snapshot: not snapshot.is_open or snapshot.closes_within(TICK_S))  # type: ignore[misc]

    def stop(self, why: BaseException | None = None) -> None:
        """Ends all ranks: in order after a :meth:`drain`, at once after a failure, which all of them then raise.

        Args:
            why: What the pipeline ends with, if not in order; a failure of a rank says more.

        Raises:
            StallError: A thread did not come back, and is left behind, as a daemon; or a rank did not end.
            PeerLostError: A rank was lost meanwhile.
            Exception: What a rank failed with while it ended.
        """
        self.node.abandon()
        reason = self.node.progress.failure or why
        try:
            if reason is not None:
                self._end_at_once(reason)
                return
            try:
                self._end_in_order()
            except BaseException as error:
                self._end_at_once(error)
                raise
        finally:
            self.node.end()

    def _end_in_order(self) -> None:
        node = self.node
        node.close()
        silent = self._await_farewells(FAREWELL_S)
        if node.progress.failure is not None:
            raise node.progress.failure
        if silent:
            names = ", ".join(map(node.world.name_of, silent))
            raise StallError(f"{names} did not end with the pipeline within {FAREWELL_S:g} s")
        self._tell_all(CLOSE, {})
        left = node.join(FAREWELL_S)
        if left:
            raise StallError(f"threads did not end with the pipeline: {', '.join(left)}")
        node.requests.guide.end()  # a prediction may have been under way
        node.world.guarded(node.groups.close, FAREWELL_S, "closing the groups of the pipeline")

    def _end_at_once(self, reason: BaseException) -> None:
        node = self.node
        node.progress.fail(reason)
        self._tell_all("stop", told(reason))
        node.close()
        node.groups.abort(STOP_S)
        with suppress(PeerLostError):  # whoever is left has been told
            self._await_farewells(STOP_S, node.progress.failure)
        self._tell_all(CLOSE, {})
        node.join(STOP_S)
        if node.worker.is_alive():
            raise StallError(f"stage {node.stage.number} did not come back: {node.worker.doing[0]}") from reason
        node.requests.guide.end()

    def wait(self, attempt: Callable[[], bool]) -> None:
        """Tries until it succeeds; raises as :meth:`submit`."""
        since = perf_counter()
        with suppress(Stopped):
            while not attempt():
                self.node.world.check()
                if GATE.busy():
                    since = perf_counter()
                self._watch.require_progress(since)
            return
        raise self._failure()

    def _failure(self) -> BaseException:
        return self.node.progress.failure or ScheduleError("the pipeline has ended; open another one")

    def _await_farewells(self, timeout_s: float, known: BaseException | None = None) -> list[int]:
        """Waits until all others have ended, or for so long, or a failure comes that is not known yet; the ranks that
        have not ended."""
        node, until = self.node, perf_counter() + timeout_s
        for io_thread in ("results", "news"):
            while not node.has_ended(io_thread, TICK_S) and perf_counter() < until:
                node.world.check()
                if node.progress.failure is not known:
                    break
        return node.unclosed("results", "news")

    def _tell_all(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Tells all others that are still there."""
        for rank in self._others:
            with suppress(BrokenWireError):
                self.node.commands.post(rank, kind, facts)

    def _to_heads(self, item: Order) -> None:
        for link in self._heads.values():
            self.wait(lambda link=link: link.put(item, TICK_S))  # type: ignore[misc]

    def _keep_reply(self, facts: Mapping[str, Any], tree: Tree) -> None:
        if (replies := self._replies.get(facts["token"])) is not None:
            replies.put((facts, tree))
        self.node.progress.moved()

    def _hear_reply(self, message: Message) -> None:
        self._keep_reply(message.facts, self.node.results.body(message))

    def _hear_snapshot(self, message: Message) -> None:
        facts, tree = message.facts, self.node.results.body(message)
        self.node.progress.moved()
        snapshot = self._snapshots.get(facts["number"])
        if snapshot is None:
            return
        if facts["error"] is not None:
            error = rebuilt(facts["error"], self.node.world.name_of(message.source))
            snapshot.give_up(error)
            return
        for layer, state, losses, splits in tree:
            if self.node.options.offload == "disk" and facts["kept"] is None:
                try:
                    state = away(state, self.node.options.offload_folder)
                except (DataError, OSError) as error:
                    snapshot.give_up(error)
                    return
            snapshot.add(layer, LayerState(state, losses, splits, facts["kept"]), None, None)
        if not snapshot.is_open:
            self._snapshots.pop(snapshot.number, None)
            self.node.progress.let_go()

    def _hear_failed_leg(self, message: Message) -> None:
        error = rebuilt(message.facts["error"], self.node.world.name_of(message.source))
        self.node.requests.guide.failed(message.facts["trip"], error)

    def _hear_failure(self, message: Message) -> None:
        error = rebuilt(message.facts, self.node.world.name_of(message.source))
        failure = self.node.progress.failure
        if failure is not None and isinstance(failure, PeerLostError) and not isinstance(error, PeerLostError):
            add_note(failure, str(error))
        self.node.progress.fail(error)
