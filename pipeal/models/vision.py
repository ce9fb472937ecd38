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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, check_counts, check_named, check_width
from pipeal.core.tree import Tree
from pipeal.methods.al import AE, ENC
from pipeal.methods.al.bridges import BRIDGE_KINDS, BridgeKind, bridge_of, hidden_maps
from pipeal.methods.al.codes import LABEL_STYLES, LabelStyle, class_side, recode_side
from pipeal.methods.al.place_codes import ClassCodes, CodeStart, OnwardCodes, WhichCode
from pipeal.methods.lookahead import Ahead
from pipeal.methods.network import Network, Part, Unit, grouped, in_a_row, part_sizes
from pipeal.methods.pooling import CellMeans
from pipeal.models.convolution import Activation, BasicBlock, ConvBN
from pipeal.models.forms import ALForm, BPForm

ActivationName: TypeAlias = Literal["relu", "leaky-relu"]
ImageLabels: TypeAlias = LabelStyle | Literal["codes", "one-hot"]
CODE_STARTS: Mapping[ImageLabels, CodeStart] = {"codes": "apart", "one-hot": "one-hot"}
"""How codes begin of which an associated loss asks which was meant."""
IMAGE_LABELS = (*LABEL_STYLES, *CODE_STARTS)

_ACTIVATIONS: dict[str, Activation] = {"relu": nn.ReLU, "leaky-relu": nn.LeakyReLU}
_HEAD = 2500
"""The hidden width of the BP form of VGG, as published."""


@dataclass(frozen=True, slots=True)
class VisionDims:
    """The sizes of a vision model; the widths are the published ones.

    Attributes:
        channels: Channels of the input images.
        size: The side of the input images, in pixels.
        hidden: The hidden width of the bridges; without effect where ``labels`` is ``codes`` or ``one-hot`` and
            ``bridges`` is not ``mlp``.
        code: The width of a label code; without effect where ``labels`` is ``one-hot``.
        width: The channels of every convolution, as a multiple of the published ones.
        activation: After every convolution.
        bridges: ``pooled``; ``mlp``, three hidden maps with batch norm, of all layers but the last; ``lookahead``,
            through fresh copies of blocks to come; or ``flat``, the published one.
            The flat bridge of an early layer has more weights than the rest of the network together (65 million on 64
            channels of 32 × 32 pixels), and learns by heart.
        labels: How label sides start, ``inverse`` or ``published``, as :mod:`pipeal.methods.al.codes` has them; or
            ``codes``, of :mod:`pipeal.methods.al.place_codes`: the loss of a part asks which class was meant, and its
            bridge ends in one linear map, where it is ``pooled`` of means over all places, as the head of a ResNet in
            BP form is; or ``one-hot``, the same with codes that begin one-hot and stay so.
        ahead: How far bridges look ahead that do.
        parts: Into how many parts with local losses the convolutions of VGG, or the stem and blocks of ResNet, are
            divided, as evenly as can be; None for the published ones.

    Raises:
        ConfigError: A size is too small, a name unknown, or labels that are codes are to go with flat bridges.
    """

    channels: int = 3
    size: int = 32
    hidden: int = 1000
    code: int = 700
    width: float = 1.0
    activation: ActivationName = "relu"
    bridges: BridgeKind = "pooled"
    labels: ImageLabels = "inverse"
    ahead: Ahead = field(default_factory=Ahead)
    parts: int | None = None

    def __post_init__(self) -> None:
        check_counts(channels=self.channels, hidden=self.hidden, code=self.code, parts=self.parts)
        if self.size < 16 or self.size % 16:
            raise ConfigError(f"size is {self.size}; expected a multiple of 16 pixels: images are halved four times")
        check_width(self.width)
        check_named("activation", self.activation, _ACTIVATIONS)
        check_named("bridges", self.bridges, BRIDGE_KINDS)
        check_named("labels", self.labels, IMAGE_LABELS)
        if self.labels in CODE_STARTS and self.bridges == "flat":
            raise ConfigError(
                f"labels are {self.labels}, which do not go with bridges that are flat; expected bridges pooled, "
                "lookahead or mlp, or labels inverse or published"
            )

    def widened(self, channels: int) -> int:
        """A published number of channels in these widths; at least 1."""
        return max(1, round(channels * self.width))


