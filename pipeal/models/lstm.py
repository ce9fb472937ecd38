"""The bidirectional LSTM block on texts of different lengths, without packing and without steps in Python."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.methods.al import Dropout
from pipeal.models.features import Features


class LSTMBlock(nn.Module):
    """One AL layer's ``f``: an LSTM from each end of a text.

    The forward direction reads the padding last, which harms nothing. The backward direction reads each text
    reversed in place, its padding still last. So both run as one fused operator over the whole batch. (Reading
    the padded batch from its end instead, as the published code does, starts from a state made of padding.)

    Args:
        dim: The width of the input.
        hidden: The width per direction.
        dropout: On what the block reads.
    """

    def __init__(self, dim: int, hidden: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.onward = nn.LSTM(dim, hidden, batch_first=True)
        self.back = nn.LSTM(dim, hidden, batch_first=True)
        self._missing = _missing_types()

    def forward(self, x: Features) -> Features:
        """``(B, T, D)`` to ``(B, T, 2 * hidden)``; the mask passes through."""
        features, mask = x
        features = self.dropout(features)
        mirror = _mirror(mask)
        if self._missing and x[0].device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            cast = torch.get_autocast_dtype("cpu") not in self._missing
            with torch.autocast("cpu", enabled=cast):
                return self._both(features if cast else features.float(), mirror), mask
        return self._both(features, mirror), mask

    def _both(self, features: Tensor, mirror: Tensor) -> Tensor:
        onward, _ = self.onward(features)
        back, _ = self.back(_Permute.apply(features, mirror))
        return torch.cat((onward, _Permute.apply(back, mirror)), -1)


@cache
def _missing_types() -> frozenset[torch.dtype]:
    """Types in which this CPU has no LSTM under autocast, though products are emulated: oneDNN asks for AVX512."""
    missing = set()
    zeros = partial(torch.zeros, device="cpu")  # also where a model is built on the meta device
    rows, state = zeros(1, 1, 1), (zeros(1, 1, 1), zeros(1, 1, 1))
    weights = [zeros(4, 1), zeros(4, 1), zeros(4), zeros(4)]
    for dtype in (torch.bfloat16, torch.float16):
        try:
            with torch.no_grad(), torch.autocast("cpu", dtype):
                torch.lstm(rows, state, weights, True, 1, 0.0, False, False, True)
        except RuntimeError:
            missing.add(dtype)
    return frozenset(missing)


def _mirror(mask: Tensor) -> Tensor:
    """Row numbers of the flat ``(B * T)`` batch that turn each text round and leave padding where it is.

    A text is all up to its last word: what pads before it is turned round with the words.

    >>> _mirror(torch.tensor([[True, True, True], [True, True, False], [False, True, False]]))
    tensor([2, 1, 0, 4, 3, 5, 7, 6, 8])
    """
    batch, length = mask.shape
    position = torch.arange(length, device=mask.device)
    reach = mask.flip(1).cumsum(1).gt(0).sum(1, keepdim=True)  # up to the last word
    reversed_position = torch.where(position < reach, reach - 1 - position, position)
    return (reversed_position + length * torch.arange(batch, device=mask.device).unsqueeze(1)).flatten()


class _Permute(torch.autograd.Function):
    """Takes rows in the order of a permutation that is its own inverse.

    So the backward is the same gather; autograd's own, which must allow for repeated rows, is a slower sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        """``x`` is ``(B, T, D)``, ``order`` ``(B * T)``."""
        ctx.save_for_backward(order)
        return x.flatten(0, 1).index_select(0, order).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Gradients in the order of the input."""
        (order,) = ctx.saved_tensors
        return _Permute.apply(grads[0], order), None
