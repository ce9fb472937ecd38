"""What both ends of a link have in common: sockets that nobody without a known key gets through, heads, and waits.

::

    stage k   DEALER ═══ hello, items 0, n, 2n … ═════════════► ROUTER  stage k + 1   n connections, made by the earlier
              DEALER ◄══ want, taken, saved ═══════════════════ ROUTER                stage, again and again
              DEALER ═══ items 1, n + 1, 2n + 1 … ════════════► ROUTER
              …

TCP, encrypted and authenticated both ways (CURVE) with the keys of the line's file. A link begins with one connection.
That has no more on the way than fits into its send buffer; where this holds it up, another one joins it, and the link
works while all of them do. Each time that they all stand a session begins, with the words ``hello`` and ``want``: the
later stage says with which number to go on, and then what its last snapshot covers (``saved``). What belongs to an
earlier session is told by its number, and dropped, as is a ``hello`` that comes late. A line that has begun again from
nothing has a name of its own for that (``begun``), by which neighbours with snapshots of another beginning refuse it.
``stop`` is said in each session until ``heard`` answers it: what a DEALER has not read yet is lost with a connection.
"""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from socket import socketpair
from time import monotonic
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from pipeal.core.errors import LineError, first_line
from pipeal.engine.distributed.sockets import HEAD_BYTES, opened

_CURVE_BYTES = 256
"""More than encryption adds to a frame."""

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

CONNECTIONS, MOST_CONNECTIONS = 4, 64
"""Of a link: by default no more than so many, and however it is set."""

TICK_S = 0.1
"""How often the thread at a socket looks up although nothing came."""

HEARTBEAT_S = 2.0
"""How often the ends of a link ask each other for a sign of life; one that gives none four times is gone."""

_OPTIONS = {
    zmq.MAXMSGSIZE: HEAD_BYTES + _CURVE_BYTES,  # of a frame; tensors travel in smaller ones
    zmq.HEARTBEAT_IVL: int(1000 * HEARTBEAT_S),
    zmq.HEARTBEAT_TIMEOUT: int(4000 * HEARTBEAT_S),
    zmq.HEARTBEAT_TTL: int(4000 * HEARTBEAT_S),
}

