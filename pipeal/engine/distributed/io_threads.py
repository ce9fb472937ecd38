"""The threads between a rank's links and its wires: one per wire and direction, which waits so that no stage has to.

::

    worker ─► outbox ─► Outgoing ══ wire ══► Incoming ─► inbox ─► worker
                                                 └ takes a packet only when the inbox has space: once the wire's
                                                   window is full, the wait goes back to the worker there
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from pipeal.core.packet import Packet
from pipeal.core.tree import Tree
from pipeal.engine.devices import Ready
from pipeal.engine.distributed.channel import BrokenWireError, Message, Wire
from pipeal.engine.distributed.host_transfer import Carrier
from pipeal.engine.execution.channel import Item, Link, Stopped
from pipeal.engine.execution.worker import SharedProgress
from pipeal.engine.state.snapshot import Snapshot

CLOSE = "close"
"""The last message of a wire."""

FAREWELL_S = 30.0
"""How long the last messages of an orderly end are waited for."""

Handler = Callable[[Message], object]
Failed = Callable[[BaseException], None]


def io_thread(name: str, work: Callable[[], None], failed: Failed) -> threading.Thread:
    """Starts a daemon, since it may be left behind in a wait for a peer that cannot be reached.

    Args:
        name: What it does.
        work: Its work, until it returns, or a link that it waits at is closed.
        failed: Told of any other exception.
    """

    def run() -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  handed to whoever waits for this rank
            failed(error)

    thread = threading.Thread(target=run, name=f"pipeal-{name}", daemon=True)
    thread.start()
    return thread


def send_all(link: Link, carrier: Carrier, peer: int, progress: SharedProgress) -> None:
    """Sends what comes to a link, until that is closed; then a last word, which says whether this rank has failed.

    An item keeps its place in the link until the window has room for one more.

    Raises:
        BrokenWireError: The peer is gone.
    """
    try:
        while True:
            carrier.send(peer, *_message_of(link.first()))
            link.get()
    except (Stopped, BrokenWireError) as end:
        if isinstance(end, BrokenWireError):
            raise
    except BaseException as error:  # noqa: BLE001  handed to whoever waits for this rank
        progress.fail(error)
    carrier.wire.send(peer, CLOSE, {"failed": progress.failure is not None})


def receive_all(
    wire: Wire,
    handlers: Mapping[str, Handler],
    failed: Failed,
    *,
    drop: Callable[[Message], object],
    unclosed: set[int],
) -> None:
    """Hands every message to the handler of its kind, until the last words of all ranks in ``unclosed`` have come.

    Also when this rank has failed, or is told to stop: or the peer would wait for ever for its messages to be taken.
    ``drop`` takes the tree of one that nobody wants any more.

    Raises:
        BrokenWireError: One of them is gone.
    """
    handlers = {CLOSE: lambda _: None, **handlers}
    while unclosed:
        message = wire.receive(unclosed)
        for step in (handlers[message.kind], lambda message: message.taken or drop(message)):
            try:
                step(message)
            except Stopped:
                pass
            except BrokenWireError:
                raise
            except BaseException as error:  # noqa: BLE001  handed to whoever waits for this rank
                failed(error)
        if message.kind == CLOSE:
            unclosed.discard(message.source)


def _message_of(item: Item) -> tuple[str, Mapping[str, Any], Tree, Ready]:
    """An item of a line of stages as a message."""
    if isinstance(item, Packet):
        return "packet", facts_of(item), (item.x, item.y), item.ready
    if isinstance(item, Snapshot):
        return "snapshot", {"batch": item.batch, "number": item.number, "note": item.note}, None, None
    sendable: Any = item
    return sendable.message()


def facts_of(packet: Packet) -> dict[str, Any]:
    """What a message says of a packet, beside its tensors."""
    return {
        "sequence": packet.sequence,
        "batch": packet.batch,
        "lr_scale": packet.lr_scale,
        "updates": packet.updates,
    }


def packet_of(facts: Mapping[str, Any], x: Tree, y: Tree, ready: Ready) -> Packet:
    """The packet that a message speaks of."""
    return Packet(facts["batch"], x, y, facts["lr_scale"], facts["updates"], facts["sequence"], ready)
