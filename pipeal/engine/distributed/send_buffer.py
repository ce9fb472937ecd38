"""The send buffer of a TCP connection, in which all lies that is on its way: as large as rate and delay ask for."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import zmq

LOOK_S = 1.0
"""What a connection carries is measured over so long, from one look to the next."""

_FULL, _AMPLE = 0.6, 0.5
"""A connection with so much of its buffer on the way is held up by it, and one with so much is not: Linux lets a writer
go on when a third is free, so that some two thirds are used."""

_QUEUE = 1.25
"""A round trip of so many times the shortest one has met a queue."""

_LOST = 0.01
"""Where of so many packets one is sent again, what is sent overflows a queue."""


@dataclass(frozen=True)
class Told:
    """What the kernel says of a connection.

    Attributes:
        acked: Bytes that have arrived since it was made.
        sent: Packets since then.
        again: Of these, those that were sent again.
        peer_full_s: For how long the peer's buffer had no room, since then.
        trip_s: A round trip, now.
        shortest_s: The shortest one, of the last minutes.
        buffer: Bytes that its send buffer holds.
        ends: The addresses of its ends.
    """

    acked: int
    sent: int
    again: int
    peer_full_s: float
    trip_s: float
    shortest_s: float
    buffer: int
    ends: tuple[Any, Any]


class SendBuffer:
    """Of a connection that is open: one that holds up the connection doubles, as far as the system allows.

    Where packets are lost since a queue has formed, the link is what takes time, and more than it carries but overflows
    that queue: over 80 Mbit/s and 100 ms one way, BBR with a buffer of 8 MiB lost 16 % of its packets, and none with 4.
    So one that has ample room then shrinks, at most to what the kernel lets it grow to by itself. Round trips that vary
    by a quarter without a queue say nothing, and leave it as it is.

    Args:
        file: The connection's, as ZeroMQ tells of it.
        now: The time, in seconds.
    """

    def __init__(self, file: int, now: float) -> None:
        self._file = file
        self._before, self._at = told(file), now
        self._is_silent = self._before is None
        self._shortest_s = float("inf")

    def look(self, now: float) -> bool:
        """Makes it larger or smaller; whether buffers hold the connection up, and this one cannot become larger.

        True where the system tells nothing of connections, and false in between looks.
        """
        if now - self._at < LOOK_S:
            return False
        found, before, seconds = told(self._file), self._before, now - self._at
        self._before, self._at = found, now
        if self._is_silent:
            return True
        if found is None or before is None or found.ends != before.ends:  # it is closed
            return False
        self._shortest_s = min(self._shortest_s, found.shortest_s)
        per_s, sent, again = (
            (found.acked - before.acked) / seconds,
            found.sent - before.sent,
            found.again - before.again,
        )
        kernels, queue = _limit("net/ipv4/tcp_wmem"), found.trip_s > _QUEUE * self._shortest_s
        if queue:
            wanted = max(kernels, int(per_s * self._shortest_s / _AMPLE))
            if again >= max(1.0, _LOST * sent) and 0 < kernels <= wanted < found.buffer:
                self._resize(wanted)
            return False
        if found.peer_full_s - before.peer_full_s > seconds / 2:
            return True
        if found.buffer < kernels or per_s * found.trip_s < _FULL * found.buffer:  # it grows by itself, or has room
            return False
        return found.buffer >= largest() or self._resize(min(2 * found.buffer, largest())) <= found.buffer

    def _resize(self, wanted: int) -> int:
        """Asks for a size; what it then is."""
        try:
            with _connection(self._file) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted // 2)  # which Linux doubles
                return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        except OSError:  # closed meanwhile
            return wanted


class SendBuffers:
    """Those of connections that come and go, each by a number that its owner gives it."""

    EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
    """Of these ZeroMQ's monitor is to tell."""

    def __init__(self) -> None:
        self._of: dict[int, SendBuffer] = {}

    def hear_of(self, number: int, event: Mapping[str, Any]) -> None:
        """What the monitor of a connection says."""
        if event["event"] == zmq.EVENT_CONNECTED:
            self._of[number] = SendBuffer(event["value"], monotonic())
        elif event["event"] == zmq.EVENT_DISCONNECTED:
            self._of.pop(number, None)

    def look(self) -> bool:
        """:meth:`SendBuffer.look` at each; whether any holds its connection up."""
        now = monotonic()
        held_up = [one.look(now) for one in self._of.values()]  # at all of them, whatever the first says
        return any(held_up)


def told(file: int) -> Told | None:
    """What the kernel says of a connection; None where it says nothing, or the connection is closed."""
    which = getattr(socket, "TCP_INFO", None)  # Linux
    if which is None:
        return None
    try:
        with _connection(file) as one:
            info = one.getsockopt(socket.IPPROTO_TCP, which, 184)
            # struct tcp_info of linux/tcp.h, since 4.10: tcpi_rtt, _total_retrans, _bytes_acked, _segs_out, _min_rtt,
            # _rwnd_limited.
            trip, again, acked, sent, shortest, full = (
                struct.unpack_from(form, info, offset)[0]
                for form, offset in (("=I", 68), ("=I", 100), ("=Q", 120), ("=I", 136), ("=I", 148), ("=Q", 176))
            )
            buffer, ends = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), (one.getsockname(), one.getpeername())
    except (OSError, struct.error):  # closed, or an older kernel
        return None
    return Told(acked, sent, again, 1e-6 * full, 1e-6 * trip, 1e-6 * shortest, buffer, ends)


def _connection(file: int) -> socket.socket:
    """A second hold of it, for a moment: it would keep the connection from being closed."""
    return socket.fromfd(file, socket.AF_INET, socket.SOCK_STREAM)


def largest() -> int:
    """What a send buffer can be asked to become."""
    return 2 * _limit("net/core/wmem_max")


def first_size() -> int | None:
    """The size to ask ZeroMQ for; None where the kernel's own choice may become as large.

    Left alone a buffer grows with what is under way to the last number of ``tcp_wmem``, mostly 4 MB.
    """
    return largest() // 2 if largest() > _limit("net/ipv4/tcp_wmem") > 0 else None


@cache
def _limit(name: str) -> int:
    """The largest of a kernel's sizes of buffers; 0 where it does not tell."""
    try:
        return int(Path("/proc/sys", name).read_text(encoding="ascii").split()[-1])
    except (OSError, ValueError, IndexError):
        return 0
