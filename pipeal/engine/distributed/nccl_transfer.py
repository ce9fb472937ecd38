"""Trees from GPU to GPU over NCCL, each direction between two ranks with a group and a stream of its own.

::

    compute stream   … F0 ─ready─┐                               ┌─ F0 …      of the next stage
    I/O threads                  └ wait, head ──► answer         │
    NCCL                              send ═════════► receive    │
    I/O threads                         until sent      until there, then the packet is handed on

The head of a message, and what of its tree is on the CPU, goes over the wire first, so that both ends give NCCL the
same tensors in the same order. The receiver answers once it has a place and memory for them; only then they are sent: a
send that waits would hold up the GPU it waits on. They travel as bytes, since NCCL does not know every type.

I/O threads wait on their hosts, and no stage does: before the head for what is sent, and at both ends for
NCCL; until it has been sent a packet keeps its place, and its memory. No stream ever waits for another rank in their
stead: a GPU has few queues for all streams, a wait at the head of one blocks whatever lies behind it, and where packets
go both ways at once each rank could wait for what is blocked on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import sleep
from typing import Any

import torch
from torch import Tensor

from pipeal.core.errors import first_line
from pipeal.core.tree import Tree, map_tensors
from pipeal.engine.devices import Device, Ready
from pipeal.engine.distributed.channel import BrokenWireError, Message, Wire
from pipeal.engine.distributed.flat import Layout, flat, row_for, unflat
from pipeal.engine.distributed.host_transfer import Carrier

_LAYOUTS = "on gpu"
_POLL_S = 1e-4


class GpuCarrier(Carrier):
    """A carrier between two ranks that have a GPU each.

    Args:
        wire: For heads, and tensors on the CPU.
        pair: The NCCL group of the two, for this direction alone.
        to: The peer's number in the group.
        device: The stage's device.
    """

    def __init__(self, wire: Wire, pair: Any, to: int, device: Device) -> None:
        super().__init__(wire, device)
        self._pair = pair
        self._to = to
        self._device = device

    def send(self, peer: int, kind: str, facts: Mapping[str, Any], tree: Tree, ready: Ready) -> None:
        """Sends a message whose tree may be read once it is ``ready``; returns when it has been taken."""
        layouts: list[Layout | None] = []
        rows: list[Tensor] = []

        def set_aside(tensor: Tensor) -> Tensor:
            if tensor.device.type != self._device.device.type:
                layouts.append(None)
                return tensor
            layout, row = flat(tensor)
            layouts.append(layout)
            rows.append(row)
            return torch.empty(0)

        with self._active(ready):
            light = map_tensors(set_aside, tree)
            self._mark().synchronize()
            self.wire.send(peer, kind, {**facts, _LAYOUTS: layouts}, light)
            if _on_gpu(layouts) and self.wire.hear_answer(peer):
                for row in rows:
                    self._carry(self._pair.send, row, peer)

    def body(self, message: Message) -> tuple[Tree, Ready]:
        """The tree of a message, and when it may be read: on its GPU already."""
        layouts = message.facts[_LAYOUTS]
        with self._active():
            # Before anything is sent: where memory does not suffice, there is nobody to wait for this rank.
            rows = [None if layout is None else row_for(layout, device=self._device.device) for layout in layouts]
            light = self._light(message)
            if _on_gpu(layouts):
                self.wire.answer(message.source, True)
                for row in rows:
                    if row is not None:
                        self._carry(self._pair.recv, row, message.source)
            arrived = iter(zip(layouts, rows, strict=True))

            def put_in(tensor: Tensor) -> Tensor:
                layout, row = next(arrived)
                return tensor if row is None else unflat(layout, row)

            return map_tensors(put_in, light), self._mark() if any(layouts) else None

    def drop(self, message: Message) -> None:
        """Lets go of a message whose tree nobody wants any more: what is on the GPU stays with its sender."""
        self.wire.drop(message)
        if _on_gpu(message.facts[_LAYOUTS]):
            self.wire.answer(message.source, False)

    def _light(self, message: Message) -> Tree:
        """What of a tree comes over the wire. Where that makes no tree, its sender is answered: it waits for that."""
        try:
            return self.wire.body(message)
        except BrokenWireError:
            raise
        except BaseException:
            if message.taken and _on_gpu(message.facts[_LAYOUTS]):
                self.wire.answer(message.source, False)
            raise

    def _carry(self, operation: Callable[..., Any], row: Tensor, peer: int) -> None:
        """Waits for an operation of NCCL, on an I/O thread."""
        if not row.numel():
            return
        try:
            work = operation([row.view(torch.uint8)], self._to, 0)
            while not work.is_completed():
                sleep(_POLL_S)
            work.wait()  # of what has ended: no stream gets a wait, and what it failed with is raised
        except RuntimeError as error:
            raise BrokenWireError(first_line(error), peer) from error


def _on_gpu(layouts: Sequence[Layout | None]) -> bool:
    """Whether NCCL has anything to carry."""
    return any(layout is not None and layout[3] for layout in layouts)
