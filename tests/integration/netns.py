"""Two machines in one: namespaces with their own network, host name and processes, and a cable between them.

Made with what every Linux has, ``unshare`` and ``nsenter`` of util-linux, and messages to the kernel. As a script, run
inside of a machine, it switches the machine's end of the cable: ``netns.py up 10.77.0.1`` or ``netns.py down``.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CABLE = "cable0"
_SPACES = ("--net", "--uts", "--pid", "--mount")

# From the kernel's headers: linux/rtnetlink.h, if_link.h, veth.h, sockios.h, if.h.
_RTM_NEWLINK, _NLMSG_ERROR, _REQUEST_ACK_CREATE_EXCL = 16, 2, 0x1 | 0x4 | 0x400 | 0x200
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_NET_NS_PID = 3, 18, 19
_INFO_KIND, _INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
_IFF_UP = 1


class Machine:
    """Namespaces that live as long as their first process; ends with every process in it. Used by :func:`machines`."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._holder = subprocess.Popen(
            ["unshare", *_SPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", "echo up; exec sleep 3600"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "up\n":
            said = self._holder.stderr.read().strip()
            self.end()
            raise OSError(said)
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self.pid = int(children[0])
        self.run("hostname", name)

    def start(self, *command: str, **options: object) -> subprocess.Popen[str]:
        """Starts a command there, as the leader of a group of processes."""
        inside = ["nsenter", f"--target={self.pid}", *_SPACES, f"--wdns={os.getcwd()}", "--", *command]
        return subprocess.Popen(inside, text=True, start_new_session=True, **options)  # type: ignore[call-overload,no-any-return]

    def run(self, *command: str) -> None:
        """Runs a command there."""
        subprocess.run(["nsenter", f"--target={self.pid}", *_SPACES, "--", *command], check=True)

    def plug_in(self) -> None:
        """Switches its end of the cable on."""
        self.run(sys.executable, "-S", __file__, "up", self.address)

    def unplug(self) -> None:
        """Switches its end off: packets are lost, and nobody is told."""
        self.run(sys.executable, "-S", __file__, "down")

    def kill_all(self) -> None:
        """Kills every process in it but the first, as a machine does that loses power, but for its kernel."""
        for process in self.processes():
            os.kill(process, signal.SIGKILL)

    def processes(self) -> list[int]:
        """The numbers out here of the processes in there, without its first."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and int(entry.name) != self.pid and os.readlink(entry / "ns/pid") == space:
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile
        return found

    def end(self) -> None:
        """Ends it, and every process in it."""
        self._holder.kill()
        self._holder.communicate()


@contextmanager
def machines(names: Sequence[str] = ("here", "there"), network: str = "10.77.0") -> Iterator[list[Machine]]:
    """Two machines with a cable between them.

    Raises:
        OSError: Namespaces or cables may not be made here.
    """
    made: list[Machine] = []
    try:
        for number, name in enumerate(names, 1):
            made.append(Machine(name, f"{network}.{number}"))
        _lay_cable(made[0].pid, made[1].pid)
        for machine in made:
            machine.plug_in()
        yield made
    finally:
        for machine in made:
            machine.end()


def why_not() -> str | None:
    """What keeps machines from being made here; None where they can be."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    try:
        with machines():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces may not be made here: {str(error).strip()}"


def _lay_cable(near: int, far: int) -> None:
    """A pair of virtual Ethernet devices, each made in the namespace of a process."""

    def attribute(kind: int, data: bytes) -> bytes:
        return (struct.pack("=HH", 4 + len(data), kind) + data).ljust(-(-(4 + len(data)) // 4) * 4, b"\0")

    def end(pid: int) -> bytes:
        named = attribute(_IFLA_IFNAME, CABLE.encode() + b"\0") + attribute(_IFLA_NET_NS_PID, struct.pack("=I", pid))
        return bytes(16) + named  # behind an empty struct ifinfomsg

    peer = attribute(_INFO_DATA, attribute(_VETH_INFO_PEER, end(far)))
    body = end(near) + attribute(_IFLA_LINKINFO, attribute(_INFO_KIND, b"veth") + peer)
    head = struct.pack("=IHHII", 16 + len(body), _RTM_NEWLINK, _REQUEST_ACK_CREATE_EXCL, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(head + body)
        answer = kernel.recv(1 << 16)
    kind, code = struct.unpack_from("=H", answer, 4)[0], struct.unpack_from("=i", answer, 16)[0]
    if kind != _NLMSG_ERROR or code:
        raise OSError(-code, f"the cable cannot be laid: {os.strerror(-code)}")


def _switch(address: str | None) -> None:
    """Switches the cable's end in this process's network on, or off without an address; the loopback stays on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:

        def set_up(name: str, up: bool) -> None:
            (flags,) = struct.unpack_from(
                "=h", fcntl.ioctl(asked, _SIOCGIFFLAGS, struct.pack("16sh14x", name.encode(), 0)), 16
            )
            flags = flags | _IFF_UP if up else flags & ~_IFF_UP
            fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags))

        if address is not None:
            for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.0")):
                fcntl.ioctl(
                    asked, request, struct.pack("16sH2x4s8x", CABLE.encode(), socket.AF_INET, socket.inet_aton(value))
                )
            set_up("lo", True)
        set_up(CABLE, address is not None)


if __name__ == "__main__":
    _switch(sys.argv[2] if sys.argv[1] == "up" else None)
