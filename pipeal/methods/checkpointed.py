"""Backpropagation that keeps the inputs of its blocks, and goes through each block again before its backward."""

from __future__ import annotations

from contextlib import nullcontext

from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeal.core.errors import ConfigError
from pipeal.core.rng import replayed
from pipeal.core.tree import Tree
from pipeal.methods.bp import BP


class Checkpointed(nn.Module):
    """A block under ``torch.utils.checkpoint`` while it trains.

    Args:
        block: ``x -> features``.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tree) -> Tree:
        """As the block; in training, nothing within it is kept."""
        if not self.training:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), replayed()))


def checkpoint_blocks(layer: BP) -> BP:
    """Puts every block of a network in a row under activation checkpointing; returns the same layer.

    As users know it, a block at a time, for comparing memory. ``engine.recompute`` is for training: it chooses smaller
    blocks, in every method, and does not bring the statistics of batch norm up to date twice.

    Raises:
        ConfigError: The network is no ``nn.Sequential``.
    """
    if not isinstance(layer.model, nn.Sequential):
        raise ConfigError(f"found a {type(layer.model).__name__}; expected an nn.Sequential, whose blocks can be told")
    for name, block in list(layer.model.named_children()):
        setattr(layer.model, name, Checkpointed(block))
    return layer
