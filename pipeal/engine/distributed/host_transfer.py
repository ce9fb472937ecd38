"""How trees get from device to device by way of the hosts: over gloo, through pinned memory where there is a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeal.core.tree import Tree, tensors
from pipeal.core.tree_codec import taken_apart
from pipeal.engine.devices import Device, Ready
from pipeal.engine.distributed.channel import Message, Wire
from pipeal.engine.distributed.flat import Layout, flat, row_for


class Carrier(Protocol):
    """Gets trees from one rank to another; each direction is used by one thread."""

    @property
    def wire(self) -> Wire:
        """Where the heads of messages go."""
        ...

    def send(self, peer: int, kind: str, facts: Mapping[str, Any], tree: Tree, ready: Ready) -> None:
        """Sends a message whose tree may be read once it is ``ready``; returns when it has been taken."""
        ...

    def body(self, message: Message) -> tuple[Tree, Ready]:
        """The tree of a message, and when it may be read."""
        ...

    def drop(self, message: Message) -> None:
        """Lets go of a message whose tree nobody wants any more."""
        ...


class HostCarrier:
    """A carrier whose thread waits for the copies to the host.

    Args:
        wire: The wire.
        device: The stage's device. What arrives is on the CPU, pinned, and copied on by whoever uses it.
    """

    def __init__(self, wire: Wire, device: Device) -> None:
        self._wire = wire
        self._stream = torch.cuda.Stream(device.device) if device.lags else None

    @property
    def wire(self) -> Wire:
        """Where all of a message goes."""
        return self._wire

    def send(self, peer: int, kind: str, facts: Mapping[str, Any], tree: Tree, ready: Ready) -> None:
        """Sends a message whose tree may be read once it is ``ready``; returns when it has been taken."""
        if self._stream is not None and any(tensor.is_cuda for tensor in tensors(tree)):
            form, found = taken_apart(tree)
            self._wire.send_rows(peer, kind, facts, form, _on_host(self._stream, found, ready))
        else:
            self._wire.send(peer, kind, facts, tree)

    def body(self, message: Message) -> tuple[Tree, Ready]:
        """The tree of a message, and when it may be read."""
        return self._wire.body(message), None

    def drop(self, message: Message) -> None:
        """Lets go of a message whose tree nobody wants any more."""
        self._wire.drop(message)


def _on_host(stream: torch.cuda.Stream, found: Sequence[Tensor], ready: Ready) -> list[tuple[Layout, Tensor]]:
    """Tensors as rows in pinned memory; this thread waits for the copies, and no stage does."""
    rows = []
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        if ready is not None:
            stream.wait_event(ready)
        for tensor in found:
            layout, row = flat(tensor)
            if row.is_cuda:
                row = row_for(layout, pinned=True).copy_(row, non_blocking=True)
            rows.append((layout, row))
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
    done.synchronize()
    return rows
