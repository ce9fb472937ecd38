"""PredSim: features of one class are to be alike, those of two not, and a local classifier is to tell the classes.

::

        x ──► f ──► x'  (detached, to the next layer)
                ├─► 3 × 3 convolution ──► spread of each channel ──► similarity of all pairs ──┐ squared error, × β
        y ──────┼─► similarity of the labels ──────────────────────────────────────────────────┘
                └─► means over cells ──► linear ──► answer ──► cross entropy, × (1 − β)

Arild Nøkland and Lars Hiller Eidnes, "Training Neural Networks with Local Error Signals" (ICML 2019), code
anokland/local-loss. As there: the convolution without a bias; the standard deviation over places; the similarity, of
centred vectors; means over the fewest cells that leave at most ``decoder`` numbers to the classifier, whose weights
start at zero; β = 0.99.

What is not as there:

* There each convolution has such losses. Here each part has, however many convolutions it holds.
* There the last block learns by these losses too, and a classifier after it from what it hands on. Here the last part
  learns by the cross entropy of its answer alone, as under every method here.
* Texts are not in the paper. Their mean vectors go the way of its fully connected layers: a linear map without a bias
  in the place of the convolution, and no spread. So does each place of a language model, compared within its text
  (:mod:`pipeal.methods.pairs`, which also says what a split batch changes).
* Sides of images that the cells do not divide are cut as ``nn.AdaptiveAvgPool2d`` does it, not padded with zeros.
* Features without a direction are alike to nothing and get no gradient from it; there it is not finite.

In a batch of one sample the similarity is 1, as wanted, and the loss zero. In one of a single class all are wanted
alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, check_counts
from pipeal.core.tree import Tree, detach
from pipeal.methods.classified import Classified
from pipeal.methods.greedy import Greedy, linear_layer
from pipeal.methods.layer import read_by
from pipeal.methods.network import Network, Part
from pipeal.methods.optimizers import LearningRates, OptimizerFactory, one_rate
from pipeal.methods.pairs import in_groups, require_classes, similarity_error
from pipeal.methods.pooling import CellMeans


class PredSim(Classified):
    """A block, its classifier, and what compares its features.

    Args:
        f: ``x -> x'``, a block of the network.
        head: ``x' -> answer``.
        similar: ``(x', y) -> scalar``, such as :class:`Similarity`.
        cri: ``(answer, y) -> scalar``; cross entropy if None.
        beta: What ``similar`` counts for; the answer's loss counts for the rest of 1.
        lr: The learning rate.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
    """

    draws_from_default = False
    similar: nn.Module

    def __init__(
        self,
        f: nn.Module,
        head: nn.Module,
        similar: nn.Module,
        cri: nn.Module | None = None,
        *,
        beta: float = 0.99,
        lr: float = 1e-3,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        super().__init__(f, head, cri, lr, optimizer, similar=similar)
        self.beta = beta

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Keeps both losses; returns ``f(x)``, detached, and ``y``."""
        out = self.f(x)
        answered = self.cri(read_by(self.head, out, "head"), y)
        self.keep(answered, self.similar(out, y), weights=(1 - self.beta, self.beta))
        return detach(out), y

    def blocks(self) -> dict[str, nn.Module]:
        """The block and the head, by their parts of the way; as ``p``, what training alone needs."""
        return {**super().blocks(), "p": self.similar}


class Similarity(nn.Module):
    """The similarity matching loss of features, after a map of its own.

    Args:
        map: From features to ``(B, D)``, or to vectors of places ``(B, T, D)``.
        classes: How many there are.
    """

    def __init__(self, map: nn.Module, classes: int) -> None:
        super().__init__()
        self.map = map
        self.classes = classes

    def forward(self, features: Tree, y: Tensor) -> Tensor:
        """A scalar; computed in float32 under autocast, too."""
        vectors = self.map(features)
        with torch.autocast(vectors.device.type, enabled=False):
            return similarity_error(*in_groups(vectors, y), self.classes)


class Spread(nn.Module):
    """The standard deviation of each channel over the places of an image: ``(B, C, H, W)`` to ``(B, C)`` float32.

    Images one pixel high, or of at most three channels, are taken whole, as in the authors' code.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Of two places or more."""
        return x.flatten(2).float().std(2) if x.shape[1] > 3 and x.shape[2] > 1 else x.flatten(1)


class FromZero(nn.Linear):
    """A linear map whose weights start at zero."""

    def reset_parameters(self) -> None:
        """Draws the bias alone."""
        super().reset_parameters()
        nn.init.zeros_(self.weight)


def make_layers(
    network: Network,
    lr: LearningRates,
    optimizer: OptimizerFactory | None,
    *,
    beta: float = 0.99,
    std: bool = True,
    decoder: int = 4096,
) -> Iterator[PredSim | Greedy]:
    """A layer for each part of a network; see :func:`pipeal.methods.make_layers`.

    Args:
        network: Images, texts or a language model.
        lr: The learning rate.
        optimizer: As there.
        beta: What the similarity loss counts for, in [0, 1); the cross entropy counts for the rest.
        std: Whether images are compared by the spread of each channel; else by all their numbers.
        decoder: The most numbers that a classifier reads of an image.

    Raises:
        ConfigError: An option is out of its range, there are learning rates for sides, or targets are no classes.
    """
    rate = one_rate(lr, "PredSim")
    require_classes(network, "PredSim")
    check_counts(decoder=decoder)
    if not 0 <= beta < 1:
        raise ConfigError(f"beta is {beta}; expected 0 <= beta < 1")
    for part in network.parts():
        if not part.ahead:
            yield linear_layer(network, part, rate, optimizer)
            continue
        classifier = _classifier(network, part, decoder)
        similar = Similarity(_map(network, part, std), network.outputs)
        yield PredSim(part.f, classifier, similar, network.criterion(), beta=beta, lr=rate, optimizer=optimizer)


def _classifier(network: Network, part: Part, decoder: int) -> nn.Module:
    if not network.is_image(part.seen):
        return nn.Sequential(part.pool, FromZero(part.width, network.outputs))
    channels, height, width = part.seen.shape[1:]
    rows, columns = cells(channels, height, width, decoder)
    means = [*part.picks, CellMeans(rows, columns), nn.Flatten()]
    return nn.Sequential(*means, FromZero(channels * rows * columns, network.outputs))


def _map(network: Network, part: Part, std: bool) -> nn.Module:
    if not network.is_image(part.seen):
        pool, width = network.pool(part.features)
        return nn.Sequential(pool, nn.Linear(width, width, bias=False))
    channels = part.seen.shape[1]
    convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    return nn.Sequential(*part.picks, convolution, Spread() if std else nn.Flatten())


def cells(channels: int, height: int, width: int, most: int) -> tuple[int, int]:
    """Into how many rows and columns an image is divided: the sides of a cell double in turn, the upright one first,
    until the means of all cells are no more than ``most`` numbers.

    >>> cells(128, 32, 32, 4096), cells(512, 4, 4, 4096), cells(512, 2, 2, 4096), cells(64, 1, 4096, 4096)
    ((4, 8), (2, 4), (2, 2), (1, 64))
    """
    rows, columns, tall, wide = height, width, 1, 1
    while channels * rows * columns > most and rows * columns > 1:
        tall *= 2
        rows = -(-height // tall)
        if channels * rows * columns > most:
            wide *= 2
            columns = -(-width // wide)
    return rows, columns
