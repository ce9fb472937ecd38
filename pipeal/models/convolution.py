"""Convolution blocks: what VGG and ResNet are made of.

No class here draws random numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

ONEDNN_BLOCK = 16
"""The most channels that oneDNN takes as one block: 8 with AVX2, 16 with AVX-512."""

Activation = Callable[[], nn.Module]
"""Makes an activation. Not in place: what a layer receives is not its own to write to."""


class SubsampledConv2d(nn.Conv2d):
    """A 1 × 1 convolution that takes every s-th pixel first and convolves those: equal to one of stride s.

    For fewer channels than a block, oneDNN's gradient of the weights of a strided 1 × 1 convolution on
    ``channels_last`` images writes behind its workspace: memory is corrupted, and the process dies, now or later
    (uxlfoundation/oneDNN issue 6035; met with PyTorch 2.15 on two threads and a batch of 7).

    Args:
        channels_in: ``C``.
        channels_out: ``C'``.
        stride: ``s``.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, C', ⌈H/s⌉, ⌈W/s⌉)``."""
        down, right = self.stride
        return F.conv2d(input[:, :, ::down, ::right], self.weight)


class ConvBN(nn.Sequential):
    """A 3 × 3 convolution (or 1 × 1), batch norm, and an activation: ``(B, C, H, W)`` to ``(B, C', H/s, W/s)``.

    Args:
        channels_in: ``C``.
        channels_out: ``C'``.
        activation: Makes what comes last; None for nothing.
        stride: ``s``.
        kernel: 3, padded to keep the size, or 1.
    """

    def __init__(
        self, channels_in: int, channels_out: int, activation: Activation | None, *, stride: int = 1, kernel: int = 3
    ) -> None:
        # No bias: the norm subtracts the mean.
        convolution: nn.Conv2d
        if kernel == 1 and stride > 1 and channels_in < ONEDNN_BLOCK:
            convolution = SubsampledConv2d(channels_in, channels_out, stride)
        else:
            convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
        last = [] if activation is None else [activation()]
        super().__init__(convolution, nn.BatchNorm2d(channels_out), *last)


class BasicBlock(nn.Module):
    """Two convolutions with a shortcut around them (He et al., "Deep Residual Learning", CVPR 2016, figure 2).

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output.
        activation: Makes the activations.
        stride: By which the first convolution shrinks the image; the shortcut is then a 1 × 1 convolution.
    """

    def __init__(self, channels_in: int, channels_out: int, activation: Activation, *, stride: int = 1) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            ConvBN(channels_in, channels_out, activation, stride=stride), ConvBN(channels_out, channels_out, None)
        )
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else ConvBN(channels_in, channels_out, None, stride=stride, kernel=1)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, C', H/s, W/s)``."""
        return self.activation(self.residual(x) + self.shortcut(x))
