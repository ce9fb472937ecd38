"""Dropout whose masks follow from (seed, layer, batch), and that is cheap on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeal.errors import ConfigError
from pipeal.random import random_words

_LEVELS = 256


class Dropout(nn.Module):
    """Zeroes elements with probability ``p`` in training and scales the rest to keep the mean.

    Draws from the key that the engine has put in force (:func:`pipeal.random.keyed`), else from PyTorch's
    default generator. It spends one random byte per element: eight elements share a 64-bit draw, which on a CPU
    is several times faster than ``nn.Dropout``, whose Bernoulli sampler would dominate a step of a small model
    (``scripts/bench/text.py`` measures it). So ``p`` is rounded to the nearest 1/256 (at most 255/256); the scale
    uses the rounded value, and the mean is exact.

    Args:
        p: The probability of a zero, from 0 up to but not including 1.
    """

    draws_from_default = False

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"dropout is {p}; expected 0 <= p < 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Any shape; the result has the same."""
        threshold = min(round(self.p * _LEVELS), _LEVELS - 1)
        if not self.training or threshold == 0:
            return x
        draws = random_words((x.numel() + 7) // 8, x.device).view(torch.uint8)
        # Written in the type of x at once: from truth values it is a pass more, which on a CPU is the slowest of all.
        keep = torch.ge(draws[: x.numel()], threshold, out=torch.empty(x.numel(), dtype=x.dtype, device=x.device))
        return x * keep.mul_(_LEVELS / (_LEVELS - threshold)).view(x.shape)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"p={self.p}"
