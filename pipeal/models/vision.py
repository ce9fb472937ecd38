"""Image classifiers, each in AL and in BP form, from the same blocks.

::

    ResNet-18  AL   stem + code │ stage 64 + code │ stage 128 + code │ stage 256 + code │ stage 512 + code    5 layers
               BP   stem        │ stage 64        │ stage 128        │ stage 256        │ stage 512   │ head  6 blocks
    VGG        AL   128 256 M + code │ 256 512 M + code │ 512 M + code │ 512 M + code                        4 layers
               BP   128 256 M        │ 256 512 M        │ 512 M        │ 512 M        │ head                 5 blocks

The published widths are the defaults. What is not as published, because it does not learn: the bridges and the label
sides. See :class:`VisionDims`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Literal, TypeAlias

import torch
from torch import nn

from pipeal.core.errors import ConfigError, check_counts, check_named
from pipeal.methods import Network, Part
from pipeal.methods.al import AE, ENC
from pipeal.methods.al.bridges import BRIDGE_STYLES, BridgeStyle, CellMeans, bridge_for
from pipeal.methods.al.codes import LABEL_STYLES, LabelStyle, class_side, recode_side
from pipeal.models.convolution import Activation, ConvBN, ResidualStage, VGGStage
from pipeal.models.forms import ALForm, BPForm

ActivationName: TypeAlias = Literal["relu", "leaky-relu"]

_ACTIVATIONS: dict[str, Activation] = {"relu": nn.ReLU, "leaky-relu": nn.LeakyReLU}
_HEAD = 2500
"""The hidden width of the BP form of VGG, as published."""


@dataclass(frozen=True, slots=True)
class VisionDims:
    """The sizes of a vision model; the widths are the published ones.

    Attributes:
        channels: Channels of the input images.
        size: The side of the input images, in pixels.
        hidden: The hidden width of the bridges.
        code: The width of a label code.
        width: The channels of every convolution, as a multiple of the published ones.
        activation: After every convolution.
        bridges: ``pooled`` or ``flat``, the published one. The flat bridge of an early layer has more weights than
            the rest of the network together (65 million on 64 channels of 32 × 32 pixels), and learns by heart.
        labels: How label sides start, ``inverse`` or ``published``; see :mod:`pipeal.methods.al.codes`.

    Raises:
        ConfigError: A size is too small, or a name unknown.
    """

    channels: int = 3
    size: int = 32
    hidden: int = 1000
    code: int = 700
    width: float = 1.0
    activation: ActivationName = "relu"
    bridges: BridgeStyle = "pooled"
    labels: LabelStyle = "inverse"

    def __post_init__(self) -> None:
        check_counts(channels=self.channels, hidden=self.hidden, code=self.code)
        if self.size < 16 or self.size % 16:
            raise ConfigError(f"size is {self.size}; expected a multiple of 16 pixels: images are halved four times")
        if not 0 < self.width <= 64:
            raise ConfigError(f"width is {self.width}; expected a number above 0 and at most 64")
        check_named("activation", self.activation, _ACTIVATIONS)
        check_named("bridges", self.bridges, BRIDGE_STYLES)
        check_named("labels", self.labels, LABEL_STYLES)

    def widened(self, channels: int) -> int:
        """A published number of channels in these widths; at least 1."""
        return max(1, round(channels * self.width))


PUBLISHED_VISION = VisionDims()


@dataclass(frozen=True, slots=True)
class _Block:
    """A block, its output's channels, and the side of its output."""

    f: nn.Module
    channels: int
    side: int


class VisionBP(BPForm):
    """The BP form of a vision model: ``(B, C, S, S)`` images to logits ``(B, classes)``.

    Args:
        classes: How many classes there are.
        dims: The sizes; there are no bridges and no label codes.
    """

    def __init__(self, classes: int, *, dims: VisionDims = PUBLISHED_VISION) -> None:
        blocks = list(self._blocks(dims))
        super().__init__(*(block.f for block in blocks), self._head(dims, blocks[-1].channels, classes))

    @classmethod
    def network(cls, classes: int, *, dims: VisionDims = PUBLISHED_VISION, one_by_one: bool = False) -> Network:
        """What every method makes its layers of; the arguments are those of the class.

        With ``one_by_one`` each block is drawn as its layer is made. Else all blocks are drawn first, which for a seed
        of the default generator gives the weights that it always gave.
        """

        def parts() -> Iterable[Part]:
            blocks = cls._blocks(dims)
            return starmap(part, enumerate(blocks if one_by_one else list(blocks)))

        def part(number: int, block: _Block) -> Part:
            pool = nn.Sequential(CellMeans(1, 1), nn.Flatten())
            return Part(block.f, block.channels, pool, partial(sides, number, block))

        def sides(number: int, block: _Block) -> tuple[ENC, AE]:
            out = torch.empty(1, block.channels, block.side, block.side, device="meta")
            bridge = bridge_for(out, dims.code, hidden=dims.hidden, style=dims.bridges, labels=dims.labels)
            enc = ENC(block.f, bridge)
            if number == 0:
                return enc, class_side(classes, dims.code, style=dims.labels)
            return enc, recode_side(dims.code, dims.code, style=dims.labels)

        return Network(parts, partial(cls, classes, dims=dims), classes)

    @staticmethod
    @abstractmethod
    def _blocks(dims: VisionDims) -> Iterator[_Block]:
        """Those that learn features, in order, each drawn when it is asked for."""

    @staticmethod
    @abstractmethod
    def _head(dims: VisionDims, channels: int, classes: int) -> nn.Module:
        """From the last block's output, of so many channels, to logits."""


class VGG(VisionBP):
    """VGG in BP form; the arguments are those of :class:`VisionBP`."""

    @staticmethod
    def _blocks(dims: VisionDims) -> Iterator[_Block]:
        before, side = dims.channels, dims.size
        stages: Sequence[Sequence[int]] = ((128, 256), (256, 512), (512,), (512,))
        for stage in stages:
            channels = [dims.widened(count) for count in stage]
            side //= 2
            block = VGGStage(before, channels, _ACTIVATIONS[dims.activation])
            before = channels[-1]
            yield _Block(block, before, side)

    @staticmethod
    def _head(dims: VisionDims, channels: int, classes: int) -> nn.Module:
        flat = channels * (dims.size // 16) ** 2
        return nn.Sequential(nn.Flatten(), nn.Linear(flat, _HEAD), nn.ReLU(), nn.Linear(_HEAD, classes))


class Resnet(VisionBP):
    """ResNet-18 in BP form; the arguments are those of :class:`VisionBP`."""

    @staticmethod
    def _blocks(dims: VisionDims) -> Iterator[_Block]:
        activation, side = _ACTIVATIONS[dims.activation], dims.size
        before = dims.widened(64)
        yield _Block(ConvBN(dims.channels, before, activation), before, side)
        for number, channels in enumerate(map(dims.widened, (64, 128, 256, 512))):
            stride = 2 if number else 1
            side //= stride
            yield _Block(ResidualStage(before, channels, activation, stride=stride), channels, side)
            before = channels

    @staticmethod
    def _head(dims: VisionDims, channels: int, classes: int) -> nn.Module:  # noqa: ARG004  as VGG's
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class VGGAL(ALForm):
    """VGG in AL form: packets of ``(B, C, S, S)`` images and ``(B,)`` classes."""

    _bp = VGG


class ResnetAL(ALForm):
    """ResNet-18 in AL form, with the packets of :class:`VGGAL`."""

    _bp = Resnet
