"""The end of a link to the stage before: takes its items in order, each once, and says what is saved."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pipeal import __version__
from pipeal.core.errors import ConfigError, LineError
from pipeal.line.items import Packed
from pipeal.line.link import TICK_S, End, Keys, heard, log, packed_head


class Incoming(End):
    """That end.

    Args:
        stage: The number of this stage.
        address: ``host:port``, where it listens.
        keys: Of both.
        line: The line's name.
        first: The number of the item to go on with: a snapshot covers all before it.
        largest_bytes: Of a message's part; the connection of one that sends more is closed.

    Attributes:
        saved: The number that the last snapshot covers all items before.
        wants_snapshot: Whether the stage before has asked for one.
        bye: Whether it has said that nothing more will come.
        statuses: How all stages before stand, as they told.
    """

    def __init__(self, stage: int, address: str, keys: Keys, line: str, first: int, largest_bytes: int) -> None:
        super().__init__(f"pipeal-line-{stage}-in", line, threading.Condition())
        self.stage = stage
        self.saved = self._expected = self._next = first
        self.wants_snapshot = self.bye = False
        self.statuses: Mapping[str, Any] = {}
        self._arrived: deque[tuple[Packed, float]] = deque()
        self._peer: bytes | None = None
        self._session = 0
        self._probed_at = 0.0
        self._asked_again = -1
        self._allowed = keys.peer
        self._guard = ThreadAuthenticator(self.context)
        self._guard.start()
        self._guard.configure_curve_callback(credentials_provider=self)
        self._socket = self.socket(zmq.ROUTER, largest_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        _bind(self._socket, address)

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002  called by the authenticator
        """Whether who has that key is let in."""
        known = key.decode() == self._allowed
        if not known:
            log.warning(f"a connection with an unknown key ({key.decode()}) was refused")
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
            item, at = self._arrived.popleft()
            number, self._next = self._next, self._next + 1
        self.tell("taken", monotonic() - at)
        return number, item

    def tell_saved(self, number: int) -> None:
        """Lets the stage before know that a snapshot covers all items before a number."""
        self.saved = number
        self.tell("saved", number)

    def __len__(self) -> int:
        return len(self._arrived)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for one in (self._socket, self._wake_in):
            poller.register(one, zmq.POLLIN)
        while not self.closing:
            for found, _ in poller.poll(int(1000 * TICK_S)):
                if found is self._socket:
                    self._receive()
            self.speak()
            if monotonic() - self._probed_at > 1.0:  # a peer that is gone shows when something is sent to it
                self._probed_at = monotonic()
                self.send(["alive"])
        self.speak()

    def _leave(self) -> None:
        self._guard.stop()

    def _receive(self) -> None:
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if frames:
                who, (frame, *more) = bytes(peer.buffer), frames
                heard(frame, lambda words: self._understand(who, words, more), f"stage {self.stage - 1}")  # noqa: B023

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
                item = Packed.arrived(head, frames)
                item.item()  # told now, where the message can still be refused
                with self.changed:
                    self._expected += 1
                    self._arrived.append((item, monotonic()))
                    self.changed.notify_all()
            elif type(number) is int and number > self._expected and self._asked_again != self._expected:
                self._asked_again = self._expected  # one before it was refused
                self._want()
            return
        with self.changed:
            if kind == "save":
                self.wants_snapshot = True
            elif kind == "bye":
                self.bye = True
            elif kind == "status" and isinstance(facts[0], dict):
                self.statuses = facts[0]
            elif kind == "stop":
                self.failure = self.failure or LineError(str(facts[0])[:2000])
            else:
                raise ValueError(f"it says {str(kind)[:40]!r}")
            self.changed.notify_all()

    def _greet(self, peer: bytes, session: int, line: str, stage: int, version: str) -> None:
        if line != self.line or stage != self.stage - 1:
            came = f"stage {stage} of the line {str(line)[:40]!r} came"
            raise ValueError(f"{came}, stage {self.stage - 1} of {self.line!r} was expected")
        if version != __version__:
            log.warning(f"stage {stage} has pipeal {str(version)[:20]}, this one {__version__}: bits may differ")
        self._peer, self._session = peer, session
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
