"""The parts of a language model: causal attention, its block, and the embedding of characters in their places.

Pre-norm blocks and the initialisation of GPT-2 (Radford et al., 2019): spread 0.02, biases of zero, and what is added
to the residual path smaller by the square root of the number of additions. They draw random
numbers through :class:`pipeal.methods.dropout.Dropout` alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.core.errors import DataError
from pipeal.methods.al import Dropout

_SPREAD = 0.02

_ROW = 32
"""Softmax on half-precision rows of whole multiples of this computes in float32 within one operator; there and back
with 48 x 64 x 64 scores took 194 us against 290 with casts around it. On other rows it is several times slower."""


class CausalAttention(nn.Module):
    """Multi-head self-attention in which each place sees itself and what is before it.

    Heads are ``ceil(dim / heads)`` wide: where ``heads`` does not divide ``dim`` they are a little wider together than
    the features, instead of leaving some out (3 heads of 32 features are 11 wide).

    There is no dropout on the attention weights; see :class:`pipeal.models.transformer.SelfAttention`.

    Args:
        dim: The width of the features.
        heads: The number of heads.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        inner = -(-dim // heads) * heads
        self.qkv = nn.Linear(dim, 3 * inner)
        self.out = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, D)`` to the same."""
        batch, length, _ = x.shape
        inner = self.out.in_features
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, inner // self.heads).permute(2, 0, 3, 1, 4)
        halved = q.dtype in (torch.bfloat16, torch.float16)
        attend = _attend_by_products if halved and q.device.type == "cpu" else _attend_fused
        return self.out(attend(q, k, v).transpose(1, 2).reshape(batch, length, inner))


def _attend_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``(B, heads, T, d)`` each."""
    width = q.shape[-1]
    if q.device.type == "cuda" and width % 8:  # the fused kernels there want whole eights
        q, k, v = (F.pad(part, (0, -width % 8)) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=width**-0.5)[..., :width]


def _attend_by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by two batched products, for a CPU in half precision: the fused kernel there leaves the matrix unit
    idle (12 x 64 places, 4 heads of 32: 1.9 ms forward and backward against 8.8)."""
    batch, heads, length, width = q.shape
    q, k, v = (part.reshape(batch * heads, length, width) for part in (q, k, v))
    future = torch.full((length, length), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=width**-0.5)
    weights = torch.softmax(scores, -1, dtype=torch.float32 if length % _ROW else None).to(v.dtype)
    return torch.bmm(weights, v).view(batch, heads, length, width)


class CausalBlock(nn.Module):
    """One block: attention and a feed-forward of four times the width, each on normed features, each added.

    Args:
        dim: The width of the features.
        heads: Attention heads.
        dropout: On what each of the two adds.
        depth: How many blocks the whole network has; what this one adds is the smaller, the more there are.
    """

    def __init__(self, dim: int, heads: int, *, dropout: float = 0.0, depth: int = 1) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(dim)
        self.attention = CausalAttention(dim, heads)
        self.norm_wide = nn.LayerNorm(dim)
        self.wide = nn.Linear(dim, 4 * dim)
        self.narrow = nn.Linear(4 * dim, dim)
        self.dropout = Dropout(dropout)
        self.depth = depth
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts all of it as GPT-2 does."""
        start_small(self)
        for last in (self.attention.out, self.narrow):
            nn.init.normal_(last.weight, std=_SPREAD / (2 * self.depth) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, D)`` to the same."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.narrow(F.relu(self.wide(self.norm_wide(x)))))


class CharacterEmbedding(nn.Module):
    """What stands at each place, and where that is: ``(B, T)`` int64 to ``(B, T, D)``.

    Args:
        characters: How many there are.
        dim: The width of the features.
        block: The most places of a text.
        dropout: On the sum.
    """

    def __init__(self, characters: int, dim: int, *, block: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(characters, dim)
        self.places = nn.Embedding(block, dim)
        self.dropout = Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts both tables as GPT-2 does."""
        start_small(self)

    def forward(self, numbers: Tensor) -> Tensor:
        """``(B, T)`` int64.

        Raises:
            DataError: The text is longer than a block.
        """
        length, most = numbers.shape[1], self.places.num_embeddings
        if length > most:
            raise DataError(f"a text of {length} characters; the model has places for {most}, its block")
        return self.dropout(self.table(numbers) + self.places.weight[:length])


def start_small(module: nn.Module) -> None:
    """GPT-2's initialisation of all linear maps and tables within a module."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=_SPREAD)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