PUBLISHED_VISION = VisionDims()


class VisionBP(BPForm):
    """The BP form of a vision model: ``(B, C, S, S)`` images to logits ``(B, classes)``.

    Args:
        classes: How many classes there are.
        dims: The sizes; there are no bridges and no label codes.

    Attributes:
        usual: How many units each part has, where ``dims.parts`` does not say; None for one. These are also the blocks
            of the BP form.
    """

    usual: Sequence[int] | None = None

    def __init__(self, classes: int, *, dims: VisionDims = PUBLISHED_VISION) -> None:
        units = self.units(dims)
        groups = grouped(units, part_sizes(len(units), None, self.usual))
        blocks = [in_a_row([module for unit in group for module in unit.make()]) for group in groups]
        super().__init__(*blocks, self._head(dims, _channels(units[-1].features), classes))

    @classmethod
    def network(cls, classes: int, *, dims: VisionDims = PUBLISHED_VISION, one_by_one: bool = False) -> Network:
        """What every method makes its layers of; the arguments are those of the class.

        With ``one_by_one`` each block is drawn as its layer is made. Else all blocks are drawn first, which for a seed
        of the default generator gives the weights that it always gave.
        """

        def sides(part: Part) -> tuple[ENC, AE]:
            if dims.labels in CODE_STARTS:
                return _code_sides(part, classes, dims, same=same_start)
            style: Any = dims.labels  # one of LABEL_STYLES
            bridge = bridge_of(part, dims.ahead, dims.code, style=dims.bridges, hidden=dims.hidden, labels=style)
            if part.number == 0:
                return ENC(part.f, bridge), class_side(classes, dims.code, style=style)
            return ENC(part.f, bridge), recode_side(dims.code, dims.code, style=style)

        same_start = dims.bridges == "lookahead" and dims.ahead.same_start
        units = cls.units(dims)
        sizes = part_sizes(len(units), dims.parts, cls.usual)
        whole = partial(cls, classes, dims=dims)
        reads = _image(dims.channels, dims.size)
        return Network(
            units,
            sizes,
            _means,
            sides,
            whole,
            classes,
            reads=reads,
            drawn_first=not one_by_one,
            same_start=same_start,
        )

    @staticmethod
    @abstractmethod
    def units(dims: VisionDims) -> list[Unit]:
        """What learns features, in order."""

    @staticmethod
    @abstractmethod
    def _head(dims: VisionDims, channels: int, classes: int) -> nn.Module:
        """From the last block's output, of so many channels, to logits."""


