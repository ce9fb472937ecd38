"""How trees get from device to device by way of the hosts: over gloo, through pinned memory where there is a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeal.engine.device import Device, Ready
from pipeal.engine.distributed.wire import Message, Wire
from pipeal.packet import Tree, map_tensors, tensors


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
            tree = self._on_host(self._stream, tree, ready)
        self._wire.send(peer, kind, facts, tree)

    def body(self, message: Message) -> tuple[Tree, Ready]:
        """The tree of a message, and when it may be read."""
        return self._wire.body(message), None

    @staticmethod
    def _on_host(stream: torch.cuda.Stream, tree: Tree, ready: Ready) -> Tree:
        def copy(tensor: Tensor) -> Tensor:
            if not tensor.is_cuda:
                return tensor
            tensor.record_stream(stream)
            there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
            return there.copy_(tensor, non_blocking=True)

        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            copied = map_tensors(copy, tree)
            done = torch.cuda.Event()
            done.record(stream)
        done.synchronize()  # on a courier's thread: no stage waits for it
        return copied
