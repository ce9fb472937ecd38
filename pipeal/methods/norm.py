"""Batch norm of features that may be one value per channel in a batch of one sample, as in heads; maps with norms."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm of ``(B, C)`` or ``(B, C, H, W)`` that one value of each channel does not stop.

    Of one value there is no spread: it is normed as in evaluation, and leaves the statistics as they are.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Any such shape; the result has the same."""
        if self.training and x.numel() == x.shape[1]:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)

    def _check_input_dim(self, _: Tensor) -> None:
        """The shapes of batch norm in one and in two dimensions."""


def normed_maps(given: int, width: int, norm: type[nn.Module] = BatchNorm) -> list[nn.Module]:
    """Three linear maps, of vectors ``given`` wide, each ``width`` wide, with a norm and ReLU after each."""
    return [step for before in (given, width, width) for step in (nn.Linear(before, width), norm(width), nn.ReLU())]


def replace_batch_norms(network: nn.Module) -> None:
    """Makes each batch norm of PyTorch in a network one that takes a single value per channel (:class:`BatchNorm`).

    Weights, statistics and names stay. One without statistics has nothing that a single value could be normed by.
    """
    for part in network.modules():
        if type(part) in (nn.BatchNorm1d, nn.BatchNorm2d) and part.track_running_stats:
            part.__class__ = BatchNorm