class VGG(VisionBP):
    """VGG in BP form; the arguments are those of :class:`VisionBP`."""

    usual = (2, 2, 1, 1)

    @staticmethod
    def units(dims: VisionDims) -> list[Unit]:
        """Its convolutions; most have a maximum over 2 × 2 after them."""
        activation = _ACTIVATIONS[dims.activation]

        def plain(before: int, after: int) -> list[nn.Module]:
            return [ConvBN(before, after, activation)]

        def halving(before: int, after: int) -> list[nn.Module]:
            return [ConvBN(before, after, activation), nn.MaxPool2d(2)]

        row = ((plain, 128), (halving, 256), (plain, 256), (halving, 512), (halving, 512), (halving, 512))
        return image_units(dims, [(build, channels, 1 if build is plain else 2) for build, channels in row])

    @staticmethod
    def _head(dims: VisionDims, channels: int, classes: int) -> nn.Module:
        flat = channels * (dims.size // 16) ** 2
        return nn.Sequential(nn.Flatten(), nn.Linear(flat, _HEAD), nn.ReLU(), nn.Linear(_HEAD, classes))


class Resnet(VisionBP):
    """ResNet-18 in BP form; the arguments are those of :class:`VisionBP`."""

    usual = (1, 2, 2, 2, 2)

    @staticmethod
    def units(dims: VisionDims) -> list[Unit]:
        """The stem and eight basic blocks."""
        activation = _ACTIVATIONS[dims.activation]

        def stem(before: int, after: int) -> list[nn.Module]:
            return [ConvBN(before, after, activation)]

        def block(before: int, after: int, stride: int = 1) -> list[nn.Module]:
            return [BasicBlock(before, after, activation, stride=stride)]

        row: list[tuple[Build, int, int]] = [(stem, 64, 1), (block, 64, 1), (block, 64, 1)]
        for channels in (128, 256, 512):
            row += [(partial(block, stride=2), channels, 2), (block, channels, 1)]
        return image_units(dims, row)

    @staticmethod
    def _head(dims: VisionDims, channels: int, classes: int) -> nn.Module:  # noqa: ARG004  as VGG's
        return nn.Sequential(CellMeans(1, 1), nn.Flatten(), nn.Linear(channels, classes))


Build: TypeAlias = Callable[[int, int], list[nn.Module]]
"""From channels before and after to modules in order."""


def image_units(dims: VisionDims, row: Iterable[tuple[Build, int, int]]) -> list[Unit]:
    """Units of a network on images.

    Args:
        dims: What the first one reads, and how wide all are.
        row: For each, what builds it, its published number of channels, and by how much it shrinks an image's sides.
    """
    units: list[Unit] = []
    features = _image(dims.channels, dims.size)
    for build, published, stride in row:
        channels, side = dims.widened(published), features.shape[-1]

        def fresh(
            given: Tree,
            width: float,
            build: Build = build,
            channels: int = channels,
            side: int = side,
            by: int = stride,
        ) -> tuple[nn.Module, Tree]:
            # Units may lie between that shrink the image: at full size, a block of 512 channels costs 64 times as much.
            pooled = [nn.MaxPool2d(given.shape[-1] // side)] if given.shape[-1] > side else []
            after = max(1, round(channels * width))
            return in_a_row([*pooled, *build(_channels(given), after)]), _image(after, side // by)

        make = partial(build, _channels(features), channels)
        features = _image(channels, side // stride)
        units.append(Unit(make, features, fresh if units else None))
    return units


def _image(channels: int, side: int) -> Tensor:
    return torch.empty(1, channels, side, side, device="meta")


def _channels(features: Tree) -> int:
    return int(features.shape[1])


def _means(features: Tree) -> tuple[nn.Module, int]:
    """Over all places of an image."""
    return nn.Sequential(CellMeans(1, 1), nn.Flatten()), _channels(features)


def _code_sides(part: Part, classes: int, dims: VisionDims, *, same: bool) -> tuple[ENC, AE]:
    """The sides of a part whose loss asks which code was meant."""
    start = CODE_STARTS[dims.labels]
    code = classes if start == "one-hot" else dims.code
    if dims.bridges == "mlp" and part.ahead:
        before, width = hidden_maps(part.features, dims.hidden)
    else:
        copies, features = dims.ahead.of(part) if dims.bridges == "lookahead" else ([], part.features)
        means, width = _means(features)
        before = [*copies, means]
    with part.alike():
        answer = nn.Linear(width, code)
    enc = WhichCode(part.f, nn.Sequential(*before, answer), start=start)
    if part.number:
        return enc, OnwardCodes(code, code, start=start, same=same)
    return enc, ClassCodes(classes, code, start=start)


class VGGAL(ALForm):
    """VGG in AL form: packets of ``(B, C, S, S)`` images and ``(B,)`` classes."""

    _bp = VGG


class ResnetAL(ALForm):
    """ResNet-18 in AL form, with the packets of :class:`VGGAL`."""

    _bp = Resnet
