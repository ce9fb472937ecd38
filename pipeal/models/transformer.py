"""The transformer encoder block: pre-norm attention and feed-forward, then a final norm.

After Vaswani et al., "Attention Is All You Need" (2017), in the shape of the published AL implementation: a
norm before each sub-layer and one after the last, no position code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.core.errors import ConfigError
from pipeal.methods.al import Dropout
from pipeal.models.features import Features

_MASKED = -1e4
"""What is added to the score of a padding position: its weight underflows to an exact zero in every float type,
and a finite number stays finite in half precision."""


_FIRST_SHARE = 0.1
"""How much of what a sub-layer computes it adds at first. A block so starts near the identity: an AL layer trains
on the features of the one before from the first step, and should not bury them under noise."""


class SelfAttention(nn.Module):
    """Multi-head self-attention over the words of each text, with one packed projection.

    There is no dropout on the attention weights: it would cost a draw per pair of words, and the fused kernel for
    the CPU has none.

    Args:
        dim: The width of the features, a multiple of ``heads``.
        heads: The number of heads.

    Raises:
        ConfigError: ``heads`` does not divide ``dim``.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ConfigError(f"{heads} heads do not divide {dim} features; choose a divisor of {dim}")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x`` is ``(B, T, D)``, ``mask`` ``(B, T)``; the result is shaped like ``x``."""
        batch, length, dim = x.shape
        by_head = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        bias = torch.zeros(mask.shape, dtype=by_head.dtype, device=mask.device).masked_fill_(~mask, _MASKED)
        attend = _attend_by_products if x.device.type == "cpu" else _attend_fused
        mixed = attend(by_head, bias)  # (B, heads, T, D / heads)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


def _attend_fused(qkv: Tensor, bias: Tensor) -> Tensor:
    """``qkv`` is ``(3, B, heads, T, d)``, ``bias`` ``(B, T)``."""
    width = qkv.shape[-1]
    # The kernels that take a mask want the width of a head in whole eights; the published one is 50.
    q, k, v = F.pad(qkv, (0, -width % 8)).unbind(0)
    every_query = bias[:, None, None, :].expand(-1, -1, q.shape[2], -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=every_query, scale=width**-0.5)[..., :width]


def _attend_by_products(qkv: Tensor, bias: Tensor) -> Tensor:
    """The same by two batched products.

    On a CPU and at the lengths of texts it beats the fused kernel: for 256 x 40 tokens, forward and backward
    took 21 ms against 140 in bfloat16, where only the products use the matrix unit, and 31 ms against 33 in
    float32 (two cores, best of 12 in turns).
    """
    _, batch, heads, length, d = qkv.shape
    q, k, v = qkv.reshape(3, batch * heads, length, d).unbind(0)
    biases = bias.repeat_interleave(heads, 0).unsqueeze(1)
    scores = torch.baddbmm(biases, q, k.transpose(1, 2), alpha=d**-0.5)
    # In float32, in which the operator is exact and, on rows of such odd lengths, also three times faster.
    weights = scores.float().softmax(-1).to(v.dtype)
    return torch.bmm(weights, v).view(batch, heads, length, d)


class EncoderLayer(nn.Module):
    """Attention, then a feed-forward network of two linear maps; each adds to what it reads, normed.

    Args:
        dim: The width of the features.
        hidden: The width inside the feed-forward network.
        heads: The number of attention heads.
        dropout: On what each sub-layer adds, and inside the feed-forward network.
    """

    def __init__(self, dim: int, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads)
        self.feed_norm = nn.LayerNorm(dim)
        self.feed_in = nn.Linear(dim, hidden)
        self.feed_out = nn.Linear(hidden, dim)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x`` is ``(B, T, D)``, ``mask`` ``(B, T)``; the result is shaped like ``x``."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        inside = self.dropout(F.relu(self.feed_in(self.feed_norm(x))))
        return x + self.dropout(self.feed_out(inside))


class TransformerBlock(nn.Module):
    """One AL layer's ``f``: encoder layers and a final norm.

    Args:
        dim: The width of the features.
        hidden: The width inside the feed-forward networks.
        heads: The number of attention heads.
        layers: The number of encoder layers.
        dropout: See :class:`EncoderLayer`.
    """

    def __init__(self, dim: int, hidden: int, heads: int, *, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(dim, hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.dim = dim
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the linear maps of all encoder layers."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # The packed projection is three matrices; each gets the spread of its own shape.
                for matrix in module.weight.detach().split(self.dim if module.out_features == 3 * self.dim else 10**9):
                    nn.init.xavier_uniform_(matrix)
        for layer in self.layers:
            assert isinstance(layer, EncoderLayer)
            for last in (layer.attention.out, layer.feed_out):
                last.weight.detach().mul_(_FIRST_SHARE)

    def forward(self, x: Features) -> Features:
        """``(B, T, D)`` to ``(B, T, D)``; the mask passes through."""
        features, mask = x
        for layer in self.layers:
            features = layer(features, mask)
        return self.norm(features), mask
