"""A rank's sockets: one that all others write to, and one to each of them; messages stream and nothing waits for an
answer.

::

    rank 0  PUSH ═══► PULL  rank 1        between machines TCP, encrypted and authenticated both ways with keys that the
            PULL ◄═══ PUSH                ranks make for this run and tell each other through the store;
                                          on one machine sockets in a folder that only this user can enter

A connection that ends is never made again: what was on its way is lost with it, and the peer counts as gone.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

import zmq
from torch import Tensor
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from pipeal.core.errors import first_line
from pipeal.core.tree_codec import Form
from pipeal.engine.distributed.flat import Layout
from pipeal.engine.distributed.send_buffer import SendBuffers
from pipeal.engine.distributed.sockets import HEAD_BYTES, arriving, opened, packed_head
from pipeal.engine.distributed.window import Window

_TICK_S = 0.1
LAST_MESSAGES_S = 2.0
"""How long the last messages of a rank that closes its connections may take; so long its peers wait for them before it
counts as gone."""

_log = logging.getLogger(__name__)


class BrokenWireError(Exception):
    """A peer is gone.

    Args:
        said: What is known of it.
        peer: Its rank.
    """

    def __init__(self, said: str, peer: int) -> None:
        super().__init__(said)
        self.peer = peer


@dataclass
class Message:
    """What was received.

    Attributes:
        kind: What it is about.
        facts: Plain values; by name, but between the ends of a wire.
        source: The rank it is from.
        form: Describes its tree.
        layouts: Of the tensors that follow.
        counts: Whether its sender counts it as on its way until it is taken.
        frames: The bytes of its tensors.
        at: When it arrived.
        taken: Whether it was.
    """

    kind: str
    facts: Any
    source: int
    form: Form = None
    layouts: list[Layout] = field(default_factory=list)
    counts: bool = False
    frames: Sequence[Any] = ()
    at: float = 0.0
    taken: bool = False


class Mailbox:
    """What has arrived on one wire, and what is on its way from here."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: deque[Message] = deque()
        self.answers: deque[Any] = deque()
        self.fills = 0
        self.windows: defaultdict[int, Window] = defaultdict(lambda: Window(self.fills))
        self.is_closed = False

    def add(self, message: Message) -> None:
        """Takes in what came."""
        with self.changed:
            if message.kind == TAKEN:
                waited_s = float(message.facts)
                if not 0 <= waited_s < inf:
                    raise ValueError(f"it was waited with for {waited_s} s")
                self.windows[message.source].taken(waited_s, monotonic())
            elif message.kind == ANSWER:
                self.answers.append(message.facts)
            else:
                self.messages.append(message)
            self.changed.notify_all()

    def wake(self) -> None:
        """Has those who wait look again."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """Ends all waits, now and from now on."""
        self.is_closed = True
        self.wake()


TAKEN, ANSWER = "+", "?"
"""Kinds of messages between the ends of a wire; all others are for who uses it."""


class Endpoint:
    """A rank's sockets and the thread at them. All ranks make theirs at the same time.

    Args:
        rank: This one.
        gather: What all ranks give, by rank.
        near: Whether all ranks are on this machine.
        hosts: Else where this rank listens, and how others call that.
        timeout_s: Half of how long a peer may give no sign of life.

    Attributes:
        address: Where this rank listens, as others call it.
        key: Its public key.
    """

    def __init__(
        self, rank: int, gather: Callable[[Any], list[Any]], *, near: bool, hosts: tuple[str, str], timeout_s: float
    ) -> None:
        self.rank = rank
        self._gather = gather
        self._context = zmq.Context()
        # A second opinion on who lives, and so with more patience than the heartbeat through the store has.
        lives = {zmq.HEARTBEAT_IVL: int(timeout_s * 400), zmq.HEARTBEAT_TIMEOUT: int(timeout_s * 2000)}
        self._options = {**lives, zmq.RECONNECT_IVL: -1}
        self._pull = opened(self._context, zmq.PULL, self._options)
        self._mailboxes: dict[int, Mailbox] = {}
        self._closed_below = 0
        self._broken: dict[int, str] = {}
        self._ending: dict[int, float] = {}
        self._closed = threading.Event()
        self._folder: str | None = None
        self._guard: ThreadAuthenticator | None = None
        self._ranks: dict[str, int] = {}
        public, secret = zmq.curve_keypair()
        if near:
            self._folder = _short_folder()  # only this user can enter it
            address = f"ipc://{self._folder}/{rank}"
            self._pull.bind(address)
        else:
            self._guard = ThreadAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback(credentials_provider=self)
            self._pull.curve_server, self._pull.curve_publickey, self._pull.curve_secretkey = True, public, secret
            own, called = hosts
            self._pull.bind(f"tcp://{own}:0")
            address = f"tcp://{called}:{self._pull.get_string(zmq.LAST_ENDPOINT).rpartition(':')[2]}"
        self.address, self.key = address, public.decode()
        self._secret = secret
        self._push: dict[int, zmq.Socket[bytes]] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        self._buffers = SendBuffers()
        self._unmet: set[int] = set()
        self._thread = threading.Thread(target=self._run, name=f"pipeal-endpoint-{rank}", daemon=True)

    def connect(self) -> None:
        """Tells the others where this rank is, and waits until all are connected both ways, for as long as it takes."""
        told = self._gather([self.address, self.key])
        self._ranks = {key: other for other, (_, key) in enumerate(told)}
        self._gather(True)  # all know whom to let in
        self._unmet = {other for other in range(len(told)) if other != self.rank}
        for other in sorted(self._unmet):
            push = self._push[other] = opened(self._context, zmq.PUSH, self._options)
            self._locks[other] = threading.Lock()
            self._monitors[push.get_monitor_socket(SendBuffers.EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED)] = other
            if self._guard is not None:
                push.curve_publickey, push.curve_secretkey = self.key.encode(), self._secret
                push.curve_serverkey = told[other][1].encode()
            push.connect(told[other][0])
        self._thread.start()
        while self._unmet:
            if self._closed.wait(0.005):
                return
        self._gather(True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # whatever ends this process, nothing is left

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002  called by the authenticator
        """Whether who has that key is let in."""
        known = key.decode() in self._ranks
        if not known:
            _log.warning(f"a connection with an unknown key ({key.decode()}) was refused")
        return known

    def mailbox(self, wire: int) -> Mailbox:
        """Of a wire, by its number."""
        return self._mailboxes.setdefault(wire, Mailbox())

    def close_wires(self, numbers: Collection[int]) -> None:
        """Ends all waits on some wires, the oldest there are, and forgets what was not taken or comes later."""
        self._closed_below = max(self._closed_below, *(number + 1 for number in numbers))
        for number in numbers:
            mailbox = self._mailboxes.pop(number, None)
            if mailbox is not None:
                mailbox.close()

    def send(self, peer: int, wire: int, head: Sequence[Any], rows: Sequence[Tensor] = ()) -> None:
        """Sends a message; waits for nothing. The rows must not be written to until they have been taken.

        Raises:
            BrokenWireError: The peer is gone.
            DataError: The head is too long.
        """
        frames: list[Any] = [packed_head([self.rank, wire, *head], "a message"), *(row.numpy() for row in rows)]
        with self._locks[peer]:
            if (said := self._broken.get(peer)) is None and not self._closed.is_set():
                try:
                    self._push[peer].send_multipart(frames, zmq.NOBLOCK, copy=False)
                    return
                except zmq.Again:
                    said = "there is no connection"
        raise BrokenWireError(said or "the connections of this rank were closed", peer)

    def broken(self, among: Collection[int]) -> tuple[int, str] | None:
        """The first of some ranks that is gone, and how that shows."""
        return next(((peer, said) for peer, said in list(self._broken.items()) if peer in among), None)

    def close(self, linger_s: float) -> None:
        """Ends all waits; what was sent last may take so long to arrive. A second time does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        for mailbox in list(self._mailboxes.values()):
            mailbox.close()
        if self._guard is not None:
            self._guard.stop()
        for peer, push in self._push.items():
            with self._locks[peer]:
                push.disable_monitor()
                push.close(0 if peer in self._broken else int(linger_s * 1000))
        for one in (self._pull, *self._monitors):
            one.close(0)
        self._context.term()

    def _run(self) -> None:
        try:
            self._receive_all()
        except BaseException as error:  # noqa: BLE001  raised where a peer is waited for
            self._break(self._push, f"the thread at this rank's sockets ended: {first_line(error)}")

    def _receive_all(self) -> None:
        poller = zmq.Poller()
        for one in (self._pull, *self._monitors):
            poller.register(one, zmq.POLLIN)
        while not self._closed.is_set():
            for found, _ in poller.poll(int(_TICK_S * 1000)):
                if found is self._pull:
                    self._receive()
                else:
                    self._hear_of(self._monitors[found], recv_monitor_message(found))
            now = monotonic()
            self._buffers.look()
            gone = [peer for peer, since in self._ending.items() if now - since > LAST_MESSAGES_S]
            for peer in gone:
                del self._ending[peer]
            self._break(gone, "it was closed by the peer")

    def _break(self, peers: Collection[int], said: str) -> None:
        """Peers are gone, which those that wait for one are to see."""
        for peer in peers:
            self._broken.setdefault(peer, said)
        for mailbox in list(self._mailboxes.values()) if peers else ():
            mailbox.wake()

    def _hear_of(self, peer: int, event: Mapping[str, Any]) -> None:
        if self._guard is not None:  # over TCP
            self._buffers.hear_of(peer, event)
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._unmet.discard(peer)
        elif event["event"] == zmq.EVENT_DISCONNECTED:
            self._ending.setdefault(peer, monotonic())

    def _receive(self) -> None:
        """Gives what has come to its mailbox; what is no message of a rank of this run is told and let go."""
        for first, *frames in arriving(self._pull):
            try:
                if len(first.buffer) > HEAD_BYTES:
                    raise ValueError(f"its head has {len(first.buffer)} bytes")
                source, wire, kind, facts, *more = json.loads(bytes(first.buffer))
                if type(wire) is not int or type(source) is not int:
                    raise TypeError("it names no wire, or no rank")
                if self._guard is not None and self._ranks.get(str(first.get("User-Id"))) != source:
                    raise ValueError(f"it says that it is from rank {source!r}, but has another rank's key")
                message = Message(kind, facts, source, frames=frames, at=monotonic())
                if kind not in (TAKEN, ANSWER):
                    message.form, message.layouts, message.counts = more
                    if not (isinstance(kind, str) and isinstance(facts, dict) and isinstance(message.layouts, list)):
                        raise TypeError("its head is none")
                    if len(message.layouts) != len(frames):
                        raise ValueError(f"it has {len(frames)} tensors, but its head says {len(message.layouts)}")
                if not 0 <= wire < self._closed_below:  # else of a pipeline that has ended here
                    self.mailbox(wire).add(message)
            except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
                _log.warning(f"a message that is none of this run was let go: {error}")


def _short_folder() -> str:
    """A new folder; the names of sockets may not be long."""
    found = tempfile.mkdtemp(prefix="pipeal-")
    if len(found) < 80:
        return found
    shutil.rmtree(found)
    return tempfile.mkdtemp(prefix="pipeal-", dir="/tmp")
