"""Both ends of links in one process, for tests: over loopback, with the keys and threads that stages have."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import torch
import zmq

from pipeal.core.errors import ConfigError
from pipeal.line.incoming import Incoming
from pipeal.line.items import BATCH, Item, Packed
from pipeal.line.link import Keys
from pipeal.line.outgoing import Outgoing
from pipeal.line.retained import Retained
from tests.integration.processes import free_port

LINE = "the line"
LONG_S = 300.0
"""Far more than anything here takes."""


def until(condition: Callable[[], object]) -> None:
    """Waits until something is so."""
    end = monotonic() + LONG_S
    while not condition():
        assert monotonic() < end
        sleep(0.005)


def batch(number: int, elements: int = 3) -> Packed:
    """The item of a batch, which knows its number."""
    facts = {"batch": number, "lr_scale": 1.0, "updates": True}
    return Packed.of(Item(BATCH, facts, (torch.full((elements,), float(number)), torch.tensor([number]))))


def number_of(packed: Packed) -> int:
    """As both the facts and the tensors say."""
    x, y = packed.item().tree
    number = int(packed.facts["batch"])
    assert y.tolist() == [number]
    assert x.eq(number).all()
    return number


def key_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


@dataclass
class Link:
    """A link of stage 0 to stage 1, of which either end may be away.

    Attributes:
        retained: What the sending end sends.
        sender: That end.
        receiver: The other.
    """

    retained: Retained = field(default_factory=lambda: Retained(1e9))
    sender: Outgoing | None = None
    receiver: Incoming | None = None
    line: str = LINE
    connections: int = 3
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        (early, self.early_secret), (late, self.late_secret) = key_pair(), key_pair()
        self.early, self.late = Keys(early, self.early_secret, late), Keys(late, self.late_secret, early)
        self.port = free_port()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def send(self, retained: Retained | None = None, keys: Keys | None = None, stage: int = 0) -> Outgoing:
        """Opens the sending end; with items that a snapshot had kept, a life of its own."""
        self.retained = retained or self.retained
        self.sender = Outgoing(
            stage, self.address, keys or self.early, self.retained, self.line, connections=self.connections
        )
        self.sender.start()
        return self.sender

    def receive(
        self, first: int = 0, *, largest_bytes: int = 1 << 20, room_bytes: float = 1e9, line: str | None = None
    ) -> Incoming:
        """Opens the receiving end, which a snapshot lets go on with a certain number."""
        for attempt in range(100):  # a port that was free may be somebody's by now, or not be free again yet
            try:
                self.receiver = Incoming(
                    1, self.address, self.late, line or self.line, first, largest_bytes=largest_bytes,
                    room_bytes=room_bytes,
                )  # fmt: skip
                break
            except ConfigError:
                assert attempt < 99
                sleep(0.1)
        assert self.receiver is not None
        self.receiver.start()
        return self.receiver

    def close(self) -> None:
        for end in (self.sender, self.receiver):
            if end is not None:
                end.close(0)
        self.sender = self.receiver = None


@contextmanager
def link(**options: Any) -> Iterator[Link]:
    """A link, of which nothing stays."""
    made = Link(**options)
    try:
        yield made
    finally:
        made.close()


class Relay:
    """A cable between the ends of a link, which can be cut; what comes then goes through another one.

    Attributes:
        to: The port that it leads to.
        port: Where it is entered.
        most: So many connections it carries at once.
    """

    def __init__(self, to: int) -> None:
        self.to = to
        self.most = 1 << 20
        self._entry = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._entry.getsockname()[1])
        self._open: list[tuple[socket.socket, socket.socket]] = []
        self._sent: Counter[socket.socket] = Counter()
        self._lock = threading.Lock()
        self._leads_on = threading.Event()
        self._leads_on.set()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def count(self) -> int:
        """Of the connections there are, or were and have not been cut."""
        return len(self._open)

    def bytes_sent(self) -> list[int]:
        """Over each connection, by who made it."""
        return [self._sent[near] for near, _ in self._open]

    def cut(self, among: random.Random | None = None) -> None:
        """Ends all connections, or one of them."""
        with self._lock:
            self._end(self._open if among is None else self._open and [among.choice(self._open)])

    def cut_newest(self) -> None:
        """Ends the connection that was made last."""
        with self._lock:
            self._end(self._open[-1:])

    @contextmanager
    def away(self) -> Iterator[None]:
        """Ends all connections; within it, nothing comes through new ones."""
        self._leads_on.clear()
        self.cut()
        try:
            yield
        finally:
            self._leads_on.set()

    def close(self) -> None:
        with suppress(OSError):
            self._entry.shutdown(socket.SHUT_RDWR)
        self._entry.close()
        self.cut()

    def _end(self, ends: Iterable[tuple[socket.socket, socket.socket]]) -> None:
        for pair in list(ends):
            self._open.remove(pair)
            for one in pair:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._entry.accept()
                if len(self._open) >= self.most:
                    near.close()
                    continue
                self._leads_on.wait(LONG_S)
                far = socket.create_connection(("127.0.0.1", self.to))
            except ConnectionRefusedError:
                near.close()
                continue
            except OSError:
                return
            with self._lock:
                self._open.append((near, far))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while content := one.recv(1 << 16):
                self._sent[one] += len(content)
                other.sendall(content)
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(to: int) -> Iterator[Relay]:
    """A cable to a port."""
    made = Relay(to)
    try:
        yield made
    finally:
        made.close()


def taken(receiver: Incoming, count: int) -> list[tuple[int, int]]:
    """So many items: their numbers on the link, and those in them."""
    found: list[tuple[int, int]] = []
    end = monotonic() + LONG_S
    while len(found) < count:
        assert monotonic() < end
        if (one := receiver.take(0.1)) is not None:
            found.append((one[0], number_of(one[1])))
    return found


@contextmanager
def cabled(**options: Any) -> Iterator[tuple[Link, Relay, Outgoing, Incoming]]:
    """A link with a cable between its ends, which are open."""
    with link(**options) as one, relay(one.port) as cable:
        one.port = cable.port
        sender = one.send()
        one.port = cable.to
        yield one, cable, sender, one.receive()
