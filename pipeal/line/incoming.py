"""The end of a link to the stage before: takes its items in order, each once, and says what is saved."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pipeal import __version__
from pipeal.core.errors import ConfigError, DataError, LineError
from pipeal.line.items import Packed
from pipeal.line.link import REFUSED, End, Keys, heard, log, packed_head, printable
from pipeal.line.status import stages_before

_SHAKEN = zmq.EVENT_HANDSHAKE_SUCCEEDED


class Incoming(End):
    """That end.

    Args:
        stage: The number of this stage.
        address: ``host:port``, where it listens.
        keys: Of both.
        line: The line's name.
        first: The number of the item to go on with: a snapshot covers all before it.
        largest_bytes: Of a tensor, there where it arrives; an item with a larger one is refused.
        room_bytes: Items of so many bytes may wait to be taken. One that comes then is let go, and asked for later.

    Attributes:
        saved: The number that the last snapshot covers all items before.
        wants_snapshot: Whether the stage before has asked for one.
        bye: Whether it has said that nothing more will come.
        statuses: How all stages before stand, as they told.
    """

    def __init__(
        self,
        stage: int,
        address: str,
        keys: Keys,
        line: str,
        first: int,
        *,
        largest_bytes: int,
        room_bytes: float,
    ) -> None:
        super().__init__(f"pipeal-line-{stage}-in", line, threading.Condition())
        self.stage = stage
        self.saved = self._expected = self._next = first
        self._largest_bytes = largest_bytes
        self._room_bytes = room_bytes
        self._waiting_bytes = 0
        self._let_go = False
        self.wants_snapshot = self.bye = False
        self.statuses: Mapping[str, Any] = {}
        self._arrived: deque[tuple[Packed, float, int]] = deque()
        self._peer: bytes | None = None
        self._session = 0
        self._probed_at = 0.0
        self._asked_again = -1
        self._allowed = keys.peer
        self._guard = ThreadAuthenticator(self.context)
        self._guard.start()
        self._guard.configure_curve_callback(credentials_provider=self)
        made = self.open(zmq.ROUTER, keys, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _SHAKEN | REFUSED)
        made.setsockopt(zmq.ROUTER_MANDATORY, 1)
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
                self.refusals.tell(f"a connection with an unknown key ({key.decode()}) was refused")
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
            item, at, session = self._arrived.popleft()
            number, self._next = self._next, self._next + 1
            self._waiting_bytes -= item.size
        if session == self._session:  # on a connection since then, the stage before counts others
            self.tell("taken", monotonic() - at)
        return number, item

    def tell_saved(self, number: int) -> None:
        """Lets the stage before know that a snapshot covers all items before a number."""
        self.saved = number
        self.tell("saved", number)

    def __len__(self) -> int:
        return len(self._arrived)

    def _look(self) -> None:
        if self._let_go and not self._arrived:
            self._let_go = False
            self._want()
        if monotonic() - self._probed_at > 1.0:  # a peer that is gone shows when something is sent to it
            self._probed_at = monotonic()
            self.send(["alive"])

    def _leave(self) -> None:
        self._guard.stop()

    def _hear_of(self, event: Mapping[str, Any]) -> None:
        """Tells of those who do not even try a key; who tries a wrong one is told of with it."""
        kind, number = event["event"], event["value"]
        if kind == zmq.EVENT_ACCEPTED:
            self._strange.add(number)
        elif kind == zmq.EVENT_DISCONNECTED and number in self._strange:
            self._strange.remove(number)
            self.refusals.tell("a connection of something that is no stage of this line was refused")
        elif kind & (_SHAKEN | REFUSED):
            self._strange.clear()
            if kind & (REFUSED & ~zmq.EVENT_HANDSHAKE_FAILED_AUTH):
                self.refusals.tell("a connection without this stage's key, or without any, was refused")

    def _receive(self) -> None:
        sender = f"stage {self.stage - 1}"
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if frames:
                who, (frame, *more) = bytes(peer.buffer), frames
                heard(frame, lambda words: self._understand(who, words, more), sender, self.refusals)  # noqa: B023

    def _understand(self, peer: bytes, words: list[Any], frames: list[Any]) -> None:
        kind, session, *facts = words
        if type(session) is not int:
            raise TypeError("it has no session")
        if kind == "hello":
            self._greet(peer, session, *facts)
            return
        if (peer, session) != (self._peer, self._session):
            return  # of a connection that is no more
        if kind == "item":
            number, *head = facts
            if number == self._expected:
                item = Packed.arrived(head, frames, self._largest_bytes)
                with self.changed:
                    if self._arrived and self._waiting_bytes + item.size > self._room_bytes:
                        self._let_go = True
                        return
                    self._expected += 1
                    self._waiting_bytes += item.size
                    self._arrived.append((item, monotonic(), session))
                    self.changed.notify_all()
            elif type(number) is not int or number < 0:
                raise ValueError(f"{str(number)[:40]!r} is no number of an item")
            elif number > self._expected and self._asked_again != self._expected and not self._let_go:
                self._asked_again = self._expected  # one before it was refused
                self._want()
            return
        with self.changed:
            if kind == "save":
                self.wants_snapshot = True
            elif kind == "bye":
                self.bye = True
            elif kind == "status":
                self.statuses = stages_before(self.stage, facts[0])
            elif kind == "stop":
                self.failure = self.failure or LineError(printable(facts[0]))
            elif kind == "lost":
                self.failure = self.failure or DataError(
                    f"stage {self.stage - 1} has no items before {facts[0]:d}, which a snapshot here had covered, and "
                    f"this stage asks for {self._expected}: it has lost its newest snapshot; put its folder back, or "
                    "begin the line anew"
                )
            else:
                raise ValueError(f"it says {str(kind)[:40]!r}")
            self.changed.notify_all()

    def _greet(self, peer: bytes, session: int, line: str, stage: int, version: str) -> None:
        if line != self.line or stage != self.stage - 1:
            came = f"stage {stage} of the line {str(line)[:40]!r} came"
            raise ValueError(f"{came}, stage {self.stage - 1} of {self.line!r} was expected")
        if version != __version__:
            log.warning(f"stage {stage} has pipeal {str(version)[:20]!r}, this one {__version__}: bits may differ")
        if self._peer is not None and self._peer != peer:
            # The same process, which has made a connection anew, lets this word of the old one go.
            with suppress(zmq.ZMQError):
                self._socket.send_multipart([self._peer, packed_head(["replaced", self._session])], zmq.NOBLOCK)
        self._peer, self._session, self._asked_again = peer, session, -1
        self.set_connected(True)
        self._want()

    def _want(self) -> None:
        self.send(["want", self._expected, self.saved])

    def send(self, words: list[Any]) -> None:
        """As said there."""
        if self._peer is None:
            return
        try:
            self._socket.send_multipart([self._peer, packed_head([words[0], self._session, *words[1:]])], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._peer = None  # it will come again, and be told then
            self.set_connected(False)
            log.info(f"stage {self.stage - 1} is gone; waiting for it")


def _bind(made: Any, address: str) -> None:
    """Listens at the address of this machine that the name stands for, or at all where it is a router's.

    Raises:
        ConfigError: It cannot.
    """
    host, _, port = address.rpartition(":")
    try:
        own = socket.gethostbyname(host)
    except OSError:
        own = "*"
    if own.startswith("127.") and host not in ("localhost", own):
        own = "*"  # many systems have their own name stand for that, where no other machine gets in
    for where in dict.fromkeys((own, "*")):
        try:
            made.bind(f"tcp://{where}:{port}")
            return
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise ConfigError(
                    f"{address}: the port is in use; end what listens there (perhaps this very stage), or name another"
                ) from error
            refusal = error
    raise ConfigError(f"{address}: cannot listen there: {refusal.strerror}") from refusal
