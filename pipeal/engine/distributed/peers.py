"""Who the processes of a run are, whether one of this machine is gone, and how this machine reaches another."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Peer:
    """A process of the run.

    Attributes:
        host: The name of its machine, for messages.
        machine: What tells its machine, and the numbering of processes there, from any other.
        pid: Its number there.
        born: When it began, in the machine's own count: a number is given again, but not to one of the same age.
    """

    host: str
    machine: str
    pid: int
    born: str

    @classmethod
    def self(cls) -> Peer:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, (_state(pid) or ("", ""))[1])


def is_gone(peer: Peer) -> bool:
    """Whether a process has ended; of other machines, and on systems without ``/proc``, nobody knows."""
    if not peer.machine or peer.machine != _machine():
        return False
    found = _state(peer.pid)
    return found is None or found[0] in "ZX" or found[1] != peer.born


def interface_towards(address: str, *, loopback: bool = True) -> str | None:
    """The name of the interface whose address packets to another machine bear; None where that is not known.

    Gloo takes the one that the machine's own name resolves to, which many machines say is the loopback.

    Args:
        address: A name or an IPv4 address.
        loopback: Whether the loopback will do.

    >>> interface_towards("127.0.0.1"), interface_towards("127.0.0.1", loopback=False)
    ('lo', None)
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
            towards.connect((address, 9))  # sends nothing
            own = towards.getsockname()[0]
    except OSError:
        return None
    if own.startswith("127.") and not loopback:
        return None
    return next((name for _, name in socket.if_nameindex() if address_of(name) == own), None)


@cache
def _machine() -> str:
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # the processes that /proc shows are numbered otherwise
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, str] | None:
    """The state of a process and when it began; None if there is none of that number."""
    try:
        # The name before the last parenthesis may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None


def address_of(interface: str | None) -> str | None:
    """The IPv4 address of a network interface; None where there is none.

    >>> address_of("lo"), address_of(None)
    ('127.0.0.1', None)
    """
    if not interface:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(found[20:24])
