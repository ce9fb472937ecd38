"""Processes in networks of their own, joined by links with a delay and a rate, on one machine.

A small program in C (``relay.c``, compiled at its first use into the user's cache folder) makes a network namespace
for each rank and passes packets between them, MTU 1500, so that a kernel without netem will do. It is a star: any rank
reaches any other over one link, of which each ordered pair has its own. It needs Linux, root (or CAP_NET_ADMIN and
CAP_SYS_ADMIN), ``/dev/net/tun`` and a C compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

from platformdirs import user_cache_path

Say = Callable[[Any], None]
Work = Callable[..., None]

SOURCE = Path(__file__).with_name("relay.c")

DEVICE = "far0"
"""Where a rank's network begins."""

_QUEUE_BYTES, _QUEUE_S = 4 << 20, 0.2
"""What may wait before a link, as in a router: so many bytes, or what it sends in so long, if that is less."""


class NoLineError(Exception):
    """Networks or links cannot be made here; says why in one line."""


@dataclass(frozen=True)
class LinkKind:
    """What all links of a line are like.

    Attributes:
        delay_s: One way.
        bits_per_s: Of IP packets, with their heads; 0: no limit.
    """

    delay_s: float = 0.0
    bits_per_s: float = 0.0

    @property
    def queue_bytes(self) -> int:
        """What may wait before it."""
        return min(_QUEUE_BYTES, int(self.bits_per_s / 8 * _QUEUE_S) or _QUEUE_BYTES)

    def payload_s(self, size: int) -> float:
        """How long that many bytes over TCP keep it busy, with a head of 52 bytes in each packet."""
        return size * 8 / self.bits_per_s * 1500 / 1448 if self.bits_per_s else 0.0

    def __str__(self) -> str:
        rate = f"{self.bits_per_s / 1e6:g} Mbit/s" if self.bits_per_s else "no limit"
        return f"{1e3 * self.delay_s:g} ms, {rate}"


@dataclass(frozen=True)
class Passed:
    """What has gone over a link since the line was made: IP packets, their bytes, and packets dropped."""

    packets: int = 0
    bytes: int = 0
    dropped: int = 0

    def __sub__(self, earlier: Passed) -> Passed:
        return Passed(self.packets - earlier.packets, self.bytes - earlier.bytes, self.dropped - earlier.dropped)


_FORKED = multiprocessing.get_context("fork")
_NETWORK = 0x40000000  # CLONE_NEWNET; os.setns is of Python 3.12


def started(work: Work, *arguments: Any, network: str | None = None, tcp: str | None = None) -> Started:
    """Has a child of this process do something: ``work(say, *arguments)``.

    It is forked, so that no rank imports what this process has imported; let this process do nothing by threads before.

    Args:
        work: What to do; it can say something to this process.
        arguments: Of that.
        network: The file of another network to do it in.
        tcp: What decides there how much TCP sends, as ``tcp_congestion_control`` names it.
    """
    ours, theirs = _FORKED.Pipe(duplex=False)
    process = _FORKED.Process(target=_work, args=(network, tcp, theirs, work, arguments), daemon=True)
    process.start()
    theirs.close()
    return Started(process, ours)


def _work(network: str | None, tcp: str | None, to: Connection, work: Work, arguments: Sequence[Any]) -> None:
    if network is not None:
        with open(network, "rb") as entered:
            if ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), _NETWORK):
                number = ctypes.get_errno()
                raise OSError(number, f"the network cannot be entered: {os.strerror(number)}")
        if tcp is not None:  # there, and nowhere else
            _go_by(tcp)
    work(to.send, *arguments)


def _go_by(tcp: str) -> None:
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(tcp, encoding="ascii")


@dataclass(frozen=True)
class Started:
    """A process, and what it says."""

    process: ForkProcess
    said: Connection

    def hear(self) -> Any:
        """The next thing that it says.

        Raises:
            EOFError: It has ended.
        """
        return self.said.recv()

    def end(self) -> int:
        """Waits for its end; its exit code."""
        self.process.join()
        self.said.close()
        return self.process.exitcode or 0


class Line:
    """A line that :func:`long_line` has made."""

    def __init__(self, relay: subprocess.Popen[str], spaces: list[str], tcp: str | None) -> None:
        self._relay = relay
        self._spaces = spaces
        self._tcp = tcp

    @staticmethod
    def address(rank: int) -> str:
        """Where a rank is, as all others see it."""
        return f"10.77.{rank}.1"

    def set(self, kind: LinkKind) -> None:
        """Makes all links of a kind, for packets from now on."""
        self._ask(f"link {round(kind.delay_s * 1e6)} {kind.bits_per_s:.0f} {kind.queue_bytes}")

    def passed(self) -> dict[tuple[int, int], Passed]:
        """What has gone over each link that was used, by the ranks from and to."""
        rows = [list(map(int, line.split())) for line in self._ask("count")]
        return {(row[0], row[1]): Passed(*row[2:]) for row in rows}

    def start(self, rank: int, work: Work, *arguments: Any) -> Started:
        """Has a child of this process do something in a rank's network; see :func:`started`."""
        return started(work, *arguments, network=self._spaces[rank], tcp=self._tcp)

    def _ask(self, order: str) -> list[str]:
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(order + "\n")
        self._relay.stdin.flush()
        answer = []
        while (line := self._relay.stdout.readline()) != ".\n":
            if not line or line == "?\n":
                raise NoLineError(f"the relay ended, or did not understand {order!r}")
            answer.append(line)
        return answer


