"""InfoPro: every part is asked for what tells the class, and for what the input image can be rebuilt from.

::

        x ──► f ──► x'  (detached, to the next layer)
                ├─► head ─────► answer ─────┐ cross entropy, lambda_2 of its gradient into f
                └─► decoder ──► pixels ──┐  │
        y = (label, image) ──────────────┴──┘ reconstruction, lambda_1 of its gradient into f

A part by itself keeps no more than what helps its own classifier, and throws away what the parts above would have made
use of; rebuilding the image keeps it. After Wang, Ni, Song, Yang and Huang, "Revisiting Locally Supervised Learning: an
Alternative to End-to-end Training" (ICLR 2021; blackfeather-wang/InfoPro-Pytorch), for images alone. As there: the
decoder resamples the features to the size of the image and has two convolutions; the reconstruction loss is the binary
cross entropy of pixels in [0, 1]; the head has a convolution, to twice the channels and half the size below the
network's widest blocks, and two linear maps; both weights change linearly from the first hidden part to the last; and
the last part learns by cross entropy alone.

The image travels with the label from the first part to the last but one that rebuilds it: that is what the method costs
between devices, at the resolution of the input, since the decoder rebuilds every pixel.

Other than there:

- The paper's softmax variant, not the contrastive one, whose loss is no mean over samples, and whose head gives no
  answer.
- The weights are those of the gradients that reach ``f``; head and decoder learn by their losses as they are. So an
  exit learns where ``lambda_2`` is 0, as in some of the published runs, losses can be compared between parts, and
  optimizers such as Adam, which divide by the size of gradients, take the same steps.
- Pixels are brought into [0, 1] by the mean 0.5 and the deviation 0.25, not by those of the data set, which layers do
  not know; those of CIFAR-10 are 0.45 to 0.49 and 0.24 to 0.26. What lies outside is cut off.
- The default weights are those of the softmax variant in ChenxiangMA/AugLocal, for ResNet-32 in 16 parts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, check_width
from pipeal.core.tree import Tree, describe, shapes_of, tensors
from pipeal.methods.classified import Classified
from pipeal.methods.greedy import Greedy, linear_layer
from pipeal.methods.network import Network, Part
from pipeal.methods.norm import BatchNorm
from pipeal.methods.optimizers import LearningRates, OptimizerFactory, one_rate
from pipeal.methods.pooling import CellMeans

MEAN, STD = 0.5, 0.25
"""Of the pixels in [0, 1] that images are taken to be normalised with."""

_DECODER = 12
"""Channels within a decoder."""
_HEAD = 128
"""The width within a head."""


class InfoPro(Classified):
    """A hidden part, its classifier, and the decoder of its features.

    Args:
        f: ``x -> x'``, a block of the network, to features ``(B, C, H, W)``.
        head: ``x' -> answer``.
        decoder: ``x', image -> loss``.
        cri: ``(answer, labels) -> scalar``; cross entropy if None.
        lr: The learning rate.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
        lambda_1: How much of the gradient of the reconstruction loss reaches ``f``.
        lambda_2: How much of that of the cross entropy does.
        is_first: Whether ``x`` is the image, and ``y`` the labels alone.
        hands_on: Whether the next layer gets the image as well.
    """

    draws_from_default = False
    decoder: nn.Module

    def __init__(
        self,
        f: nn.Module,
        head: nn.Module,
        decoder: nn.Module,
        cri: nn.Module | None = None,
        lr: float = 1e-3,
        optimizer: OptimizerFactory | None = None,
        *,
        lambda_1: float,
        lambda_2: float,
        is_first: bool,
        hands_on: bool,
    ) -> None:
        super().__init__(f, head, cri, lr, optimizer, decoder=decoder)
        self.lambda_1, self.lambda_2 = lambda_1, lambda_2
        self.is_first, self.hands_on = is_first, hands_on

    def forward(self, x: Tensor, y: Tree) -> tuple[Tensor, Tree]:
        """Keeps cross entropy and reconstruction loss; returns ``f(x)``, detached, and what the next layer is to learn.

        Args:
            x: The image ``(B, C, S, S)``, or the features of the part before.
            y: ``(labels, image)``; of the first layer the labels ``(B,)``.
        """
        labels, image = (y, x) if self.is_first else y
        out = self.f(x)
        answer = self.head(_share(out, self.lambda_2))
        self.keep(self.cri(answer, labels), self.decoder(_share(out, self.lambda_1), image))
        return out.detach(), (labels, image.detach()) if self.hands_on else labels

    def blocks(self) -> dict[str, nn.Module]:
        """The block and the head, by their parts of the way, and the decoder, ``d``, which serves training alone."""
        return {**super().blocks(), "d": self.decoder}


class Decoder(nn.Module):
    """Rebuilds images from features, and says how far off it is.

    Args:
        channels: Of the features.
        width: Channels within.
        colours: Of the images.
    """

    def __init__(self, channels: int, width: int, colours: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            BatchNorm(width),
            nn.ReLU(),
            nn.Conv2d(width, colours, 3, padding=1),
        )

    def forward(self, features: Tensor, image: Tensor) -> Tensor:
        """The mean binary cross entropy, in nats, over all values of ``(B, C, S, S)`` images, normalised by
        :data:`MEAN` and :data:`STD`."""
        resampled = F.interpolate(features, size=image.shape[-2:], mode="bilinear", align_corners=True)
        logits = self.convolutions(resampled).float()
        return F.binary_cross_entropy_with_logits(logits, (image.float() * STD + MEAN).clamp(0, 1))


def make_layers(
    network: Network,
    lr: LearningRates,
    optimizer: OptimizerFactory | None,
    *,
    lambda_1: float = 5.0,
    lambda_2: float = 0.05,
    lambda_1_last: float = 0.2,
    lambda_2_last: float = 0.5,
    width: float = 1.0,
) -> Iterator[InfoPro | Greedy]:
    """A layer for each part of a network; see :func:`pipeal.methods.make_layers`.

    Args:
        network: As there.
        lr: As there.
        optimizer: As there.
        lambda_1: The weight of the reconstruction loss in the first part.
        lambda_2: That of the cross entropy there.
        lambda_1_last: The weight of the reconstruction loss in the last part that has one, the last but one.
        lambda_2_last: That of the cross entropy there.
        width: Of heads and decoders, as a multiple of the published one.

    Raises:
        ConfigError: The network has other features than images, or a width is no multiple.
    """
    rate = one_rate(lr, "InfoPro")
    _require_images(network)
    check_width(width)
    for part in network.parts():
        hidden = part.number + len(part.ahead)
        if not part.ahead:
            yield linear_layer(network, part, rate, optimizer)
            continue
        share = part.number / (hidden - 1) if hidden > 1 else 0.0
        yield InfoPro(
            part.f,
            _head(part, network.outputs, width),
            Decoder(part.features.shape[1], _times(_DECODER, width), network.reads.shape[1]),
            network.criterion(),
            rate,
            optimizer,
            lambda_1=lambda_1 * (1 - share) + lambda_1_last * share,
            lambda_2=lambda_2 * (1 - share) + lambda_2_last * share,
            is_first=part.number == 0,
            hands_on=part.number < hidden - 1,
        )


def _share(features: Tensor, weight: float) -> Tensor:
    """The features as they are, which take that many times the gradient."""
    return torch.lerp(features.detach(), features, weight)


def _head(part: Part, outputs: int, width: float) -> nn.Module:
    """Their ``1c2f``."""
    channels = part.features.shape[1]
    widest = max(unit.features.shape[1] for units in part.ahead for unit in units)
    wanted = min(2 * channels, widest)
    out, within = _times(wanted, width), _times(_HEAD, width)
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, stride=2 if wanted > channels else 1, padding=1, bias=False),
        BatchNorm(out),
        nn.ReLU(),
        CellMeans(1, 1),
        nn.Flatten(),
        nn.Linear(out, within),
        nn.ReLU(),
        part.linear(within, outputs),
    )


def _times(size: int, width: float) -> int:
    return max(1, round(size * width))


def _require_images(network: Network) -> None:
    # The last part rebuilds nothing; that of a user's network may end in its own answer.
    hidden = [unit.features for unit in network.units[: -network.sizes[-1]] or network.units]
    for features in (*hidden, network.reads):
        if not network.is_image(features):
            kind, way = "is no model of images alone", "train it by another method, such as dgl"
            if network.per_place:
                kind = "answers at each place"
            elif not isinstance(features, Tensor) and network.is_image(tensors(features)[0]):
                kind = "hands on more than an image where one of its parts ends"
                way = f"cut it where one image crosses, or {way}"
            elif network.is_image(network.units[0].features):
                kind = "has no images where one of its parts ends, as behind a pooling"
                way = f"cut it into fewer parts, or {way}"
            raise ConfigError(
                f"InfoPro rebuilds the input image from features (B, C, H, W), but this network {kind}: "
                f"it has features of {describe(shapes_of(features))}; {way}"
            )
