"""All ranks but the first: they hold a stage each, and do what comes in with the packets until rank 0 ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, TypeAlias

from pipeal.core.errors import DataError, PeerLostError, StallError
from pipeal.core.samples import pair_of, require_samples
from pipeal.core.tree import batch_size
from pipeal.engine.devices import ready_now
from pipeal.engine.distributed.channel import BrokenWireError, Message
from pipeal.engine.distributed.host_transfer import Carrier
from pipeal.engine.distributed.io_threads import CLOSE, FAREWELL_S, packet_of
from pipeal.engine.distributed.rank import Node
from pipeal.engine.distributed.remote_errors import rebuilt, told
from pipeal.engine.distributed.watchdog import BEAT_S, state_of
from pipeal.engine.execution.channel import Link, Stopped
from pipeal.engine.execution.executors import STOP_S
from pipeal.engine.execution.watchdog import dumped
from pipeal.engine.execution.worker import TICK_S
from pipeal.engine.runner.compile_gate import GATE
from pipeal.engine.state.snapshot import LayerState, Snapshot

OnSnapshot: TypeAlias = Callable[[Snapshot, Mapping[int, LayerState]], Mapping[str, Any]]
"""Keeps the states of this rank's layers, on a thread of its own, and says of it what JSON can hold."""

Feed: TypeAlias = Callable[[int, int], Iterator[Any]]
"""Gives the batches of an epoch from a batch on, for this rank's replica: pairs, or objects with ``x`` and ``y``."""

_WAITING_SNAPSHOTS = 2
_VERDICT_S = 60.0
"""How long rank 0 may read data, say, before it notices that this rank has failed, and tells all others by name."""


