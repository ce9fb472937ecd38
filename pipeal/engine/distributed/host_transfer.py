"""How trees get from device to device by way of the hosts: through pinned memory where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeal.core.tree import Tree, tensors
from pipeal.core.tree_codec import taken_apart
from pipeal.engine.devices import Device, Ready
from pipeal.engine.distributed.channel import Message, Wire
from pipeal.engine.distributed.flat import Layout, flat, row_for


class Carrier:
    """Gets trees from one rank to another; each direction is used by one thread, which waits for the copies.

    Args:
        wire: Where messages go.
        device: The stage's device. What arrives is on the CPU, pinned, and copied on by whoever uses it.

    Attributes:
        wire: As given.
    """

    def __init__(self, wire: Wire, device: Device) -> None:
        self.wire = wire
        self._stream: Any = torch.cuda.Stream(device.device) if device.lags else None

    def send(self, peer: int, kind: str, facts: Mapping[str, Any], tree: Tree, ready: Ready) -> None:
        """Sends a message whose tree may be read once it is ``ready``; returns when the window has room."""
        if self._stream is not None and any(tensor.is_cuda for tensor in tensors(tree)):
            form, found = taken_apart(tree)
            self.wire.send_rows(peer, kind, facts, form, self._on_host(found, ready))
        else:
            self.wire.send(peer, kind, facts, tree)

    def body(self, message: Message) -> tuple[Tree, Ready]:
        """The tree of a message, and when it may be read."""
        return self.wire.body(message), None

    def drop(self, message: Message) -> None:
        """Lets go of a message whose tree nobody wants any more."""
        self.wire.drop(message)

    def _on_host(self, found: Sequence[Tensor], ready: Ready) -> list[tuple[Layout, Tensor]]:
        """Tensors as rows in pinned memory; this thread waits for the copies, and no stage does."""
        rows = []
        with self._active(ready):
            for tensor in found:
                layout, row = flat(tensor)
                if row.is_cuda:
                    row = row_for(layout, pinned=True).copy_(row, non_blocking=True)
                rows.append((layout, row))
            done = self._mark()
        done.synchronize()
        return rows

    @contextmanager
    def _active(self, ready: Ready = None) -> Iterator[None]:
        """Has what is done within done on this carrier's stream, once something is ``ready``."""
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            yield

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # else the thread that waits for it would keep a core busy
        event.record(self._stream)
        return event
