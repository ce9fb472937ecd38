"""Dropout whose masks follow from (seed, layer, batch), and that is cheap on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError
from pipeal.core.rng import random_words

_LEVELS = 256


class Dropout(nn.Module):
    """Zeroes elements with probability ``p`` in training and scales the rest to keep the mean.

    Draws from the key that the engine has put in force (:func:`pipeal.core.rng.keyed`), else from PyTorch's
    default generator. It spends one random byte per element: eight elements share a 64-bit draw, which on a CPU
    is several times faster than ``nn.Dropout``, whose Bernoulli sampler would dominate a step of a small model
    (``scripts/bench/text.py`` measures it). So ``p`` is rounded to the nearest 1/256 (at most 255/256); the scale
    uses the rounded value, and the mean is exact.

    Args:
        p: The probability of a zero, from 0 up to but not including 1.
    """

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
        is_compiling = torch.compiler.is_compiling()
        if x.is_cuda and not is_compiling:
            return dropped(x, threshold)
        mask = _mask_compiled if is_compiling else _mask
        return x * mask(_ORDER, x.numel(), threshold, x.dtype, x.device).view(x.shape)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"p={self.p}"


def _mask(_: Tensor, count: int, threshold: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``(count,)`` zeros, where a random byte is below the threshold, and scales."""
    draws = random_words((count + 7) // 8, device).view(torch.uint8)
    # Written in that type at once: from truth values it is a pass more, which on a CPU is the slowest of all. On a GPU
    # see :func:`dropped`.
    keep = torch.ge(draws[:count], threshold, out=torch.empty(count, dtype=dtype, device=device))
    return keep.mul_(_LEVELS / (_LEVELS - threshold))


def dropped(x: Tensor, threshold: int) -> Tensor:
    """The same for a GPU: from the same bytes, with a byte of each element kept for the backward, and a kernel more.

    In half precision each way is rounded once, and not the scale before.
    """
    draws = random_words((x.numel() + 7) // 8, x.device).view(torch.uint8)
    keep = (draws[: x.numel()] >= threshold).view(x.shape)
    # In one kernel each way it would be a torch.autograd.Function, whose Python takes longer than several launches.
    # native_dropout_backward has a derivative, but one in three kernels, which rounds the scale.
    return x * keep * (_LEVELS / (_LEVELS - threshold))


# As an operator, for compiled graphs. It says that it changes a tensor, the same one for all masks, though it does not:
# compilers then draw each mask, all of them in their order, and take no two for one. Masks are not made of random bytes
# by the compiler's own kernels, which on a CPU takes longer.
_ORDER = torch.zeros((), device="cpu")
_LIBRARY = torch.library.Library("pipeal", "DEF")
_LIBRARY.define(
    "dropout_mask(Tensor(a!) order, SymInt count, int threshold, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.impl("dropout_mask", _mask, "CompositeExplicitAutograd")
_mask_compiled = torch.ops.pipeal.dropout_mask.default


def _mask_to_come(_: Tensor, count: int, threshold: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG001
    return torch.empty(count, dtype=dtype, device=device)


torch.library.register_fake("pipeal::dropout_mask", _mask_to_come, lib=_LIBRARY)
