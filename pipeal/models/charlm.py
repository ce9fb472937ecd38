"""A character-level language model: in AL form, every layer predicts the next character at every place.

The dimensions are those of a well-known lesson (a block of 16, 32 features, 3 heads, 2 blocks). Three slips of the
lesson are not kept: there is a residual path around the first norm, 3 heads lose none of the 32 features (each is 11
wide, see :class:`pipeal.models.causal.CausalAttention`), and what the heads give is joined place by place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, check_counts, check_named
from pipeal.core.tree import Tree
from pipeal.methods.al import AE, ENC
from pipeal.methods.al.place_codes import TokenCrossEntropy, code_width
from pipeal.methods.lookahead import Ahead
from pipeal.methods.network import Network, Part, Unit, in_a_row, part_sizes
from pipeal.models.causal import CausalBlock, CharacterEmbedding, start_small
from pipeal.models.forms import ALForm, Blocks, BPForm
from pipeal.models.nextchar import CODE_STYLES, CodeStyle, encoder_side, label_side

BridgeKind: TypeAlias = Literal["linear", "block", "lookahead"]
BRIDGE_KINDS = ("linear", "block", "lookahead")


@dataclass(frozen=True, slots=True)
class CharDims:
    """The sizes of a character model; the defaults are the lesson's.

    Attributes:
        block: The most characters that it looks back on.
        width: The width of the features.
        heads: Attention heads.
        layers: Blocks.
        dropout: On the embedding, and on what attention and feed-forward add.
        per_layer: Blocks that share a layer with local losses; the last may have fewer. The embedding is in the first.
        parts: Into how many such layers the blocks are divided, as evenly as can be; None for ``per_layer`` of them in
            each.
        code: The width of the label codes; None for four times as many as there are characters, and at most 512 or four
            times ``width``, whichever is more. In codes narrower than the alphabet, not everything can be said of what
            comes next: with 32 features, codes of 32 stood at 2.44 validation loss after 1,000 steps, of 64 at 2.30, of
            256 at 2.26. In training they cost nothing at any place, however wide
            (:class:`pipeal.methods.al.place_codes.WhichCode`). With ``one-hot`` labels it is the number of characters
            (of 5,000 every layer but the first has 25 million weights between codes).
        labels: The style of the label sides; see :mod:`pipeal.models.nextchar`.
        bridges: What the bridges of all layers but the last are made of, before a norm and a linear map: another
            ``block``, so that the features of a layer are asked for what a deeper network can make of them; as many
            blocks as ``ahead`` says (``lookahead``); or nothing (``linear``). In 2,000 steps of 12 x 64 characters one
            block alone is about as good as four, and it brought nothing; after 4,000 it stood at 1.674, plain bridges
            at 1.684, backpropagation at 1.647 (``scripts/bench/charlm.py``).
        ahead: How far bridges look ahead that do.

    Raises:
        ConfigError: A size is below 1, ``dropout`` outside [0, 1), or a style unknown.
    """

    block: int = 16
    width: int = 32
    heads: int = 3
    layers: int = 2
    dropout: float = 0.2
    per_layer: int = 1
    parts: int | None = None
    code: int | None = None
    labels: CodeStyle = "codes"
    bridges: BridgeKind = "linear"
    ahead: Ahead = field(default_factory=Ahead)

    def __post_init__(self) -> None:
        check_counts(block=self.block, width=self.width, heads=self.heads)
        check_counts(layers=self.layers, per_layer=self.per_layer, parts=self.parts, code=self.code)
        if self.parts is not None and self.per_layer != 1:
            raise ConfigError(f"per_layer is {self.per_layer} and parts {self.parts}; expected one of them alone")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; expected 0 <= dropout < 1")
        check_named("style of label codes", self.labels, CODE_STYLES)
        check_named("style of bridge", self.bridges, BRIDGE_KINDS)

    @property
    def part_sizes(self) -> list[int]:
        """How many blocks each layer has."""
        usual = [min(self.per_layer, self.layers - first) for first in range(0, self.layers, self.per_layer)]
        return part_sizes(self.layers, self.parts, usual)


LESSON = CharDims()


class CharLM(BPForm):
    """The BP form: ``(B, T)`` characters to logits ``(B, T, characters)``.

    Args:
        characters: How many there are.
        dims: The sizes; there is no label code.
    """

    def __init__(self, characters: int, *, dims: CharDims = LESSON) -> None:
        head = nn.Sequential(nn.LayerNorm(dims.width), _linear(dims.width, characters))
        super().__init__(_embedding(characters, dims), *(_block(dims) for _ in range(dims.layers)), head)

    @classmethod
    def network(cls, characters: int, *, dims: CharDims = LESSON) -> Network:
        """What every method makes its layers of; the arguments are those of the class."""
        code = dims.code or (characters if dims.labels == "one-hot" else code_width(characters, dims.width))
        same_start = dims.bridges == "lookahead" and dims.ahead.same_start

        def make(number: int) -> list[nn.Module]:
            return [*([] if number else [_embedding(characters, dims)]), _block(dims)]

        def sides(part: Part) -> tuple[ENC, AE]:
            bridge, width = _bridge(dims, part)
            with part.alike():
                answer = _linear(width, code)
            enc = encoder_side(dims.labels, part.f, bridge, answer)
            return enc, label_side(dims.labels, characters, code, onward=part.number > 0, same=same_start)

        def fresh(given: Tree, width: float) -> tuple[nn.Module, Tree]:
            before, after = given.shape[-1], max(1, round(dims.width * width))
            narrow = [] if before == after else [_linear(before, after)]
            return in_a_row([*narrow, _block(replace(dims, width=after))]), _features(after)

        units = [
            Unit(partial(make, number), _features(dims.width), fresh if number else None)
            for number in range(dims.layers)
        ]
        return Network(
            units,
            dims.part_sizes,
            lambda features: (nn.LayerNorm(features.shape[-1]), features.shape[-1]),
            sides,
            partial(cls, characters, dims=dims),
            characters,
            TokenCrossEntropy,
            per_place=True,
            join=lambda modules: Blocks(*modules),
            linear=_linear,
            same_start=same_start,
        )


class CharLMAL(ALForm):
    """The AL form: packets of ``(B, T)`` characters and, as labels, the ``(B, T)`` characters that come next.

    A label below zero is none. :meth:`pipeal.ALPackage.infer` gives logits ``(B, T, characters)``, from any exit.
    """

    _bp = CharLM


def _features(width: int) -> Tensor:
    return torch.empty(1, 1, width, device="meta")


def _embedding(characters: int, dims: CharDims) -> CharacterEmbedding:
    return CharacterEmbedding(characters, dims.width, block=dims.block, dropout=dims.dropout)


def _block(dims: CharDims) -> CausalBlock:
    return CausalBlock(dims.width, dims.heads, dropout=dims.dropout, depth=dims.layers)


def _linear(before: int, after: int) -> nn.Linear:
    linear = nn.Linear(before, after)
    start_small(linear)
    return linear


def _bridge(dims: CharDims, part: Part) -> tuple[list[nn.Module], int]:
    """From features to what answers, and how wide that is. The final one, which the full path of an inference takes, is
    never deep: that path is as deep as the BP form."""
    before: list[nn.Module] = []
    features = part.features
    if dims.bridges != "linear":
        ahead = Ahead(depth=1) if dims.bridges == "block" else dims.ahead
        before, features = ahead.of(part)
    width = features.shape[-1]
    return [*before, nn.LayerNorm(width)], width
