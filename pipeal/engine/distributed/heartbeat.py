"""A thread that says that this rank lives, listens for the others, and decides when a silent one is lost.

Through a store that all ranks reach, on a connection of its own::

    beat/<rank>   a number that grows, about every second, and the number of a signal that asks it to end, if one came
    end/<rank>    "-" while it lives; then how it ended: it left in order, or why it failed, in its own words
    news          what rank 0, who reads all of the above, has found of the first that was lost; the others read this

A rank that falls silent, a process of this machine that is gone, and a store that no longer answers are a loss, too.
Times are taken on each rank's own clock; no two clocks are compared.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, TypeVar

import torch.distributed as dist

from pipeal.core.errors import PeerLostError, first_line
from pipeal.engine.distributed.mesh import Mesh
from pipeal.engine.distributed.peers import Peer, is_gone

T = TypeVar("T")
LIVING = "-"
"""In the place of an end, and of news."""

_TICK_S = 0.1
_LONGEST_TICK_S = 1.0
"""What a tick counts at most, of the time that others may be silent: where it took longer, this process stood still."""

_LAST_WORDS_S = 2.0
_ALL_HEARD_S = 0.5


@dataclass(frozen=True)
class Loss:
    """What is known of a lost rank; ``rank`` is the first of a chain in which one took down the next."""

    rank: int | None
    message: str
    code: int = 1


class Heartbeat:
    """Beats from :meth:`start` to :meth:`stop`; watches the others from :meth:`watch` on.

    Args:
        line: The store, on a connection that nobody else uses: what blocks there blocks only this thread.
        rank: This rank.
        mesh: Who is who.
        timeout_s: How long a rank or the store may be silent.
        where: Where the store is, for messages.

    Attributes:
        lost: Set as soon as a loss is known.
        asked: The number of the signal that asks this rank to end, and when it came; it is passed on to rank 0, which
            ends for all, but not at once: mostly all of them get it.
        on_asked: On rank 0, called with it, once.
    """

    def __init__(self, line: dist.Store, rank: int, mesh: Mesh, timeout_s: float, where: str) -> None:
        self.rank = rank
        self.mesh = mesh
        self.timeout_s = timeout_s
        self.every_s = min(1.0, max(0.05, timeout_s / 5))
        self.lost = threading.Event()
        self.asked = 0, 0.0
        self.on_asked: Callable[[int], None] | None = None
        self._line = line
        self._where = where
        self._changed = threading.Condition()
        self._calls: list[tuple[Future[Any], Callable[[dist.Store], Any]]] = []
        self._stopped = False
        self._loss: Loss | None = None
        self._crash: BaseException | None = None
        self._peers: list[Peer] = []
        self._beats = 0
        self._told = False
        self._lived_s = self._answered = 0.0
        self._seen: dict[int, tuple[str, float]] = {}
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"pipeal-{name}-{rank}", daemon=True)
            for name, work in (("heartbeat", self._beat_on), ("watch", self._watch_on))
        ]

    def start(self) -> None:
        """Begins to beat."""
        self._line.set(f"beat/{self.rank}", "0")
        self._line.set(f"end/{self.rank}", LIVING)
        if self.rank == 0:
            self._line.set("news", LIVING)
        for thread in self._threads:
            thread.start()

    def watch(self, peers: list[Peer]) -> None:
        """Listens for the others from now on; all of them must have started."""
        with self._changed:
            self._peers = peers
            self._changed.notify_all()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Stops beating; waits at most so long, since a connection that was cut never answers."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def call(self, operation: Callable[[dist.Store], T]) -> T:
        """Does something quick with the store, on the heartbeat's thread.

        Raises:
            PeerLostError: As :meth:`check`.
        """
        call = self._called(operation)
        while not wait([call], _TICK_S).done:
            self.check()
        if call.exception() is not None:
            self.check()
        return call.result()

    def _called(self, operation: Callable[[dist.Store], T]) -> Future[T]:
        call: Future[T] = Future()
        with self._changed:
            self._calls.append((call, operation))
            self._changed.notify_all()
        return call

    def check(self) -> None:
        """Returns while nobody is known to be lost; asks no one and never waits.

        Raises:
            PeerLostError: Somebody is.
        """
        if self._crash is not None:
            raise self._crash
        if self._loss is not None:
            raise PeerLostError(self._loss.message, self._loss.rank, self._loss.code)

    def conclude(self, loss: Loss) -> None:
        """The first loss counts: what comes after it comes of it."""
        with self._changed:
            if self._loss is None and not self._stopped:
                self._loss = loss
                self.lost.set()
                self._changed.notify_all()

    def farewell(self, note: str) -> None:
        """Writes this rank's end, unless it has one already.

        Raises:
            PeerLostError: The store cannot be reached.
        """
        self._line_within(lambda line: line.compare_set(f"end/{self.rank}", LIVING, note))

    def linger(self, ranks: Iterable[int], within_s: float) -> None:
        """Waits until certain ranks have their ends, too, but not for long; raises as :meth:`farewell`.

        Nobody waits for the rank that was lost.
        """
        until = monotonic() + within_s
        while monotonic() < until:
            keys = [f"end/{rank}" for rank in ranks if self._loss is None or rank != self._loss.rank]
            ends = self._line_within(lambda line, keys=keys: [line.check([key]) and line.get(key) for key in keys])  # type: ignore[misc]
            if all(end != LIVING.encode() for end in ends):
                return
            sleep(_TICK_S)

    def _line_within(self, operation: Callable[[dist.Store], T]) -> T:
        """As :meth:`call`, whoever is lost, but for a short time."""
        call = self._called(operation)
        if not wait([call], _LAST_WORDS_S).done or call.exception() is not None:
            raise PeerLostError(f"the store at {self._where} cannot be reached")
        return call.result()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as crash:  # noqa: BLE001  raised in whoever checks next
            self._crash = crash
            self.lost.set()

    def _beat_on(self) -> None:
        due = monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._stopped, max(0.0, due - monotonic()))
                calls, self._calls = self._calls, []
                if self._stopped and not calls:
                    return
            try:
                for call, operation in calls:
                    call.set_result(operation(self._line))
                if monotonic() >= due:
                    due = monotonic() + self.every_s
                    self._beat()
            except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
                self.conclude(self._unreachable(f"gave up the connection ({first_line(error):.100})"))
                for call, _ in calls:  # and not before it is known what that was
                    if not call.done():
                        call.set_exception(error)
                return
            self._answered = self._lived_s

    def _beat(self) -> None:
        self._beats += 1
        asked, when = self.asked
        self._line.set(f"beat/{self.rank}", f"{self._beats} {asked if monotonic() > when + _ALL_HEARD_S else 0}")
        if not self._peers:
            return
        others = [rank for rank in range(self.mesh.size) if rank != self.rank] if self.rank == 0 else [0]
        keys = [f"{kind}/{rank}" for rank in others for kind in ("beat", "end")]
        values = [value.decode() for value in self._line.multi_get([*keys, "news"])]
        for rank, beat, end in zip(others, values[:-1:2], values[1:-1:2], strict=True):
            self._hear_of(rank, beat, end)
        if self.rank:
            if values[-1] != LIVING:
                self.conclude(Loss(*json.loads(values[-1])))
        elif self._loss is not None and not self._told:
            self._line.set("news", json.dumps([self._loss.rank, self._loss.message, self._loss.code]))
            self._told = True

    def _hear_of(self, rank: int, beat: str, end: str) -> None:
        if end != LIVING:
            self.ended(rank, end)
            return
        asked = int(beat.partition(" ")[2] or 0)
        if asked and self.on_asked is not None:
            on_asked, self.on_asked = self.on_asked, None
            on_asked(asked)
        before, since = self._seen.get(rank, ("", 0.0))
        if beat != before:
            self._seen[rank] = beat, self._lived_s
        elif self._lived_s - since > self.timeout_s:
            self.conclude(Loss(rank, f"{self.name_of(rank)} has given no sign of life for {self.timeout_s:g} s"))

    def ended(self, rank: int, end: str) -> None:
        """Takes note of a rank's end, as it stands in the store."""
        note = json.loads(end)
        if note.get("left"):
            return  # in order: no loss, but for who still waits for its word (Collectives.gather)
        if note["rank"] != rank:  # taken down by another, of which its words are
            self.conclude(Loss(note["rank"], note["why"], note["code"]))
        else:
            self.conclude(Loss(rank, f"{self.name_of(rank)} ended: {note['why']}", note["code"]))

    def _watch_on(self) -> None:
        """Judges by what is known here, whatever the store does."""
        last, gone = monotonic(), set[int]()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._stopped, _TICK_S):
                    return
            now = monotonic()
            self._lived_s += min(now - last, _LONGEST_TICK_S)
            last = now
            if self._lived_s - self._answered > self.timeout_s:
                self.conclude(self._unreachable(f"has not answered for {self.timeout_s:g} s"))
            for rank, peer in enumerate(self._peers):
                if rank not in gone and rank != self.rank and is_gone(peer):
                    gone.add(rank)
                    self._report_gone(rank, peer)

    def _report_gone(self, rank: int, peer: Peer) -> None:
        """A process that is gone without a word gets one; one that left in order did say so before."""
        note = json.dumps({"rank": rank, "why": f"without a word; its process {peer.pid} is gone", "code": 1})

        def report(line: dist.Store) -> None:
            self.ended(rank, line.compare_set(f"end/{rank}", LIVING, note).decode())

        self._called(report)

    def _unreachable(self, how: str) -> Loss:
        return Loss(0, f"{self.name_of(0)} cannot be reached: the store at {self._where} {how}")

    def name_of(self, rank: int) -> str:
        """A rank, with its host where that is known, as messages name it."""
        where = f" on {self._peers[rank].host}" if self._peers else ""
        return f"{self.mesh.name_of(rank)}{where}"
