"""What sockets between processes have in common: their settings, the heads of messages, and how messages are taken."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import zmq

from pipeal.core.errors import DataError
from pipeal.engine.distributed.send_buffer import first_size

HEAD_BYTES = 1 << 20
"""The longest head of a message; a longer one is not from a process of this run or line."""


def opened(context: zmq.Context[Any], kind: int, options: Mapping[zmq.SocketOption, int]) -> Any:
    """A socket that holds back nothing, and is closed at once unless told otherwise.

    Args:
        context: Where it belongs.
        kind: Of the socket.
        options: More of ZeroMQ's.
    """
    made = context.socket(kind)
    made.sndhwm = made.rcvhwm = 0  # windows bound what is on the way
    made.linger = 0
    for option, value in options.items():
        made.setsockopt(option, value)
    if kind in (zmq.PUSH, zmq.DEALER) and (size := first_size()) is not None:
        made.sndbuf = size
    return made


def arriving(ready: Any) -> Iterator[list[Any]]:
    """The frames of each message that has come to a socket."""
    while True:
        try:
            yield ready.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return


def packed_head(words: Sequence[Any], whose: str = "an item") -> bytes:
    """A head as it travels.

    Raises:
        DataError: It is too long.
    """
    found = json.dumps(words, separators=(",", ":")).encode()
    if len(found) > HEAD_BYTES:
        raise DataError(
            f"what is said beside the tensors of {whose} has {len(found)} bytes, more than {HEAD_BYTES}; put numbers "
            "into tensors"
        )
    return found
