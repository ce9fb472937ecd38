"""What becomes of features, whatever lies beside them: means over cells and words, and a map at each word.

No class here draws random numbers, but for what a map that it is given draws.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.core.tree import Tree


class CellMeans(nn.Module):
    """Averages over the cells of an image: ``(B, C, H, W)`` to ``(B, C, rows, columns)``.

    As ``nn.AdaptiveAvgPool2d``. In training, where all cells are of one size, as they mostly are, ``avg_pool2d`` takes
    its place: that one's backward is compiled into the kernels around it and stays in their layout, and
    ``torch.use_deterministic_algorithms`` lets it pass on a GPU. Answers keep the operator that no size decides on, so
    that they can be exported for images of any size.

    Args:
        rows: Cells of a column.
        columns: Cells of a row.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns

    def forward(self, x: Tensor) -> Tensor:
        """An image smaller than the cells lends its places to several of them."""
        height, width = x.shape[-2:]
        if not self.training or height % self.rows or width % self.columns:
            return F.adaptive_avg_pool2d(x, (self.rows, self.columns))
        return F.avg_pool2d(x, (height // self.rows, width // self.columns))

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.rows}, {self.columns}"


class MaskedMean(nn.Module):
    """The mean over the words of a text: ``(B, T, D)`` with a ``(B, T)`` mask, or without one, to ``(B, D)``."""

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Sums as a product with the mask: one pass over the features, in one fused operator."""
        if isinstance(x, Tensor):
            return x.mean(1)
        features, mask = x
        # A row without any word has the mean zero, not 0/0.
        weights = mask.to(features.dtype) / mask.sum(1, keepdim=True).clamp(min=1).to(features.dtype)
        return torch.bmm(weights.unsqueeze(1), features).squeeze(1)


class AtEachPlace(nn.Module):
    """A map of vectors on each place of a text; its mask, if there is one, passes through.

    Args:
        maps: ``(…, D) -> (…, D')``.
    """

    def __init__(self, maps: nn.Module) -> None:
        super().__init__()
        self.maps = maps

    def forward(self, x: Tree) -> Tree:
        """``(B, T, D)``, or a tuple of such and its ``(B, T)`` mask."""
        return self.maps(x) if isinstance(x, Tensor) else (self.maps(x[0]), *x[1:])
