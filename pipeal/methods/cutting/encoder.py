"""Encoders of the Hugging Face kind: an embedding, a list of blocks that take a mask, and perhaps a head.

::

    ids, mask ──► embedding ──┊──► block ─ block ──┊──► block ─ block ─ head
                      mask ───┊─────┴───────┴──────┊──────┴───────┘            it travels with the features
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, check_counts
from pipeal.core.tree import Tree

MaskAs: TypeAlias = Callable[[Tensor, Tensor], Any]
"""From the bool mask ``(B, T)`` and the features ``(B, T, D)`` to what a block takes."""


@dataclass(frozen=True)
class Encoder:
    """The three parts of an encoder, for :meth:`pipeal.ALPackage.from_bp`.

    Of a ``transformers.BertModel`` they are ``Encoder(bert.embeddings, bert.encoder.layer, bert.pooler)``. Its packets
    are ``(ids, mask)``, the mask true (or 1) on words and false (or 0) on padding, or ids alone.

    Attributes:
        embedding: ``ids -> (B, T, D)``. It is an AL layer of its own.
        blocks: Called as ``block(features, mask)``; each gives features, or a tuple that begins with them.
        head: ``features -> anything``, at the end of the last layer; None for none.
        mask_as: Makes of the mask what the blocks take; None for :func:`additive`. Without a mask they get None.
        per_layer: How many blocks share an AL layer.
    """

    embedding: nn.Module
    blocks: Sequence[nn.Module]
    head: nn.Module | None = None
    mask_as: MaskAs | None = None
    per_layer: int = 1

    def __post_init__(self) -> None:
        if not len(self.blocks):
            raise ConfigError("the encoder has no blocks; expected at least one")
        check_counts(per_layer=self.per_layer)

    def parts(self) -> list[tuple[str, nn.Module]]:
        """The forward blocks of its AL layers, by name."""
        parts: list[tuple[str, nn.Module]] = [("embedding", EmbeddingPart(self.embedding))]
        blocks = list(self.blocks)
        for start in range(0, len(blocks), self.per_layer):
            group = blocks[start : start + self.per_layer]
            last = start + self.per_layer >= len(blocks)
            parts.append((f"blocks.{start}", BlocksPart(group, self.head if last else None, self.mask_as)))
        return parts

    def check_masks(self) -> None:
        """Refuses blocks of a decoder, which would take a mask for what they remember of the places before.

        Raises:
            ConfigError: A block's second argument is such a memory.
        """
        for block in self.blocks:
            names = list(inspect.signature(block.forward).parameters)
            if len(names) > 1 and names[1].startswith(("past_", "layer_past", "cache")):
                raise ConfigError(
                    f"{type(block).__name__}.forward takes {names[1]} as its second argument, where an Encoder "
                    "gives the mask, and a decoder needs a causal mask as well: pass the whole model with split=…, and "
                    "inputs as {'input_ids': …, 'attention_mask': …}"
                )


class EmbeddingPart(nn.Module):
    """Embeds ids, and passes the mask on, as bools.

    Args:
        embedding: ``ids -> (B, T, D)``.
    """

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tree:
        """``ids`` to features; ``(ids, mask)`` to ``(features, mask)``."""
        if isinstance(x, Tensor):
            return self.embedding(x)
        ids, mask = x
        return self.embedding(ids), mask.bool()


class BlocksPart(nn.Module):
    """Some blocks of an encoder, and after the last ones its head.

    Args:
        blocks: See :class:`Encoder`.
        head: See :class:`Encoder`.
        mask_as: See :class:`Encoder`.
    """

    def __init__(self, blocks: Sequence[nn.Module], head: nn.Module | None, mask_as: MaskAs | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        self.mask_as = mask_as

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tree:
        """Features, with or without a mask, to the same; or to what the head gives, with the mask if that has words."""
        features, mask = (x, None) if isinstance(x, Tensor) else x
        taken = None if mask is None else (self.mask_as or additive)(mask, features)
        for block in self.blocks:
            out = block(features, taken)
            features = out if isinstance(out, Tensor) else out[0]
        if self.head is not None:
            features = self.head(features)
        has_words = isinstance(features, Tensor) and features.dim() == 3
        return (features, mask) if mask is not None and has_words else features


def additive(mask: Tensor, features: Tensor) -> Tensor:
    """What attention adds to its scores: ``(B, 1, 1, T)``, zero on words and the lowest number on padding.

    >>> additive(torch.tensor([[True, False]]), torch.zeros(1, 2, 8)) < -1e30
    tensor([[[[False,  True]]]])
    """
    lowest = torch.finfo(features.dtype).min
    zeros = torch.zeros(mask.shape, dtype=features.dtype, device=features.device)
    return zeros.masked_fill_(~mask, lowest)[:, None, None, :]
