"""Text classifiers, each in AL and in BP form, from the same blocks.

::

    AL   embedding + class code │ block + code │ block + code │ block + code          4 layers, each trains itself
    BP   embedding              │ block        │ block        │ block        │ head   5 blocks, one loss

The published sizes are the defaults. Where the published code lets padding into an answer (the mean over word
vectors, an LSTM's start and end), this does not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, check_counts, check_named
from pipeal.core.tree import Tree
from pipeal.methods.al import AE, ENC
from pipeal.methods.al.bridges import bridge_of
from pipeal.methods.al.codes import class_side, recode_side
from pipeal.methods.lookahead import Ahead
from pipeal.methods.network import Network, Part, Unit, in_a_row, part_sizes
from pipeal.methods.pooling import AtEachPlace, MaskedMean
from pipeal.models.features import TokenEmbedding, words
from pipeal.models.forms import ALForm, BPForm
from pipeal.models.lstm import LSTMBlock
from pipeal.models.transformer import TransformerBlock

Vectors: TypeAlias = Tensor | npt.NDArray[np.float32]
TextBridge: TypeAlias = Literal["pooled", "lookahead"]
TEXT_BRIDGES = ("pooled", "lookahead")


@dataclass(frozen=True, slots=True)
class TextDims:
    """The sizes of a text model; the defaults are the published ones.

    Attributes:
        embedding: The width of a word vector, and of a transformer's features.
        hidden: The width of an LSTM per direction, and inside a transformer's feed-forward network.
        code: The width of a label code.
        heads: Attention heads; they divide ``embedding``. An LSTM ignores it.
        encoder_layers: Encoder layers per block. An LSTM ignores it.
        blocks: LSTM or encoder blocks above the embedding.
        dropout: On word vectors, on what encoder sub-layers add, and on what LSTM blocks read.
        parts: Into how many parts with local losses the embedding and the blocks are divided, as evenly as can be; None
            for one each.
        bridges: ``pooled``, or ``lookahead`` through fresh copies of blocks still to come.
        ahead: How far bridges look ahead that do.

    Raises:
        ConfigError: A size is below 1 or ``dropout`` outside [0, 1).
    """

    embedding: int = 300
    hidden: int = 256
    code: int = 128
    heads: int = 6
    encoder_layers: int = 1
    blocks: int = 3
    dropout: float = 0.3
    parts: int | None = None
    bridges: TextBridge = "pooled"
    ahead: Ahead = field(default_factory=Ahead)

    def __post_init__(self) -> None:
        check_counts(embedding=self.embedding, hidden=self.hidden, code=self.code)
        check_counts(heads=self.heads, encoder_layers=self.encoder_layers, blocks=self.blocks, parts=self.parts)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; expected 0 <= dropout < 1")
        check_named("bridges", self.bridges, TEXT_BRIDGES)


PUBLISHED = TextDims()


class TextBP(BPForm):
    """The BP form of a text model: ``(B, T)`` tokens, padded on the right, to logits ``(B, classes)``.

    Args:
        vocab_size: How many tokens there are.
        classes: How many classes there are.
        dims: The sizes; there is no label code.
        pad_index: The token that pads.
        pretrained: ``(vocab_size, dims.embedding)`` initial word vectors, trained on.

    Raises:
        ConfigError: Sizes do not fit each other.
    """

    def __init__(
        self,
        vocab_size: int,
        classes: int,
        *,
        dims: TextDims = PUBLISHED,
        pad_index: int = 0,
        pretrained: Vectors | None = None,
    ) -> None:
        head = nn.Sequential(MaskedMean(), nn.Linear(self._width(dims), classes))
        embedding = _embedding(vocab_size, dims, pad_index, pretrained)
        super().__init__(embedding, *self._blocks(dims), head)

    @classmethod
    def network(
        cls,
        vocab_size: int,
        classes: int,
        *,
        dims: TextDims = PUBLISHED,
        pad_index: int = 0,
        pretrained: Vectors | None = None,
    ) -> Network:
        """What every method makes its layers of; the arguments are those of the class."""

        def sides(part: Part) -> tuple[ENC, AE]:
            enc = ENC(part.f, bridge_of(part, dims.ahead, dims.code, style=dims.bridges))
            return enc, recode_side(dims.code, dims.code) if part.number else class_side(classes, dims.code)

        def embedding() -> list[nn.Module]:
            return [_embedding(vocab_size, dims, pad_index, pretrained)]

        units = [Unit(embedding, words(dims.embedding)), *cls._units(dims)]
        sizes = part_sizes(len(units), dims.parts)
        whole = partial(cls, vocab_size, classes, dims=dims, pad_index=pad_index, pretrained=pretrained)
        return Network(
            units,
            sizes,
            lambda features: (MaskedMean(), features[0].shape[-1]),
            sides,
            whole,
            classes,
            same_start=dims.bridges == "lookahead" and dims.ahead.same_start,
        )

    @classmethod
    def _blocks(cls, dims: TextDims) -> Iterator[nn.Module]:
        """Those above the embedding, in order."""
        return (module for unit in cls._units(dims) for module in unit.make())

    @classmethod
    def _units(cls, dims: TextDims) -> Iterator[Unit]:
        """Those above the embedding, in order."""

        def fresh(given: Tree, width: float) -> tuple[nn.Module, Tree]:
            return cls._narrow(dims, given[0].shape[-1], width)

        for number in range(dims.blocks):
            before = cls._width(dims) if number else dims.embedding
            yield Unit(lambda before=before: [cls._block(dims, before)], words(cls._width(dims)), fresh)  # type: ignore[misc]

    @staticmethod
    @abstractmethod
    def _block(dims: TextDims, width: int) -> nn.Module:
        """One of them; ``width`` is that of the features that it gets."""

    @staticmethod
    @abstractmethod
    def _width(dims: TextDims) -> int:
        """Of the features that a block gives."""

    @classmethod
    @abstractmethod
    def _narrow(cls, dims: TextDims, before: int, width: float) -> tuple[nn.Module, Tree]:
        """A block of so many times the width that reads features ``before`` wide, and what it gives."""


class LSTM(TextBP):
    """Bidirectional LSTMs in BP form; the arguments are those of :class:`TextBP`."""

    @staticmethod
    def _block(dims: TextDims, width: int) -> nn.Module:
        return LSTMBlock(width, dims.hidden, dropout=dims.dropout)

    @staticmethod
    def _width(dims: TextDims) -> int:
        return 2 * dims.hidden

    @classmethod
    def _narrow(cls, dims: TextDims, before: int, width: float) -> tuple[nn.Module, Tree]:
        narrow = replace(dims, hidden=max(1, round(dims.hidden * width)))
        return cls._block(narrow, before), words(cls._width(narrow))


class Transformer(TextBP):
    """Transformer encoders in BP form; the arguments are those of :class:`TextBP`."""

    @staticmethod
    def _block(dims: TextDims, width: int) -> nn.Module:
        return TransformerBlock(width, dims.hidden, dims.heads, layers=dims.encoder_layers, dropout=dims.dropout)

    @staticmethod
    def _width(dims: TextDims) -> int:
        return dims.embedding

    @classmethod
    def _narrow(cls, dims: TextDims, before: int, width: float) -> tuple[nn.Module, Tree]:
        head = max(1, round(dims.embedding * width / dims.heads))
        narrow = replace(dims, embedding=dims.heads * head, hidden=max(1, round(dims.hidden * width)))
        block = cls._block(narrow, narrow.embedding)
        fits = [] if before == narrow.embedding else [AtEachPlace(nn.Linear(before, narrow.embedding))]
        return in_a_row([*fits, block]), words(narrow.embedding)


class LSTMAL(ALForm):
    """Bidirectional LSTMs in AL form: packets of ``(B, T)`` tokens, padded on the right, and ``(B,)`` classes."""

    _bp = LSTM


class TransformerAL(ALForm):
    """Transformer encoders in AL form, with the packets of :class:`LSTMAL`."""

    _bp = Transformer


def _embedding(vocab_size: int, dims: TextDims, pad_index: int, pretrained: Vectors | None) -> TokenEmbedding:
    vectors = None if pretrained is None else torch.as_tensor(pretrained)
    return TokenEmbedding(vocab_size, dims.embedding, pad_index=pad_index, dropout=dims.dropout, pretrained=vectors)
