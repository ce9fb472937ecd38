"""Activation checkpointing inside a layer: of each of its blocks only the input is kept, and the rest computed again in
the backward (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; ``torch.utils.checkpoint``).

::

    kept      x ─► block 1 ─► x1 ─► block 2 ─► x2 ─► block 3 ─► loss        x, x1, x2, and one block's activations
    backward       x1 again         x2 again         …                      while its turn in the backward lasts

The bits are those of a layer that keeps everything: what a block drew it draws again, from the key and the generators
as they were (:class:`pipeal.core.rng.replayed`), and it meets the buffers that it met, such as the statistics of batch
norm, which are not brought up to date twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeal.core.packet import Packet
from pipeal.core.protocols import UP, TrainableLayer
from pipeal.core.rng import replayed
from pipeal.core.tree import Tree, map_tensors, tensors
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
                patched.enter_context(_in_place_of_forward(part, partial(_kept_in_short, part, part.forward)))
            return self.inner.forward(packet, x, y, rows)


def parts_of(layer: TrainableLayer) -> list[nn.Module]:
    """The modules of a layer that are computed again: the repeated blocks of its way up, or that as a whole.

    >>> block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> len(_blocks(nn.Sequential(block, nn.Sequential(nn.Linear(4, 4), nn.ReLU())))), _blocks(block) == [block]
    (2, True)
    """
    blocks = getattr(layer, "blocks", None)
    found = blocks().get(UP) if callable(blocks) else layer  # a user's own layer
    return _blocks(found) if isinstance(found, nn.Module) else []


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Of a row of modules those that have modules within; of another one the rows within it; else itself."""
    within = [child for child in module.children() if next(child.children(), None) is not None]
    rows = within if isinstance(module, _ROWS) else [child for child in within if isinstance(child, _ROWS)]
    found = [block for row in rows for block in _blocks(row)]
    if found or isinstance(module, nn.ModuleList):  # which has no forward
        return found
    return [module] if any(True for _ in module.parameters()) else []


_ROWS = (nn.Sequential, nn.ModuleList)


def _kept_in_short(part: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    return checkpoint(
        partial(_to_the_end, forward),
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing is drawn but by the key
        context_fn=partial(_then_and_again, part),
        **named,
    )


def _to_the_end(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A forward whose very last step is to keep something: what is computed again ends with the last that was kept, and
    an operator that fills what it keeps, as ``rrelu_with_noise`` its noise, must have run by then."""
    out = forward(*args, **named)
    learns = [tensor for tensor in tensors(out) if tensor.requires_grad]
    if not learns:
        return out
    last = _Last.apply(learns[-1])
    return map_tensors(lambda tensor: last if tensor is learns[-1] else tensor, out)


class _Last(torch.autograd.Function):
    """Hands on what it is given, and keeps an empty tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.detach().reshape(-1)[:0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad


def _then_and_again(part: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What is around a forward, and around the same forward in the backward."""
    met = [
        (owner, name, buffer.clone())
        for owner in part.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    return nullcontext(), _as_it_was(met, replayed())


@contextmanager
def _as_it_was(met: list[tuple[nn.Module, str, Tensor]], draws: replayed) -> Iterator[None]:
    """Puts the buffers in place that the forward met, and lets it change these."""
    now = [(owner, name, owner._buffers[name]) for owner, name, _ in met]
    for owner, name, buffer in met:
        owner._buffers[name] = buffer
    try:
        with draws:
            yield
    finally:
        for owner, name, current in now:
            owner._buffers[name] = current


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