class Server:
    """Serves rank 0 with a node.

    Args:
        node: This rank.
        on_snapshot: Keeps what snapshots find; None: the states are sent to rank 0.
        feed: For the first stage of a replica.

    Attributes:
        verdict: What rank 0 ended the pipeline with before its time, where it has; it knows then of what failed here.
    """

    def __init__(self, node: Node, on_snapshot: OnSnapshot | None, feed: Feed | None) -> None:
        self.node = node
        self._on_snapshot = on_snapshot
        self._feed = feed
        self._batches: Iterator[Any] | None = None
        self._feeding = threading.Lock()
        self._feeds_on = True
        self._snapshots: Any = Link(_WAITING_SNAPSHOTS)  # and None after the last one
        self._dismissed = threading.Event()
        self.verdict: BaseException | None = None
        self._said_at = self._moved_at = perf_counter()

    def serve(self) -> None:
        """Works until rank 0 ends the pipeline.

        Raises:
            Exception: What this rank failed with, or else what rank 0 ended the pipeline with.
        """
        node = self.node
        self._start()
        try:
            while not node.closed:
                node.world.check()
                if node.progress.failure is not None:
                    raise node.progress.failure
                self._beat()
                node.worker.join(TICK_S)  # it ends with the pipeline
            self._finish_fences()
            self._leave_in_order()
        except BaseException as error:
            node.abandon()
            node.progress.fail(error)
            self._snapshots.close()
            failure = node.progress.failure or error  # which says more where a connection broke
            if self.verdict is None:
                self._tell(failure)
            with suppress(PeerLostError, BrokenWireError):
                self._leave_at_once()
            if failure is error:
                raise
            raise failure from error
        finally:
            self._close_feed()
            node.end()

    def _start(self) -> None:
        node = self.node
        commands = {"stop": self._hear_verdict, CLOSE: lambda _: self._dismissed.set()}
        node.receive("commands", node.commands, [0], commands)
        node.run("snapshots", self._keep_snapshots)
        if node.stage.number == 0:
            orders = Carrier(node.orders, node.stage.device)
            handlers = {
                "feed": self._begin_feed,
                "take": self._take,
                "leave out": self._leave_out,
                **node.requests.handlers(orders),
                CLOSE: node.hear_close,
            }
            node.receive("orders", node.orders, [0], handlers)
        node.start(self._snapshot_came)

    def _beat(self) -> None:
        """Tells rank 0 about every second what this rank does, and whether it has moved."""
        now = perf_counter()
        if now - self._said_at < BEAT_S:
            return
        self._said_at = now
        changed_at = self.node.progress.changed_at
        moved, self._moved_at = changed_at > self._moved_at or GATE.busy(), max(changed_at, self._moved_at)
        self.node.news.post(0, "beat", {"moved": moved, **state_of(self.node)})

    def _finish_fences(self) -> None:
        node = self.node
        node.abandon()
        while not self._snapshots.put(None, TICK_S):
            node.world.check()
        while not node.has_ended("snapshots", TICK_S):
            node.world.check()

    def _leave_in_order(self) -> None:
        """Says farewell, and waits until rank 0 has heard it from all."""
        node = self.node
        self._say_farewell()
        # Rank 0 waits so long itself for those that are slow to end.
        if not self._is_dismissed(2 * FAREWELL_S):
            raise StallError(
                f"{node.world.name_of(0)} did not say within {2 * FAREWELL_S:g} s that all ranks have ended"
            )
        left = node.join(FAREWELL_S)
        if node.progress.failure is not None:  # rank 0's word of it may have come with its last one
            raise node.progress.failure
        if left:
            raise StallError(f"threads did not end with the pipeline: {', '.join(left)}")
        node.world.guarded(node.groups.close, FAREWELL_S, "closing the groups of the pipeline")

    def _leave_at_once(self) -> None:
        """The same after a failure: for a moment, and whatever comes of it."""
        self.node.groups.abort(STOP_S)
        self._say_farewell()
        self._is_dismissed(STOP_S, self.node.progress.failure)
        self.node.join(STOP_S)

    def _say_farewell(self) -> None:
        node = self.node
        node.close()
        node.news.post(0, CLOSE, {})
        node.results.post(0, CLOSE, {}, last=True)

    def _is_dismissed(self, within_s: float, known: BaseException | None = None) -> bool:
        """Whether rank 0 lets this rank go in time; raises a failure that is not known yet."""
        until = perf_counter() + within_s
        while not self._dismissed.wait(TICK_S):
            self.node.world.check()
            failure = self.node.progress.failure
            if failure is not None and failure is not known:
                raise failure
            if perf_counter() > until:
                return False
        return True

    def _tell(self, error: BaseException) -> None:
        """Tells rank 0 of a failure of this rank, and waits a moment for it to tell all others."""
        with suppress(BrokenWireError):  # rank 0 may be what was lost
            self.node.news.post(0, "failed", told(error))
        until = perf_counter() + _VERDICT_S
        while self.verdict is None and perf_counter() < until and not self.node.world.lost.is_set():
            if self._dismissed.wait(TICK_S / 4):
                return

    def _hear_verdict(self, message: Message) -> None:
        self.verdict = rebuilt(message.facts, self.node.world.name_of(0))
        if isinstance(self.verdict, StallError):
            dumped(self.node.options.dump_folder, [str(self.verdict), str(self.node.progress)])
        self.node.progress.fail(self.verdict)

    def _snapshot_came(self, snapshot: Snapshot) -> None:
        """Waits while too many are still being kept: a slow disk costs time, not memory."""
        self._snapshots.put(snapshot)

    def _keep_snapshots(self) -> None:
        for snapshot in iter(self._snapshots.get, None):
            self._keep(snapshot)
            del snapshot  # its states would stay until the next one

    def _keep(self, snapshot: Snapshot) -> None:
        found: dict[int, LayerState] = {}
        kept: Mapping[str, Any] | None = None
        failure = None
        try:
            found = snapshot.wait()
            kept = None if self._on_snapshot is None else self._on_snapshot(snapshot, found)
        except Exception as error:  # noqa: BLE001  told to whoever waits for the snapshot; the training goes on
            if snapshot.ended:
                return
            failure = told(error)
        facts = {"number": snapshot.number, "error": failure, "kept": None if kept is None else dict(kept)}
        if failure is not None:
            self.node.reply("snapshot", facts)
            return
        tree = [(layer, one.state if kept is None else {}, one.losses, one.splits) for layer, one in found.items()]
        # States that are sent go layer by layer: neither end holds more of them in memory.
        for part in [tree] if kept is not None else [[layer] for layer in tree]:
            self.node.reply("snapshot", facts, part)

    def _begin_feed(self, message: Message) -> None:
        if self._feed is None:
            raise DataError("the first stage of a replica has nothing to feed it; pass serve(feed=...) on its rank")
        with self._fed():
            self._drop_feed()
            self._batches = iter(self._feed(message.facts["epoch"], message.facts["first"]))

    def _take(self, message: Message) -> None:
        facts = message.facts
        with self._fed():
            found = None if self._batches is None else next(self._batches, None)
        if found is None:
            raise DataError(
                f"the feed of {self.node.world.name_of(self.node.rank)} has no batch {facts['batch']}, but rank 0 has "
                "one; give all replicas the same number of batches"
            )
        x, y = pair_of(found)
        require_samples(facts["batch"], x)
        self.node.requests.samples += batch_size(x)
        self.node.inbox.put(packet_of(facts, x, y, ready_now((x, y))))

    def _leave_out(self, message: Message) -> None:
        for _ in range(message.facts["count"]):
            with self._fed():
                if self._batches is not None:
                    next(self._batches, None)
            self.node.progress.moved()

    @contextmanager
    def _fed(self) -> Iterator[None]:
        """The feed is one thread's at a time; whoever uses it last, when the pipeline has ended, closes it.

        Raises:
            Stopped: The pipeline has ended.
        """
        with self._feeding:
            if not self._feeds_on:
                raise Stopped
            try:
                yield
            finally:
                if not self._feeds_on:
                    self._drop_feed()

    def _close_feed(self) -> None:
        """A feed whose next batch is still being made closes when that is there."""
        self._feeds_on = False
        if self._feeding.acquire(timeout=STOP_S):
            try:
                self._drop_feed()
            finally:
                self._feeding.release()

    def _drop_feed(self) -> None:
        close = getattr(self._batches, "close", None)
        self._batches = None
        if close is not None:
            close()