@contextmanager
def long_line(ranks: int, kind: LinkKind = LinkKind(), tcp: str | None = None) -> Iterator[Line]:
    """So many networks, joined; they end with the block, once no process is in them.

    Args:
        ranks: How many.
        kind: Of the links between them.
        tcp: As for :func:`started`; by default as the system has it.

    Raises:
        NoLineError: They cannot be made here.
    """
    relay = subprocess.Popen(
        [_compiled(), str(ranks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the ranks; the relay ends after them
    )
    assert relay.stdin is not None
    assert relay.stdout is not None
    assert relay.stderr is not None
    try:
        pid, *spaces = relay.stdout.readline().split() or [""]
        if not spaces:
            raise NoLineError(f"no networks can be made here: {relay.stderr.read().strip()}")
        line = Line(relay, [f"/proc/{pid}/fd/{space}" for space in spaces], tcp)
        if tcp is not None and (refusal := started(_try, tcp, network=f"/proc/{pid}/fd/{spaces[0]}").hear()):
            allowed = "sysctl net.ipv4.tcp_allowed_congestion_control"
            raise NoLineError(f"TCP cannot go by {tcp} in networks of their own: {refusal}; {allowed} says what may be")
        line.set(kind)
        yield line
    finally:
        relay.stdin.close()
        relay.wait()
        relay.stdout.close()
        relay.stderr.close()


def _try(say: Say, tcp: str) -> None:
    """Says what refuses, or nothing."""
    try:
        _go_by(tcp)
        say(None)
    except OSError as error:
        say(error.strerror)


def why_not() -> str | None:
    """What keeps long lines from being made here; None where they can be."""
    try:
        with long_line(2):
            return None
    except NoLineError as error:
        return str(error)


def _compiled() -> str:
    """The relay, compiled if it is not in the cache."""
    if sys.platform != "linux":
        raise NoLineError("long lines need Linux: network namespaces and TUN devices")
    source = SOURCE.read_bytes()
    kept = user_cache_path("pipeal") / f"relay-{os.uname().machine}-{hashlib.sha256(source).hexdigest()[:16]}"
    if kept.exists():
        return str(kept)
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NoLineError("long lines need a C compiler (cc, or what CC names)")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder, "relay")
        compiling = subprocess.run(
            [compiler, "-O2", "-o", str(made), str(SOURCE)], capture_output=True, text=True, check=False
        )
        if compiling.returncode:
            raise NoLineError(f"the relay cannot be compiled: {compiling.stderr.strip().splitlines()[0]}")
        made.replace(kept)  # whole, or not there
    return str(kept)


_TRIPS = 20


def _answer(say: Say, port: int) -> None:
    """Returns a byte for a byte to the first who connects, and then takes all there is."""
    with socket.create_server(("", port)) as server:
        say("listens")
        with server.accept()[0] as taken:
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_TRIPS):
                taken.sendall(taken.recv(1))
            while taken.recv(1 << 20):
                pass


def _ask(say: Say, address: str, port: int, until: float) -> None:
    """Says how long round trips of a byte take, and then sends as much as it can."""
    with socket.create_connection((address, port)) as to:
        to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(_TRIPS):
            begin = perf_counter()
            to.sendall(b"?")
            to.recv(1)
            trips.append(perf_counter() - begin)
        say(trips)
        until += perf_counter()
        while perf_counter() < until:
            to.sendall(bytes(1 << 16))


@dataclass(frozen=True)
class Checked:
    """What plain sockets find of a link.

    Attributes:
        least_ms: The shortest round trip of a byte.
        median_ms: The median one.
        mbit_s: What one TCP connection gets through once it has found its pace: payload that the link handed over.
        dropped: Packets that found the link's queue full, from the connection's beginning.
    """

    least_ms: float
    median_ms: float
    mbit_s: float
    dropped: int


def check(line: Line, pace_s: float = 4.0, seconds: float = 2.0) -> Checked:
    """Measures the link from rank 0 to rank 1 with plain sockets.

    Args:
        line: Used by no one else.
        pace_s: How long TCP has to find its pace.
        seconds: How long it is measured after that.
    """
    far = line.start(1, _answer, 9000)
    far.hear()
    before = line.passed().get((0, 1), Passed())
    near = line.start(0, _ask, line.address(1), 9000, pace_s + seconds)
    trips = near.hear()
    sleep(pace_s)
    begin, first = perf_counter(), line.passed()[0, 1]
    sleep(seconds)
    took, last = perf_counter() - begin, line.passed()[0, 1]
    near.end()
    far.end()
    payload = (last - first).bytes * 1448 / 1500
    return Checked(1e3 * min(trips), 1e3 * median(trips), payload * 8e-6 / took, (last - before).dropped)
