"""Through which network interface this machine reaches another."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


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
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == own), None)


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(found[20:24])
