"""The local losses of a stage, kept where they are until somebody asks."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeal.core.errors import LayerError


class LossLog:
    """The local losses of a stage's layers, batch by batch, on their device until the caller takes them.

    Written by the stage's thread, taken while it rests. Kept as one block per thousand batches: a scalar of its own
    takes a GPU's allocator 512 bytes.
    """

    def __init__(self) -> None:
        self._single: dict[int, list[list[Tensor]]] = {}
        self._blocks: dict[int, list[Tensor]] = {}
        self._counts: dict[int, int] = {}

    def add(self, layer: int, losses: list[Tensor]) -> None:
        """Keeps one batch's losses of one layer.

        Raises:
            LayerError: They are more or fewer than those before.
        """
        if (before := self._counts.setdefault(layer, len(losses))) != len(losses):
            raise LayerError(
                f"layer {layer} reports {len(losses)} losses for this batch, but {before} before; expected as many for "
                "each batch, or none at all for some"
            )
        single = self._single.setdefault(layer, [])
        single.append(losses)
        if len(single) == 1000:
            self._join(layer)

    def so_far(self, layer: int) -> Tensor | None:
        """One layer's ``(batches, losses)`` float32 since the last :meth:`take`, where they are; None for none."""
        if layer in self._single:
            self._join(layer)
        if layer not in self._blocks:
            return None
        self._blocks[layer] = [torch.cat(self._blocks[layer])]
        return self._blocks[layer][0]

    def take(self) -> dict[int, Tensor]:
        """By layer, ``(batches, losses)`` float32 on the CPU; forgets them."""
        for layer in list(self._single):
            self._join(layer)
        taken = {layer: torch.cat(blocks).cpu() for layer, blocks in self._blocks.items()}
        self._single, self._blocks, self._counts = {}, {}, {}
        return taken

    def _join(self, layer: int) -> None:
        rows = self._single.pop(layer)
        block = torch.stack([loss.float() for row in rows for loss in row]).view(len(rows), -1)
        self._blocks.setdefault(layer, []).append(block)
