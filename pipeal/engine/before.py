"""What a batch changes in a layer before its update, as it was before: buffers and gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType

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
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._gradients: list[Tensor | None] | None = None

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Copies the buffers."""
        self._buffers = [
            (part, name, buffer, buffer.clone())
            for part in self._parts
            for name, buffer in part._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]

    @torch.no_grad()
    def put_buffers_back(self) -> None:
        """Gives the buffers the values they had."""
        for part, name, buffer, copy in self._buffers:
            part._buffers[name] = buffer
            if not torch.equal(buffer, copy):  # one that shares its memory with itself cannot be written to
                buffer.copy_(copy)

    def move_gradients_aside(self) -> None:
        """Leaves the layer without gradients."""
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
    for _, tensor, ours in _results(module, objects=False):
        if _can_be_cut(tensor, ours):
            tensor.detach_()


def left_uncut(module: nn.Module) -> str | None:
    """Where a layer holds a graph that :func:`cut_graphs` leaves: a view's, or one that an object holds, or a function
    (in what it closes over, is bound to or is given beforehand); or None."""
    found = _results(module, objects=True)
    return next((where for where, tensor, ours in found if not _can_be_cut(tensor, ours)), None)


def _can_be_cut(tensor: Tensor, ours: bool) -> bool:
    return ours and not tensor._is_view()


def _results(module: nn.Module, *, objects: bool) -> Iterator[tuple[str, Tensor, bool]]:
    """Where tensors with a graph are, they, and whether they are the layer's own: what objects hold may be others'."""
    for part in module.modules():
        for name, value in vars(part).items():
            for tensor, ours in _held(value, set(), objects=objects):
                if tensor.grad_fn is not None:
                    yield f"{type(part).__name__}.{name}", tensor, ours


def _held(
    value: object, seen: set[int], depth: int = 0, *, objects: bool, ours: bool = True
) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an attribute reaches, and whether through containers alone, or also through ``objects``; modules
    are asked for their own."""
    if isinstance(value, Tensor):
        yield value, ours
    if isinstance(value, _HOLDS_NONE) or depth == _DEEP or id(value) in seen:
        return
    seen.add(id(value))
    inside: Iterable[object]
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inside = value
    elif objects:
        ours, inside = False, _parts(value)
    else:
        return
    for one in list(inside):
        yield from _held(one, seen, depth + 1, objects=objects, ours=ours)


_DEEP = 8
_HOLDS_NONE = (Tensor, nn.Module, type, ModuleType, int, float, str, bytes, type(None))


def _parts(value: object) -> Iterator[object]:
    """What an object, or a function, holds on to."""
    yield from getattr(value, "__dict__", {}).values()
    yield from (getattr(value, name, None) for name in _slots(value))
    if isinstance(value, FunctionType):
        yield from (value.__defaults__ or (), value.__kwdefaults__ or {})
        yield from map(_content, value.__closure__ or ())
    elif isinstance(value, MethodType | BuiltinMethodType):
        yield from (value.__self__, getattr(value, "__func__", None))
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _slots(value: object) -> Iterator[str]:
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        yield from (name for name in ((names,) if isinstance(names, str) else names) if not name.startswith("__"))
