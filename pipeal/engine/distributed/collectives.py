"""What the ranks of a run say to each other and do together; no wait for another outlives it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from math import inf
from typing import Any, TypeVar

import torch.distributed as dist

from pipeal.core.background import in_background
from pipeal.core.errors import PeerLostError, StallError, first_line
from pipeal.engine.distributed.attempt_store import POLL_S
from pipeal.engine.distributed.heartbeat import LIVING, Heartbeat
from pipeal.engine.distributed.peers import Peer

T = TypeVar("T")


class Collectives:
    """The ranks, as one of them that has met the others speaks with them.

    Args:
        heartbeat: Speaks with the store; knows who this rank is, and who is which stage of which replica.

    Attributes:
        rank: This one's number.
        mesh: Who is who.
        size: How many there are.
        timeout_s: How long a peer may be silent before it counts as lost.
        lost: Set as soon as a peer is known to be lost; :meth:`check` then says which.
        peers: The processes, by rank; none before they have met.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.rank, self.mesh, self.timeout_s = heartbeat.rank, heartbeat.mesh, heartbeat.timeout_s
        self.size = heartbeat.mesh.size
        self.lost = heartbeat.lost
        self.peers: list[Peer] = []
        self._heartbeat = heartbeat
        self._gathered = self._said = self._joined = 0

    @property
    def patience_s(self) -> float:
        """How long it may take until the end of a peer is known, where its machine still runs: some heartbeats."""
        return min(4 * self._heartbeat.every_s, self.timeout_s)

    def name_of(self, rank: int) -> str:
        """A rank, with its host, as messages name it."""
        return self._heartbeat.name_of(rank)

    def check(self) -> None:
        """Returns while all peers live, as far as is known; never waits.

        Raises:
            PeerLostError: One does not.
        """
        self._heartbeat.check()

    def peer_lost(self, rank: int | None, error: BaseException) -> PeerLostError:
        """The error to raise where a connection to a peer broke: what is known of that peer's end, if it said why.

        Waits for its word a few heartbeats long, and until silence would be known where nobody knows which peer it is.

        Args:
            rank: The peer at the other end; None for any.
            error: What the connection said.
        """
        if self.lost.wait(self.patience_s if rank is not None else self.timeout_s + self.patience_s):
            try:
                self.check()
            except PeerLostError as known:
                known.__cause__ = error
                return known
        peer = "another rank" if rank is None else self.name_of(rank)
        lost = PeerLostError(f"the connection to {peer} broke: {first_line(error)}", rank)
        lost.__cause__ = error
        return lost

    def guarded(self, work: Callable[[], T], within_s: float = inf, what: str = "it") -> T:
        """Does on a thread of its own what may block for ever.

        The thread is left behind, blocked, when a peer is lost or the time is over.

        Raises:
            PeerLostError: A peer was lost before it was done.
            StallError: It was not done in time.
            Exception: What ``work`` raised.
        """
        done = in_background(work, f"pipeal-guarded: {what}")
        return self.awaited(done, within_s, f"{what} was not done within {within_s:g} s")

    def awaited(self, done: Future[T], within_s: float, late: str) -> T:
        """What comes of the work of another thread; raises as :meth:`guarded`, with ``late`` where time is over."""
        until = time.monotonic() + within_s
        while not wait([done], POLL_S).done:
            self.check()
            if time.monotonic() > until:
                raise StallError(late)
        return done.result()

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Does what needs every rank, such as making process groups; all of them call it, in the same order.

        Args:
            what: It, for messages.
            work: Does it.

        Raises:
            PeerLostError: A peer was lost before it was done, or it took longer than the timeout: those are named who
                were not done with it.
        """
        self._joined += 1
        keys = [f"joined/{self._joined}/{rank}" for rank in range(self.size)]
        try:
            found = self.guarded(work, self.timeout_s, what)
        except (RuntimeError, StallError) as error:
            if isinstance(error, PeerLostError):
                raise
            if self.lost.wait(self.patience_s):
                self.check()
            done = self._heartbeat.call(lambda line: [line.check([key]) for key in keys])
            open_still = [rank for rank in range(self.size) if not done[rank]]
            others = [rank for rank in open_still if rank != self.rank]
            said = str(error) if isinstance(error, StallError) else f"{what} failed: {first_line(error)}"
            raise PeerLostError(
                f"{said}; not done with it: {', '.join(map(self.name_of, open_still))}; see that they reach each other "
                "on every port (a firewall, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or give them longer "
                "(engine.peer_timeout_s)",
                others[0] if others else None,
            ) from error
        self._heartbeat.call(lambda line: line.set(keys[self.rank], "1"))
        return found

    def tell(self, message: Any) -> None:
        """Says something, as JSON, that every other rank is to :meth:`hear`; for rank 0."""
        self._said += 1
        key, text = f"said/{self._said}", json.dumps(message)
        self._heartbeat.call(lambda line: line.set(key, text))

    def hear(self) -> Any:
        """Waits for the next thing that rank 0 tells; for all others.

        Raises:
            PeerLostError: A peer was lost before, or rank 0 has left.
        """
        self._said += 1
        return json.loads(self._given({0: f"said/{self._said}"})[0])

    def gather(self, value: Any) -> list[Any]:
        """What all ranks give here, as JSON, by rank; all of them must call it, in the same order.

        Raises:
            PeerLostError: A peer was lost, or has left, before it gave its own.
        """
        self._gathered += 1
        text, keys = json.dumps(value), [f"given/{self._gathered}/{rank}" for rank in range(self.size)]

        self._heartbeat.call(lambda line: line.set(keys[self.rank], text))
        return [json.loads(value) for value in self._given(dict(enumerate(keys)))]

    def _given(self, keys: Mapping[int, str]) -> list[bytes]:
        """Waits for what some ranks give, each under its key. Far away each question costs a round trip.

        Raises:
            PeerLostError: As :meth:`gather`.
        """
        wanted = list(keys.values())

        def look(line: dist.Store) -> tuple[list[bytes], list[tuple[int, str]]]:
            """All there is as soon as it is complete, and who has ended without giving."""
            ends = line.multi_get([f"end/{rank}" for rank in keys])  # before: one may give, and then leave
            if line.check(wanted):
                return line.multi_get(wanted), []
            ended = [(rank, end.decode()) for rank, end in zip(keys, ends, strict=True) if end.decode() != LIVING]
            return [], [(rank, end) for rank, end in ended if not line.check([keys[rank]])]

        while True:
            values, ended = self._heartbeat.call(look)
            if values:
                return values
            for rank, end in ended:
                self._heartbeat.ended(rank, end)
                self.check()
                raise PeerLostError(f"{self.name_of(rank)} has left, and this rank still waited for it", rank)
            self.check()
            time.sleep(POLL_S)
