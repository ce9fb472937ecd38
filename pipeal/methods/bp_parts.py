"""A network for backpropagation, cut into parts that each do their share of the work alone: what a cut would cost.

Nothing is learnt with them; they take as long as the network cut at the same places does, part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError
from pipeal.core.protocols import UP
from pipeal.core.tree import Tree, detach, map_tensors, tensors
from pipeal.methods.bp import BP
from pipeal.methods.layer import LocalLayer


class BPPart(LocalLayer):
    """One block of a network, in the shape of a layer that trains itself: its gradient comes from nowhere.

    Args:
        block: ``x -> features``.
        optimizer: The whole network's; the part has one of the same kind and settings, of its own block.
        cri: The loss, for the last part; None for the others.
        leads: Whether it is the first part: to all others' ``x`` a gradient is brought, as the part before would take
            it in the whole network.
    """

    draws_from_default = False

    def __init__(
        self, block: nn.Module, optimizer: torch.optim.Optimizer, cri: nn.Module | None = None, *, leads: bool = False
    ) -> None:
        super().__init__()
        self.block = block
        self.cri = cri
        self.leads = leads
        self.opt = _for_block(optimizer, block)

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Passes on what the block gives, detached, and ``y``. Only the whole network has a loss, so none is kept."""
        out = self.block(x if self.leads else map_tensors(_leaf, x))
        ends = [out] if self.cri is None else [self.cri(out, y)]
        self._graph = tuple(_GradientComes.apply(tensor) for tensor in tensors(ends) if tensor.requires_grad)
        return detach(out), y

    def backward(self) -> None:
        """Backward from a gradient of small equal numbers.

        Raises:
            ScheduleError: There is no forward to go back through.
        """
        if graph := self._taken_graph():
            torch.autograd.backward(graph)

    def scale_losses(self, wanted: bool = True) -> None:
        """Does nothing: it has no loss, and nothing is learnt."""

    def blocks(self) -> dict[str, nn.Module]:
        """The block, as ``f``."""
        return {UP: self.block}


class _GradientComes(torch.autograd.Function):
    """Stands for all later parts: in the backward it brings a gradient, which like theirs is let go once it is used,
    and holds no features."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        """Features to a number."""
        ctx.like = features.shape, features.stride(), features.dtype, features.device
        return features.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        """A gradient of the features."""
        shape, stride, dtype, device = ctx.like
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1e-3)


def bp_parts(layers: Sequence[nn.Module]) -> list[BPPart]:
    """The blocks of a model in BP form, each as a part; they share its weights.

    Raises:
        ConfigError: It is no BP model whose network is a sequence of blocks.
    """
    if len(layers) != 1 or not isinstance(layers[0], BP) or not isinstance(layers[0].model, nn.Sequential):
        raise ConfigError("found no single BP layer of an nn.Sequential; expected a model in BP form, made of blocks")
    whole = layers[0]
    last = len(layers[0].model) - 1
    return [
        BPPart(block, whole.opt, whole.cri if place == last else None, leads=not place)
        for place, block in enumerate(layers[0].model)
    ]


def _for_block(optimizer: torch.optim.Optimizer, block: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has seen nothing yet, as one of the whole network is, for a block alone."""
    weights = {id(weight): weight for group in optimizer.param_groups for weight in group["params"]}
    own = {id(weight) for weight in block.parameters()}
    opened = deepcopy(optimizer, {**weights})  # a memo: weights are not copied
    opened.state.clear()
    for group in opened.param_groups:
        group["params"] = [weight for weight in group["params"] if id(weight) in own]
    return opened


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