_EACH = 10
"""So many refusals are told each in a line of its own."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keys:
    """Of a stage and its neighbour on a link, as ZeroMQ writes them (Z85).

    Attributes:
        public: This stage's.
        secret: Likewise.
        peer: The neighbour's public one.
    """

    public: str
    secret: str
    peer: str


class End(threading.Thread, ABC):
    """The thread at one end of a link. All of its methods but those named after a message are for that thread.

    Args:
        name: Of the thread.
        line: The line's name; another one is refused.
        begun: As the attribute.
        changed: Notified when something came that the stage may wait for.

    Attributes:
        begun: The name of the beginning that the stage's items count from, as the first item has it; None until then.
        connected: Whether the link works.
        parted: Whether the neighbour and this stage know that they need nothing more of each other.
        failure: What ends the stage, if something does.
    """

    _session: int

    def __init__(self, name: str, line: str, begun: str | None, changed: threading.Condition) -> None:
        super().__init__(name=name, daemon=True)
        self.line = line
        self.begun = begun
        self.changed = changed
        self.connected = self.parted = False
        self._lost_at = monotonic()
        self.failure: BaseException | None = None
        self.context = zmq.Context()
        self._wake_in, self._wake_out = socketpair()
        self._waking = threading.Lock()
        self._is_woken, self._words = False, deque[list[Any]]()
        self._closing, self._told = threading.Event(), threading.Event()
        self._stopping: str | None = None
        self._said_stop_in: int | None = None
        self._sockets: list[Any] = []
        self._monitors: list[Any] = []
        self.refusals = Refusals()

    def open(self, kind: int, keys: Keys, events: int, address: str, options: Mapping[zmq.SocketOption, int]) -> Any:
        """Makes a socket, with the ways of a link, and what tells of its connections."""
        made = opened(self.context, kind, {**_OPTIONS, **options})
        self._sockets.append(made)
        made.ipv6 = address.startswith("[")  # names stand for addresses of IPv4
        made.curve_publickey, made.curve_secretkey = keys.public.encode(), keys.secret.encode()
        self._monitors.append(made.get_monitor_socket(events))
        return made

    def tell(self, *words: Any) -> None:
        """From any thread: has this one say something, or look again where there are no words."""
        with self._waking:
            if self._closing.is_set():
                return
            if words:
                self._words.append([*words])
            self._wake()

    def _wake(self) -> None:
        if not self._is_woken:
            self._wake_out.send(b"!")
            self._is_woken = True

    def stop(self, why: str) -> None:
        """From any thread: has the neighbour end, and all beyond it, as soon as it is there."""
        self._stopping = why
        self.tell()

    def await_told(self, timeout_s: float) -> bool:
        """Waits until the neighbour has heard that it is to :meth:`stop`; false where it has not in time."""
        return self._told.wait(timeout_s)

    def close(self, linger_s: float = 2.0) -> None:
        """From any other thread: ends this one; what was said last may take so long to arrive."""
        with self._waking:
            if self._closing.is_set():
                return
            self._closing.set()
            self._wake()
        if self.ident is not None:
            self.join()
        self._leave()
        for made, monitor in zip(self._sockets, self._monitors, strict=True):
            made.disable_monitor()
            monitor.close(0)
            made.close(int(1000 * linger_s))
        self._wake_in.close()
        self._wake_out.close()
        self.context.term()

    def run(self) -> None:
        """Until it is closed; what goes wrong ends the stage."""
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  raised where the stage waits
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the stage, where it next waits."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    @property
    def lost_s(self) -> float:
        """For how many seconds the neighbour has been away."""
        return 0.0 if self.connected else monotonic() - self._lost_at

    def set_connected(self, connected: bool) -> None:
        """Notes whether the link works."""
        with self.changed:
            if self.connected and not connected:
                self._lost_at = monotonic()
            self.connected = connected
            self.changed.notify_all()

    def speak(self) -> None:
        """Says what there is to say."""
        while self._words:
            self.send(self._words.popleft())
        due = self._stopping is not None and not self._told.is_set() and self._said_stop_in != self._session
        if due and self.connected:
            self._said_stop_in = self._session
            self.send(["stop", self._stopping])

    def hear_stop(self, why: Any) -> None:
        """Ends the stage as the neighbour asks, which need not be told in turn."""
        self._told.set()
        self.send(["heard"])
        self.fail(LineError(printable(why)))

    def hear_heard(self) -> None:
        """Notes that the neighbour has heard that it is to stop."""
        self._told.set()

    @abstractmethod
    def send(self, words: list[Any]) -> None:
        """Sends words to the neighbour, if it is there: what they are about, and facts."""

    def _serve(self) -> None:
        poller = zmq.Poller()
        for one in (*self._sockets, *self._monitors, self._wake_in):
            poller.register(one, zmq.POLLIN)
        while not self._closing.is_set():
            for found, _ in poller.poll(int(1000 * TICK_S)):
                if found in self._monitors:
                    self._hear_of(recv_monitor_message(found), self._monitors.index(found))
                elif found in self._sockets:
                    self._receive(found)
                else:
                    with self._waking:
                        self._wake_in.recv(64)
                        self._is_woken = False
            self.speak()
            self._look()
        self.speak()  # the last words

    @abstractmethod
    def _hear_of(self, event: Mapping[str, Any], number: int) -> None:
        """A connection of the socket of that number was made, or is no more."""

    @abstractmethod
    def _receive(self, ready: Any) -> None:
        """Something has come at a socket."""

    @abstractmethod
    def _look(self) -> None:
        """Does what is due, whether something came or not."""

    def _leave(self) -> None:
        """What else there is to close."""


class Refusals:
    """Says in the log what was refused: each of the first ten in a line, then the hundredth, the thousandth and so on,
    since lines without end would be harm enough. For any thread."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def tell(self, what: str) -> None:
        """Something was refused."""
        with self._lock:
            self._count += 1
            count = self._count
        if count <= _EACH:
            log.warning(what)
        elif set(str(count)[1:]) == {"0"} and str(count)[0] == "1":
            log.warning(f"{what}; {count} were refused so far, and not all are told")


def heard(frame: Any, understand: Callable[[list[Any]], None], sender: str, refusals: Refusals) -> None:
    """Reads a message's head and has it understood; what is none is told in a line, and let go."""
    try:
        if len(frame.buffer) > HEAD_BYTES:
            raise ValueError(f"its head has {len(frame.buffer)} bytes")
        words = json.loads(bytes(frame.buffer))
        if not isinstance(words, list) or not words:
            raise TypeError("it says nothing")
        understand(words)
    except zmq.ZMQError:  # of what was said to it: no fault of its own
        raise
    except Exception as error:  # noqa: BLE001  whatever a peer may cause: none ends the thread
        shown = ascii(first_line(error)[:200])[1:-1]
        refusals.tell(f"{sender}: a message that is none of this line was refused: {shown}")


def printable(words: Any) -> str:
    """A peer's words for a terminal and a log: of bounded length, and without control codes."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(words)[:2000])[:2000]
