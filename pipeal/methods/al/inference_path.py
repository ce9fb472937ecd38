"""The way of an inference as one plain module, without what serves training alone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from pipeal.core.errors import ConfigError, DataError, a_type
from pipeal.core.modules import device_of
from pipeal.core.protocols import DOWN, TURN, UP
from pipeal.core.tree import Tree
from pipeal.methods.al.folding import folded
from pipeal.methods.cutting.arguments import Arguments


class InferencePath(nn.Module):
    """``f1 … fk, bk, hk … h1`` on one device, in evaluation mode; copies, with nothing that serves training alone.

    Linear maps that follow each other at its end are one (:mod:`pipeal.methods.al.folding`), in ``h``; ``b`` is what of
    the bridge is before them.

    It goes through ``torch.export``, and its ``state_dict`` can be saved and loaded as any module's.

    Args:
        layers: The layers to climb; the bridge of the last is taken.
        device: Where to; None for where the first layer is.
        arguments: What the input is to be like; None where nothing is known of it.

    Raises:
        ConfigError: A layer's inference does more than to go through its blocks.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        device: torch.device | str | None = None,
        arguments: Arguments | None = None,
    ) -> None:
        super().__init__()
        self.arguments = arguments
        ways = [_blocks(number, layer) for number, layer in enumerate(layers)]
        self.f = nn.ModuleList(deepcopy(way[UP]) for way in ways)
        self.b = deepcopy(ways[-1].get(TURN, nn.Identity()))
        self.h = nn.ModuleList(deepcopy(way.get(DOWN, nn.Identity())) for way in reversed(ways))
        self.to(device_of(layers[0]) if device is None else device)
        if (end := folded([self.b, *self.h])) is not None:
            self.b, self.h = nn.Sequential(*end[:-1]), nn.ModuleList(end[-1:])
        self.eval()

    def forward(self, x: Tree = None, *more: Tree, **named: Tree) -> Tree:
        """The input of the first layer to what its ``h`` gives: for classification, ``(B, classes)`` logits.

        Raises:
            DataError: The arguments are not like those of the sample of ``from_bp``.
        """
        if self.arguments is not None:
            x = self.arguments.gathered(x, more, named)
        elif more or named:
            raise DataError("several arguments are given; expected the input of a batch as one")
        for block in (*self.f, self.b, *self.h):
            x = block(x)
        return x


def _blocks(number: int, layer: nn.Module) -> dict[str, nn.Module]:
    """The blocks that a layer's inference goes through, if it does nothing else."""
    found: Any = layer
    if getattr(getattr(found, "inference", None), "through_blocks", False):
        blocks: dict[str, nn.Module] = found.blocks()
        return blocks
    raise ConfigError(
        f"layer {number} is {a_type(layer)} with its own inference, or none; a plain module is made of the "
        "blocks of AL and BP layers: use infer(), or put what it does into f, b and h"
    )
