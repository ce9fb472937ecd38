"""The end of a link to the next stage: sends what is retained from where that stage goes on, as its window has room."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any

import zmq

from pipeal import __version__
from pipeal.core.errors import DataError
from pipeal.engine.distributed.send_buffer import SendBuffers
from pipeal.engine.distributed.sockets import arriving, packed_head
from pipeal.engine.distributed.window import Window
from pipeal.line.link import CONNECTIONS, REFUSED, End, Keys, heard, log
from pipeal.line.retained import Retained

_EVENTS = SendBuffers.EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED

_OPTIONS = {
    zmq.IMMEDIATE: 1,  # what is not on its way by then is sent again
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2000,
    zmq.CONNECT_TIMEOUT: 5000,  # the system's own tries get rarer for minutes
}

_LEAST = 2
"""So many items may always be on their way over each connection."""

AGAIN_S = 10.0
"""So long after connections were last made or lost, those that are gone are made again."""


class Outgoing(End):
    """That end.

    Args:
        stage: The number of this stage.
        address: ``host:port``, where the next stage listens.
        keys: Of both.
        retained: What to send; its condition is notified of all that happens here.
        line: The line's name.
        begun: As for :class:`End`.
        connections: Over so many items may travel. There is one, until send buffers hold up those there are.

    Attributes:
        window: Of the connection there is.
        sent: The number of the item that is sent next.
    """

    def __init__(
        self,
        stage: int,
        address: str,
        keys: Keys,
        retained: Retained,
        line: str,
        begun: str | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        super().__init__(f"pipeal-line-{stage}-out", line, begun, retained.changed)
        self.stage = stage
        self.address = address
        self.retained = retained
        self.window = Window()
        self.sent = 0
        self._bye = False
        self._life, self._sessions = secrets.randbits(60), 0
        self._session = 0
        self._asked_for = self._over = 0
        self._standing: set[int] = set()
        self._buffers = SendBuffers()
        self._gone: set[int] = set()
        self._told_refused = self._told_lost = False
        for _ in range(connections):  # one socket's connections to one address would be one
            made = self.open(zmq.DEALER, keys, _EVENTS | REFUSED, address, _OPTIONS)
            made.curve_serverkey = keys.peer.encode()
        self._join()

    def ask_for_snapshot(self) -> None:
        """Has the next stage save, so that what it covers can go."""
        self.tell("save")

    def tell_status(self, stages: Mapping[str, Any]) -> None:
        """Lets the next stage know how this one and all before it stand."""
        self.tell("status", stages)

    def set_begun(self, begun: str) -> None:
        """Lets the next stage know which beginning the items count from, ahead of them."""
        self.begun = begun
        self.tell("begun", begun)

    def bye(self) -> None:
        """Says that nothing more will come or be asked for; in each session again, until the next stage has
        :attr:`parted`."""
        self._bye = True
        self.tell("bye")

    def leave(self) -> None:
        """Says that it has heard so: the next stage need not say it again."""
        self.tell("left")

    def _hear_of(self, event: Mapping[str, Any], number: int) -> None:
        kind = event["event"]
        self._buffers.hear_of(number, event)
        if kind == zmq.EVENT_CONNECTED:
            self._gone.discard(number)
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._standing.add(number)
            self._told_refused = self._told_lost = False
            self._begin()
        elif kind == zmq.EVENT_DISCONNECTED:
            self._gone.add(number)
            self._standing.discard(number)
            if number < self._over:  # a session goes over it
                self._begin()
        elif kind & REFUSED and not self._told_refused:
            self._told_refused = True
            log.warning(
                f"stage {self.stage + 1} at {self.address} refuses this stage's key, or has another one; both need the "
                "files of the same pipeal line init (or the port is forwarded, and the stage behind it not started)"
            )

    def _join(self) -> None:
        self._sockets[self._asked_for].connect(f"tcp://{self.address}")
        self._asked_for += 1
        self._tried_at = monotonic()

    def _try_again(self) -> None:
        """Makes connections again that came and went, and a session where there is none.

        ZeroMQ tries again by itself where none answers. Where something else did once, such as a server of another
        kind, or the next stage refused the key, it gives the address up and says nothing. Nothing else is made again: a
        handshake may take long, and so may a name.
        """
        self._tried_at = monotonic()
        gone, self._gone = self._gone, set()
        for number in gone:
            with suppress(zmq.ZMQError):  # it was given up
                self._sockets[number].disconnect(f"tcp://{self.address}")
            self._sockets[number].connect(f"tcp://{self.address}")
        if not self.connected:
            self._begin()

    def _begin(self) -> None:
        """Begins a session over the connections that stand: what was on the way over one that broke comes again."""
        self._tried_at = monotonic()
        self.set_connected(False)  # until it has been said with which item to go on
        before, self._over = self._over, next(number for number in count() if number not in self._standing)
        if self._over:
            self._session = secrets.randbits(60)  # no two processes of this stage have the same one
            self._sessions += 1
            self.send(["hello", self.line, self.stage, __version__, self._over, self._life, self._sessions, self.begun])
        elif before:
            log.info(f"stage {self.stage + 1} is gone; waiting for it")

    def _widen(self) -> None:
        """Makes another connection where buffers hold up those there are, and cannot become larger."""
        if self._buffers.look() and self.connected and self._asked_for == self._over < len(self._sockets):
            log.info(
                f"to stage {self.stage + 1} there are {self._over + 1} connections now: {self._over} may be too few"
            )
            self._join()

    def _receive(self, ready: Any) -> None:
        for frame, *more in arriving(ready):
            if not more:
                heard(frame, self._understand, f"stage {self.stage + 1}", self.refusals)

    def _understand(self, words: list[Any]) -> None:
        kind, session, *facts = words
        self._lost_at = monotonic()  # it is there, though a session may have to wait for what is on its way
        if kind == "stop":
            self.hear_stop(facts[0])
            return
        if session != self._session:
            return  # of one that is no more
        if kind == "want":
            number = _number(facts[0])
            if number < self.retained.first:
                if not self._told_lost:
                    self._told_lost = True
                    log.warning(
                        f"stage {self.stage + 1} asks for item {number}, but had saved all before "
                        f"{self.retained.first}: it has lost its newest snapshot, and ends"
                    )
                self.send(["lost", self.retained.first])
                self.sent = max(self.sent, number)  # what it has saved may be said as well
                return
            self.sent, self.window = number, Window(least=_LEAST * self._over)
            self.set_connected(True)
            if self._bye:
                self.send(["bye"])
        elif kind == "parted":
            with self.changed:
                self.parted = True
                self.changed.notify_all()
        elif kind == "heard":
            self.hear_heard()
        elif kind == "taken":
            self.window.taken(max(0.0, float(facts[0])), monotonic())
        elif kind == "saved":
            if (saved := _number(facts[0])) > self.sent:
                raise ValueError(f"it has saved all before {saved}, but only those before {self.sent} were sent")
            self.retained.cover(saved)
        elif kind == "again":
            self._begin()
        elif kind == "replaced":
            self.fail(
                DataError(
                    f"another process speaks as stage {self.stage} to stage {self.stage + 1}, and came after this one; "
                    "end one of the two"
                )
            )
        elif kind != "alive":
            raise ValueError(f"it says {str(kind)[:40]!r}")

    def _look(self) -> None:
        """Sends what is to be sent, as far as the window has room."""
        if (self._gone or not self.connected) and monotonic() - self._tried_at > AGAIN_S:
            self._try_again()
        self._widen()
        while self.connected and self.window.is_open and (item := self.retained.get(self.sent)) is not None:
            head = packed_head(["item", self._session, self.sent, *item.head()])
            if not self._send_frames([head, *item.frames()], self.sent % self._over):
                return
            self.window.sent(item.size, monotonic())
            self.sent += 1

    def send(self, words: list[Any]) -> None:
        """As said there."""
        self._send_frames([packed_head([words[0], self._session, *words[1:]])])

    def _send_frames(self, frames: list[Any], number: int = 0) -> bool:
        made, last = self._sockets[number], len(frames) - 1
        made.getsockopt(zmq.EVENTS)  # has it see a connection that was made this very moment
        for place, frame in enumerate(frames):
            try:
                made.send(frame, zmq.NOBLOCK | (zmq.SNDMORE if place < last else 0), copy=False)
            except zmq.Again:  # it has no connection: with the next one a session begins
                if 0 < place < last:  # ZeroMQ drops what comes up to the end of such a message, else the next hello
                    made.send(b"", zmq.NOBLOCK)
                self.set_connected(False)
                return False
        return True


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:40]!r} is no number of an item")
    return value
