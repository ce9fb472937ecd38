"""From features to fewer numbers: means over the cells of an image, and over the words of a text.

No class here draws random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
