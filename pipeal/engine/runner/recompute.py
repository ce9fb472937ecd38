"""Activation checkpointing inside a layer: of each of its blocks only the input is kept, and the rest computed again in
the backward (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; ``torch.utils.checkpoint``).

::

    kept      x ─► block 1 ─► x1 ─► block 2 ─► x2 ─► block 3 ─► loss        x, x1, x2, and one block's activations
    backward       x1 again         x2 again         …                      while its turn in the backward lasts

The bits are those of a layer that keeps everything: what a block drew it draws again, from the key and the generators
as they were (:class:`pipeal.core.rng.replayed`), and it meets the buffers that it met, such as the statistics of batch
norm, which are not brought up to date twice. What a block keeps in Python by itself, such as a counter, it changes
twice. A block that changes its input in place is refused: it would be computed again from what it made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# As in pipeal.core.tree: private by name, but what fx itself stands on.
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from pipeal.core.errors import ConfigError
from pipeal.core.packet import Packet
from pipeal.core.protocols import UP, TrainableLayer
from pipeal.core.rng import replayed
from pipeal.core.tree import Tree, version
from pipeal.engine.devices import Device
from pipeal.engine.runner.layer import Passed, Runner


@dataclass(eq=False)
class Recomputed(Runner):
    """Keeps of some modules within the layer only what they were given.

    Attributes:
        parts: Those modules.
    """

    parts: Sequence[nn.Module]

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`."""
        with ExitStack() as patched:
            for part in self.parts:
                patched.enter_context(_in_place_of_forward(part, partial(kept_in_short, part, part.forward)))
            return self.inner.forward(packet, x, y, rows)


def parts_of(layer: TrainableLayer, device: Device) -> list[nn.Module]:
    """The modules of a layer that are computed again: the repeated blocks of its way up, or that as a whole.

    Not a user's own layer as a whole, whose forward keeps what its backward needs; and on a GPU no recurrence with
    dropout, which cuDNN draws by itself.
    """
    blocks = getattr(layer, "blocks", None)
    found = blocks().get(UP) if callable(blocks) else layer
    parts = _blocks(found) if isinstance(found, nn.Module) else []
    on_cpu = set(device.types) == {"cpu"}
    parts = [part for part in parts if id(part) != id(layer)]
    return [part for part in parts if on_cpu or not any(map(_draws_in_cudnn, part.modules()))]


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Of a row those of its modules that have modules within, and of what holds a row of such ones, these; else all.

    >>> def block(): return nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> row = nn.Sequential(block(), nn.Flatten(), block())
    >>> _blocks(row) == [row[0], row[2]], _blocks(row[0]) == [row[0]]
    (True, True)
    """
    within = [child for child in module.children() if _has_modules(child)]
    if not isinstance(module, _ROWS):
        within = [child for child in within if isinstance(child, _ROWS) and any(map(_has_modules, child.children()))]
    found = [block for child in within for block in _blocks(child)]
    if found or isinstance(module, nn.ModuleList):  # which has no forward
        return found
    return [module] if any(True for _ in module.parameters()) else []


_ROWS = (nn.Sequential, nn.ModuleList)


def _has_modules(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _draws_in_cudnn(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1


def kept_in_short(part: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """What a forward of a part gives, of which only what it was given is kept, where gradients are wanted.

    Raises:
        ConfigError: The forward has changed what it was given.
    """
    if not torch.is_grad_enabled() or any(map(is_lazy, (*part.parameters(), *part.buffers()))):  # given shapes by it
        return forward(*args, **named)
    met = _Met(part)
    given = [(leaf, version(leaf)) for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, Tensor)]
    out = checkpoint(
        partial(_to_the_end, forward, **named),  # some of the names are also those of checkpoint's own arguments
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing is drawn but by the key
        context_fn=lambda: (nullcontext(), met),
    )
    if any(version(tensor) != before for tensor, before in given) and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(out)
    ):
        within = ", ".join(type(child).__name__ for child in part.children())
        raise ConfigError(
            f"recompute='blocks' keeps the input of each block, and the block {type(part).__name__}({within}) changed "
            "its own in place; use operators that do not (such as inplace=False) on what a block receives"
        )
    met.keep_what_changed()
    return out


def _to_the_end(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A forward whose very last step is to keep something: what is computed again ends with the last that was kept, and
    an operator that fills what it keeps, as ``rrelu_with_noise`` its noise, must have run by then."""
    out = forward(*args, **named)
    _Last.apply(torch.empty(0, requires_grad=True))
    return out


class _Last(torch.autograd.Function):
    """Keeps an empty tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad


class _Met:
    """Within it a part finds the weights and buffers that its forward met, and draws what it drew. Made before that.

    It may be entered several times: each finds what the first one found.
    """

    def __init__(self, part: nn.Module) -> None:
        self._weights = [
            (owner._parameters, name, weight)  # others than its own, under torch.func.functional_call
            for owner in part.modules()
            for name, weight in owner._parameters.items()
            if weight is not None
        ]
        self._buffers = [
            _Buffer(owner._buffers, name, buffer, buffer.clone(), version(buffer))
            for owner in part.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._empty = [
            (owner._buffers, name)
            for owner in part.modules()
            for name, buffer in owner._buffers.items()
            if buffer is None
        ]
        self._draws = replayed()
        self._undo: list[Callable[[], None]] = []

    def keep_what_changed(self) -> None:
        """After the forward: lets go of the copies of buffers that it has left alone, such as masks."""
        for buffer in self._buffers:
            if buffer.place.get(buffer.name) is not buffer.tensor:
                continue  # the forward has put another in its place
            # A version says nothing of what is written past it, as batch norm does, or through ``.data``. To compare is
            # to wait for a GPU: there only what learns nothing is let go of.
            if buffer.tensor.device.type == "cpu":
                same = torch.equal(buffer.tensor, buffer.copy) if buffer.copy is not None else True
            else:
                same = not buffer.tensor.is_floating_point() and buffer.version == version(buffer.tensor)
            if same:
                buffer.copy = None

    def __enter__(self) -> None:
        for place, name, weight in self._weights:
            self._put(place, name, weight)
        for holds, name in self._empty:
            self._put(holds, name, None)
        copies: dict[int, Tensor] = {}  # of buffers under several names, one
        for buffer in self._buffers:
            if buffer.copy is not None:
                self._put(buffer.place, buffer.name, copies.setdefault(id(buffer.tensor), buffer.copy.clone()))
        self._draws.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._draws.__exit__(*raised)
        while self._undo:
            self._undo.pop()()

    def _put(self, place: dict[str, Any], name: str, tensor: Tensor | None) -> None:
        now = place.get(name)
        if tensor is None or now is not tensor:
            place[name] = tensor
            self._undo.append(partial(place.__setitem__, name, now))


@dataclass
class _Buffer:
    place: dict[str, Any]
    name: str
    tensor: Tensor
    copy: Tensor | None
    version: int | None


@contextmanager
def _in_place_of_forward(part: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = vars(part).get("forward")  # a user's own patch
    part.forward = forward
    try:
        yield
    finally:
        del part.forward
        if before is not None:
            part.forward = before
