"""What a trained package is for: its way of inference as one plain module."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from pipeal.al.bp import BP
from pipeal.packet import Tree, device_of


class InferencePath(nn.Module):
    """``f1 … fk, bk, hk … h1`` on one device, in evaluation mode; copies, with nothing that serves training alone.

    It goes through ``torch.export``, and its ``state_dict`` can be saved and loaded as any module's.

    Args:
        layers: The layers to climb; the bridge of the last is taken.
        device: Where to; None for where the first layer is.
    """

    draws_from_default = False

    def __init__(self, layers: Sequence[nn.Module], device: torch.device | str | None = None) -> None:
        super().__init__()
        ways = [_blocks(layer) for layer in layers]
        self.f = nn.ModuleList(deepcopy(f) for f, _, _ in ways)
        self.b = deepcopy(ways[-1][1])
        self.h = nn.ModuleList(deepcopy(h) for _, _, h in reversed(ways))
        self.to(device_of(layers[0]) if device is None else device)
        self.eval()

    def forward(self, x: Tree) -> Tree:
        """The input of the first layer to what its ``h`` gives: for classification, ``(B, classes)`` logits."""
        for block in (*self.f, self.b, *self.h):
            x = block(x)
        return x


def _blocks(layer: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """``f``, ``b`` and ``h``."""
    if isinstance(layer, BP):
        return layer.model, nn.Identity(), nn.Identity()
    sides: Any = layer  # a user's own ENC and AE are only known to have these attributes
    return sides.enc.f, sides.enc.b, sides.ae.h
