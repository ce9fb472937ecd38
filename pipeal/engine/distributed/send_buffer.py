"""The send buffer of a TCP connection, in which all lies that is on its way: as large as rate and delay ask for."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LOOK_S = 1.0
"""What a connection carries is measured over so long, from one look to the next."""

_FULL, _AMPLE = 0.6, 0.5
"""A connection with so much of its buffer on the way is held up by it, and one with so much is not: Linux lets a writer
go on when a third is free, so that some two thirds are used."""

_QUEUE = 1.25
"""A round trip of so many times the shortest one has met a queue."""


@dataclass(frozen=True)
class Told:
    """What the kernel says of a connection.

    Attributes:
        acked: Bytes that have arrived since it was made.
        trip_s: A round trip, now.
        shortest_s: The shortest one.
        buffer: Bytes that its send buffer holds.
    """

    acked: int
    trip_s: float
    shortest_s: float
    buffer: int


class SendBuffer:
    """Of a connection that is open: one that holds up the connection doubles, as far as the system allows.

    Where a queue has formed, the link is what takes time, and more than it carries would but overflow that queue: over
    80 Mbit/s and 100 ms one way, BBR with a buffer of 8 MiB lost 16 % of its packets, and none with 4. So one that has
    ample room then shrinks, down to what the kernel would choose itself.

    Args:
        file: The connection's, as ZeroMQ tells of it.
        now: The time, in seconds.
    """

    def __init__(self, file: int, now: float) -> None:
        self._file = file
        self._before, self._at = told(file), now

    def holds_up(self, now: float) -> bool:
        """Whether it holds the connection up, and cannot become larger.

        True where the system tells nothing of connections, and false in between looks.
        """
        if now - self._at < LOOK_S:
            return False
        found, before, seconds = told(self._file), self._before, now - self._at
        self._before, self._at = found, now
        if before is None:
            return True
        kernels = _limit("net/ipv4/tcp_wmem")
        if found is None or found.buffer < kernels:  # it is closed, or grows by itself
            return False
        under_way = (found.acked - before.acked) / seconds * found.shortest_s
        if under_way >= _FULL * found.buffer:
            return not self._resize(found.buffer, min(2 * found.buffer, largest()))
        if found.trip_s > _QUEUE * found.shortest_s:
            self._resize(found.buffer, max(kernels, int(under_way / _AMPLE)), shrinks=True)
        return False

    def _resize(self, size: int, wanted: int, *, shrinks: bool = False) -> bool:
        """Makes it larger, or smaller; whether it is."""
        if wanted == size or (wanted < size) != shrinks or wanted > largest():
            return False
        try:
            with socket.fromfd(self._file, socket.AF_INET, socket.SOCK_STREAM) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted // 2)  # which Linux doubles
        except OSError:  # closed meanwhile
            return False
        return True


def told(file: int) -> Told | None:
    """What the kernel says of a connection; None where it says nothing, or the connection is closed."""
    which = getattr(socket, "TCP_INFO", None)  # Linux
    if which is None:
        return None
    try:
        with socket.fromfd(file, socket.AF_INET, socket.SOCK_STREAM) as one:
            # struct tcp_info of linux/tcp.h: tcpi_rtt, tcpi_bytes_acked and tcpi_min_rtt.
            info = one.getsockopt(socket.IPPROTO_TCP, which, 152)
            (trip,), (acked,), (shortest,) = (
                struct.unpack_from(form, info, offset) for form, offset in (("=I", 68), ("=Q", 120), ("=I", 148))
            )
            return Told(acked, 1e-6 * trip, 1e-6 * shortest, one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
    except (OSError, struct.error):  # closed, or a kernel before 4.9
        return None


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
