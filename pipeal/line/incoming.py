"""The end of a link to the stage before: takes its items in order, each once, and says what is saved."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pipeal import __version__
from pipeal.core.errors import ConfigError, DataError, first_line
from pipeal.engine.distributed.sockets import arriving, packed_head
from pipeal.line.items import Packed
from pipeal.line.link import MOST_CONNECTIONS, REFUSED, End, Keys, heard, log
from pipeal.line.status import stages_before

_SHAKEN = zmq.EVENT_HANDSHAKE_SUCCEEDED

_NONE = 1 << 62
"""Beyond the number of any item."""

_PATIENCE_S = 1.0
"""So long after an item was refused it is asked for again: what there was no memory for may have some then."""


@dataclass(frozen=True)
class _Waiting:
    """An item that has come: how many bytes it takes, when that was, and in which session."""

    item: Packed
    size: int
    at: float
    session: int


@dataclass(frozen=True)
class _Refused:
    """An item that could not be taken: in which session last, and when first."""

    session: int
    at: float


class Incoming(End):
    """That end.

    Args:
        stage: The number of this stage.
        address: ``host:port``, where it listens.
        keys: Of both.
        line: The line's name.
        begun: As for :class:`End`.
        first: The number of the item to go on with: a snapshot covers all before it.
        largest_bytes: Of a tensor, there where it arrives; an item with a larger one is refused.
        room_bytes: Items of so many bytes, with their heads, may wait to be taken. One that comes then is let go, and
            asked for later.

    Attributes:
        saved: The number that the last snapshot covers all items before.
        wants_snapshot: Whether the stage before has asked for one.
        bye: Whether it has said that nothing more will come.
        left: Whether it has said so and knows that this was heard.
        statuses: How all stages before stand, as they told.
    """

    def __init__(
        self,
        stage: int,
        address: str,
        keys: Keys,
        line: str,
        first: int,
        begun: str | None = None,
        *,
        largest_bytes: int,
        room_bytes: float,
    ) -> None:
        super().__init__(f"pipeal-line-{stage}-in", line, begun, threading.Condition())
        self.stage = stage
        self.saved = self._expected = self._next = first
        self._next_over = [first]
        self._largest_bytes = largest_bytes
        self._room_bytes = room_bytes
        self._early: dict[int, _Waiting] = {}
        self._waiting_bytes = 0
        self._let_go = _NONE
        self.wants_snapshot = self.bye = self.left = False
        self.statuses: Mapping[str, Any] = {}
        self._arrived: deque[_Waiting] = deque()
        self._peer: bytes | None = None
        self._session = -1
        self._life, self._lives_sessions = -1, 0
        self._former_lives: set[int] = set()
        self._probed_at = 0.0
        self._asked_again = -1
        self._has_met = False
        self._refused: dict[int, _Refused] = {}
        self._ask_again_at = inf
        self._allowed = keys.peer
        self._guard = ThreadAuthenticator(self.context)
        self._guard.start()
        self._guard.configure_curve_callback(credentials_provider=self)
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _SHAKEN | REFUSED
        made = self._socket = self.open(zmq.ROUTER, keys, events, address, {zmq.ROUTER_MANDATORY: 1})
        made.curve_server = True
        self._strange: set[int] = set()
        try:
            _bind(made, address)
        except BaseException:
            self.close(0)
            raise

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002  called by the authenticator
        """Whether who has that key is let in."""
        known = key.decode() == self._allowed
        try:
            if not known:
                self.refusals.tell(
                    f"a connection with an unknown key ({key.decode()}) was refused; a stage of this line needs the "
                    "files of the same pipeal line init"
                )
        except Exception as error:  # noqa: BLE001  such as a log that is closed: the authenticator would end silently
            self.fail(error)
        return known

    def take(self, timeout_s: float) -> tuple[int, Packed] | None:
        """The next item and its number, from the stage's thread; None where none came in time or a snapshot is wanted.

        Raises:
            LineError: The line was stopped.
            Exception: What the thread at the socket failed with.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: self._arrived or self.failure is not None or self.wants_snapshot or self.bye, timeout_s
            )
            if self.failure is not None:
                raise self.failure
            if not self._arrived:
                return None
            found = self._arrived.popleft()
            number, self._next = self._next, self._next + 1
            self._waiting_bytes -= found.size
        self.tell("taken", monotonic() - found.at, found.session)
        return number, found.item

    def part(self) -> None:
        """Lets the stage before know that it need not wait for this one."""
        self.parted, self.bye = True, False  # where it has not heard, it says so again
        self.tell("parted")

    def tell_saved(self, number: int) -> None:
        """Lets the stage before know that a snapshot covers all items before a number."""
        self.saved = number
        self.tell("saved", number)

    def __len__(self) -> int:
        return len(self._arrived)

    def _look(self) -> None:
        if self._let_go == self._expected and not self._arrived:
            self._let_go = _NONE
            self.send(["again"])
        if monotonic() > self._ask_again_at:
            self._ask_again_at = inf
            self.send(["again"])
        if monotonic() - self._probed_at > 1.0:  # a peer that is gone shows when something is sent to it
            self._probed_at = monotonic()
            self.send(["alive"])

    def _leave(self) -> None:
        self._guard.stop()

    def _hear_of(self, event: Mapping[str, Any], number: int) -> None:  # noqa: ARG002  there is but one socket
        """Tells of those who do not even try a key; who tries a wrong one is told of with it."""
        kind, file = event["event"], event["value"]
        if kind == zmq.EVENT_ACCEPTED:
            self._strange.add(file)
        elif kind == zmq.EVENT_DISCONNECTED and file in self._strange:
            self._strange.remove(file)
            self.refusals.tell("a connection of something that is no stage of this line was refused")
        elif kind & (_SHAKEN | REFUSED):
            self._strange.clear()
            if kind & (REFUSED & ~zmq.EVENT_HANDSHAKE_FAILED_AUTH):
                self.refusals.tell("a connection without this stage's key, or without any, was refused")

    def _receive(self, ready: Any) -> None:
        sender = f"stage {self.stage - 1}"
        for peer, *frames in arriving(ready):
            if frames:
                who, (frame, *more) = bytes(peer.buffer), frames
                heard(frame, lambda words: self._understand(who, words, more, len(frame.buffer)), sender, self.refusals)  # noqa: B023

    def _understand(self, peer: bytes, words: list[Any], frames: list[Any], head_bytes: int) -> None:
        kind, session, *facts = words
        if type(session) is not int:
            raise TypeError("it has no session")
        if kind == "hello":
            self._greet(peer, session, *facts)
            return
        if session != self._session:
            return  # of one that is no more
        if kind == "item":
            number, *head = facts
            if type(number) is not int or number < 0:
                raise ValueError(f"{str(number)[:40]!r} is no number of an item")
            self._take_in(number, head, frames, head_bytes)
            return
        with self.changed:
            if kind == "save":
                self.wants_snapshot = True
            elif kind == "bye":
                self.bye = True
            elif kind == "left":
                self.left = True
            elif kind == "begun":
                self._meet(facts[0])
            elif kind == "status":
                self.statuses = stages_before(self.stage, facts[0])
            elif kind == "stop":
                self.hear_stop(facts[0])
            elif kind == "heard":
                self.hear_heard()
            elif kind == "lost":
                self.failure = self.failure or DataError(
                    f"stage {self.stage - 1} has no items before {facts[0]:d}, which a snapshot here had covered, and "
                    f"this stage asks for {self._expected}: it has lost its newest snapshot; put its folder back, or "
                    "make a new line that goes on with the run (pipeal line init --resume RUN)"
                )
            else:
                raise ValueError(f"it says {str(kind)[:40]!r}")
            self.changed.notify_all()

    def _take_in(self, number: int, head: list[Any], frames: list[Any], head_bytes: int) -> None:
        """An item has come, perhaps before those that travel over other connections."""
        over = number % len(self._next_over)
        if number > self._next_over[over]:
            refused = self._refused.get(self._next_over[over])
            waits = refused is not None and refused.session == self._session
            if not waits and self._asked_again != self._expected and self._next_over[over] < self._let_go:
                self._asked_again = self._expected  # one before it, over the same connection, was refused
                self.send(["again"])
        elif number == self._next_over[over]:
            try:
                item = Packed.arrived(head, frames, self._largest_bytes)
            except Exception as error:
                self._refuse(number, error)
                raise
            self._refused.pop(number, None)
            size = item.size + head_bytes  # or items without tensors would fill memory
            with self.changed:
                room = self._waiting_bytes + size <= self._room_bytes
                if not room and (self._arrived or number > self._expected):
                    self._let_go = min(self._let_go, number)
                    return
                self._next_over[over] += len(self._next_over)
                self._waiting_bytes += size
                self._early[number] = _Waiting(item, size, monotonic(), self._session)
                while self._expected in self._early:
                    self._arrived.append(self._early.pop(self._expected))
                    self._expected += 1
                self.changed.notify_all()

    def _refuse(self, number: int, error: Exception) -> None:
        """Has an item come again that could not be taken, as for want of memory; one that came again ends the stage."""
        now = monotonic()
        before = self._refused.get(number, _Refused(-1, now))
        if before.session != self._session:  # not the same again
            self._refused[number] = _Refused(self._session, before.at)
            if now <= before.at + _PATIENCE_S:
                self._ask_again_at = min(self._ask_again_at, before.at + _PATIENCE_S)
            else:
                why = str(error) if isinstance(error, DataError) else first_line(error)
                self.fail(DataError(f"item {number} of stage {self.stage - 1} was refused twice: {why}"))

    def _meet(self, begun: Any) -> None:
        """Ends the stage where the one before has begun again from nothing, with items that only seem to go on; else
        says what is saved, for which that one must know its beginning if this one does."""
        self._has_met = self.begun in (None, begun)
        if begun is not None and not self._has_met:
            self.fail(
                DataError(
                    f"stage {self.stage - 1} has begun the line again, and this stage's snapshots are of the time "
                    "before; remove this stage's folder as well, or put back those of the stages before"
                )
            )
        self.send(["saved", self.saved])

    def _greet(
        self,
        peer: bytes,
        session: int,
        line: str,
        stage: int,
        version: str,
        connections: int,
        life: int,
        sessions: int,
        begun: str | None,
    ) -> None:
        if line != self.line or stage != self.stage - 1:
            came = f"stage {stage} of the line {str(line)[:40]!r} came"
            raise ValueError(f"{came}, stage {self.stage - 1} of {self.line!r} was expected")
        if type(connections) is not int or not 1 <= connections <= MOST_CONNECTIONS:
            raise ValueError(f"it has {str(connections)[:40]!r} connections")
        if not (type(life) is type(sessions) is int):
            raise TypeError("it does not say which life of its stage it is")
        if life in self._former_lives:  # which goes on beside the present one, or has ended with this on its way
            self._say_replaced(peer, session)
            return
        if life == self._life and sessions <= self._lives_sessions:
            return  # it was on its way over a connection that is no more
        if version != __version__:
            log.warning(f"stage {stage} has pipeal {str(version)[:20]!r}, this one {__version__}: bits may differ")
        if peer != self._peer:
            self._asked_again = -1
        if life != self._life:
            self._former_lives.add(self._life)
            if self._peer is not None:
                self._say_replaced(self._peer, self._session)
        self._life, self._lives_sessions = life, sessions
        self._peer, self._session, self._let_go, self._ask_again_at = peer, session, _NONE, inf
        with self.changed:
            self._waiting_bytes -= sum(one.size for one in self._early.values())
            self._early.clear()
        self._next_over = [self._expected + (i - self._expected) % connections for i in range(connections)]
        self.set_connected(True)
        self.send(["want", self._expected])
        self._meet(begun)

    def _say_replaced(self, peer: bytes, session: int) -> None:
        with suppress(zmq.ZMQError):  # it is gone
            self._socket.send_multipart([peer, packed_head(["replaced", session])], zmq.NOBLOCK)

    def send(self, words: list[Any]) -> None:
        """As said there."""
        if self._peer is None:
            return
        if words[0] == "taken" and words.pop() != self._session:
            return  # in a session since then, the stage before counts others
        if words[0] == "saved" and not self._has_met:
            return  # it is said when they have
        try:
            self._socket.send_multipart([self._peer, packed_head([words[0], self._session, *words[1:]])], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._peer = None  # it will come again, and be told then
            self.set_connected(False)
            if not self.left:
                log.info(f"stage {self.stage - 1} is gone; waiting for it")


def _bind(made: Any, address: str) -> None:
    """Listens at the address of this machine that the name stands for, or at all where it is a router's.

    Raises:
        ConfigError: It cannot.
    """
    host, _, port = address.rpartition(":")
    try:
        own = host if host.startswith("[") else socket.gethostbyname(host)
    except OSError:
        own = "*"
    if own.startswith("127.") and host not in ("localhost", own):
        own = "*"  # many systems have their own name stand for that, where no other machine gets in
    for where in dict.fromkeys((own, "*")):
        try:
            made.bind(f"tcp://{where}:{port}")
            if where == "*":
                log.info(f"{host} is no address of this machine alone; port {port} of all of its addresses is open")
            return
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise ConfigError(
                    f"{address}: the port is in use; end what listens there (perhaps this very stage), or name another"
                ) from error
            refusal = error
    raise ConfigError(f"{address}: cannot listen there: {refusal.strerror}") from refusal
