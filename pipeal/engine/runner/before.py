"""What a batch changes in a layer before its update, as it was before: buffers and gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class Before:
    """The buffers and gradients of a layer, so that a forward and a backward can be taken back.

    Gradients are moved aside, not copied: a layer that clears them has none between two batches.

    Args:
        module: The layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [part for part in module.modules() if part._buffers]
        self._parameters = list(module.parameters())
        self._buffers: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = []
        self._gradients: list[Tensor | None] | None = None

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Copies the buffers."""
        self._buffers = [
            (part, name, buffer, None if buffer is None else buffer.clone())
            for part in self._parts
            for name, buffer in part._buffers.items()
            if buffer is None or not is_lazy(buffer)
        ]

    @torch.no_grad()
    def put_buffers_back(self) -> None:
        """Gives the buffers the values they had."""
        for part, name, buffer, copy in self._buffers:
            part._buffers[name] = buffer
            # One that shares its memory with itself cannot be written to.
            if buffer is not None and copy is not None and not torch.equal(buffer, copy):
                buffer.copy_(copy)

    def move_gradients_aside(self) -> None:
        """Leaves the layer without gradients, once for a batch: those that come later stay."""
        if self._gradients is None:
            self._gradients = [parameter.grad for parameter in self._parameters]
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drops the gradients that came since."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = None

    @torch.no_grad()
    def put_gradients_back(self, *, together: bool) -> None:
        """Gives the gradients back that were moved aside, ``together`` with those that came since, or instead."""
        aside, self._gradients = self._gradients, None
        for parameter, before in zip(self._parameters, aside or [], strict=False):
            if not together:
                parameter.grad = before
            elif before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def forget(self) -> None:
        """Lets go of the copies."""
        self._buffers, self._gradients = [], None


def cut_graphs(module: nn.Module) -> None:
    """Frees the graphs that a layer holds as attributes, such as those of its last losses."""
    for part in module.modules():
        for value in vars(part).values():
            for tensor in _held(value, set()):
                if tensor.grad_fn is not None and not tensor._is_view():  # a view cannot be cut
                    tensor.detach_()


def _held(value: object, seen: set[int], depth: int = 0) -> Iterator[Tensor]:
    """The tensors that an attribute reaches through containers; what objects hold may be others'."""
    if isinstance(value, Tensor):
        yield value
    if not isinstance(value, _CONTAINERS) or depth == _DEEP or id(value) in seen:
        return
    seen.add(id(value))
    for one in list(value.values() if isinstance(value, Mapping) else value):
        yield from _held(one, seen, depth + 1)


_DEEP = 8
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
