"""DeInfoReg: vectors are to vary, to be alike as their labels are, and to hold nothing twice.

::

        x ──► f ──► x'  (detached, to the next layer)
                └─► projector ──┬─► directions ──► variance, × 1
        y ──────────────────────┤              ──► similarity of all pairs, against that of the labels, × 1
                                │              ──► covariance, × 1
                                └─► classifier ──► answer ──► cross entropy, × 0.001

Zih-Hao Huang, You-Teng Lin and Hung-Hsuan Chen, "DeInfoReg: A decoupled learning framework with information
regularization for better training throughput" (Neurocomputing, 2025), after VICReg (Bardes, Ponce and LeCun, 2021);
code ianzih/Decoupled-Supervised-Learning-for-Information-Regularization. As there: three linear maps for images, each
2048 wide, with batch norm and ReLU between them and before the classifier; texts without a projector, with tanh before
the classifier; the variance of directions, and its hinge divided by the number of samples; what the classifier's loss
asks of features and projector ("merge").

What is not as there:

* There the projector reads every pixel (``cells`` None). By default it reads the means of 4 × 4 cells, as bridges do
  here: 65,536 numbers to 2048 are 134 million weights for the first stage of ResNet-18, twelve times the network's.
* There the last block learns by these losses too; in lyt0310603/DecoupleFlow it learns by the cross entropy. Here it
  does, as under every method here.
* There an LSTM block is taken by its last states, and an embedding by the mean over padding, too, and without a
  classifier. Here all blocks of texts are taken by the mean over words, and all have one. Of a language model, variance
  and covariance are those of all labelled places, and the places of each text are compared with each other
  (:mod:`pipeal.methods.pairs`, which also says what a split batch changes).
* In a batch of one sample all variances are zero, which gives a loss near 1 and no gradient (there it is not a number),
  and batch norm takes its running statistics. In a batch of a single class all are wanted alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.core.errors import ConfigError, check_counts
from pipeal.core.protocols import TURN, UP
from pipeal.core.tree import Tree, detach
from pipeal.methods.greedy import Greedy, linear_layer
from pipeal.methods.layer import LocalLayer, read_by
from pipeal.methods.network import Network, Part
from pipeal.methods.norm import normed_maps
from pipeal.methods.optimizers import LearningRates, OptimizerFactory, one_rate, open_optimizer
from pipeal.methods.pairs import directions, in_groups, require_classes, similarity_error, to_vectors

_UNDER_ROOT = 1e-7
"""Added to a variance before its root is taken, as in the authors' code."""

Weights: TypeAlias = tuple[float, float, float, float]
"""Of cross entropy, variance, invariance and covariance."""


class DeInfoReg(LocalLayer):
    """A block, its projector, what is asked of projected vectors, and a classifier of them.

    Args:
        f: ``x -> x'``, a block of the network.
        project: ``x' -> (B, D)``, or vectors of places ``(B, T, D)``.
        answer: From these to an answer.
        classes: How many there are.
        cri: ``(answer, y) -> scalar``; cross entropy if None.
        weights: What the four losses count for.
        lr: The learning rate.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
    """

    draws_from_default = False

    def __init__(
        self,
        f: nn.Module,
        project: nn.Module,
        answer: nn.Module,
        classes: int,
        cri: nn.Module | None = None,
        *,
        weights: Weights = (0.001, 1.0, 1.0, 1.0),
        lr: float = 1e-3,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        super().__init__()
        self.f = f
        self.project = project
        self.answer = answer
        self.terms = Terms(classes)
        self.cri = nn.CrossEntropyLoss() if cri is None else cri
        self.weights = weights
        self.opt = open_optimizer(optimizer, self, lr)

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Keeps the losses; returns ``f(x)``, detached, and ``y``."""
        out = self.f(x)
        vectors = read_by(self.project, out, "project")
        answered = self.cri(self.answer(vectors), y)
        self.keep(answered, *self.terms(vectors, y), weights=self.weights)
        return detach(out), y

    def blocks(self) -> dict[str, nn.Module]:
        """The block, and projector and classifier in a row, by their parts of the way."""
        return {UP: self.f, TURN: nn.Sequential(self.project, self.answer)}


class Terms(nn.Module):
    """The variance, invariance and covariance terms of vectors.

    Args:
        classes: How many there are.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, vectors: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(B, D)``, or ``(B, T, D)`` and their labels, to three scalars; computed in float32 under autocast, too."""
        with torch.autocast(vectors.device.type, enabled=False):
            vectors, y = in_groups(vectors, y)
            unit = directions(vectors)
            variance, covariance = spread_terms(unit.flatten(0, 1), y.flatten().ge(0))
            return variance, similarity_error(unit, y, self.classes), covariance


def spread_terms(rows: Tensor, labelled: Tensor) -> tuple[Tensor, Tensor]:
    """What vectors lack in variance, and their covariance.

    With ``c`` for rows without their mean, over ``N`` of them: the mean over dimensions of ``max(0, 1 - std) / N``, and
    the squares of ``cᵀ c / N`` off its diagonal, summed and divided by ``D``.

    Args:
        rows: ``(N, D)`` float32.
        labelled: ``(N)``: which of them count.

    Returns:
        Two scalars. Of a single row the variance is zero.
    """
    weights = labelled.to(rows.dtype).unsqueeze(1)
    count = weights.sum().clamp_min(1)
    centred = (rows - (rows * weights).sum(0) / count) * weights
    squares = centred.square().sum(0)
    std = (squares / (count - 1).clamp_min(1) + _UNDER_ROOT).sqrt()
    # Both products have the same sum of squares; the smaller one takes less.
    product = centred @ centred.t() if len(rows) < rows.shape[1] else centred.t() @ centred
    off_diagonal = product.square().sum() - squares.square().sum()
    return F.relu(1 - std).mean() / count, off_diagonal / count.square() / rows.shape[1]


def make_layers(
    network: Network,
    lr: LearningRates,
    optimizer: OptimizerFactory | None,
    *,
    variance: float = 1.0,
    invariance: float = 1.0,
    covariance: float = 1.0,
    classifier: float = 0.001,
    width: int = 2048,
    cells: int | None = 4,
) -> Iterator[DeInfoReg | Greedy]:
    """A layer for each part of a network; see :func:`pipeal.methods.make_layers`.

    Args:
        network: Images, texts or a language model.
        lr: The learning rate.
        optimizer: As there.
        variance: What the variance term counts for.
        invariance: What that of the similarities counts for.
        covariance: What the covariance term counts for.
        classifier: What the cross entropy counts for.
        width: Of the projector's three maps, for images.
        cells: The most that a side of an image is divided into, whose means are projected; None for every pixel.

    Raises:
        ConfigError: An option is out of its range, there are learning rates for sides, or targets are no classes.
    """
    rate = one_rate(lr, "DeInfoReg")
    require_classes(network, "DeInfoReg")
    check_counts(width=width, cells=cells)
    weights = (classifier, variance, invariance, covariance)
    if min(weights) < 0:
        raise ConfigError(f"weights are {list(weights)}; expected numbers, at least 0")
    for part in network.parts():
        if not part.ahead:
            yield linear_layer(network, part, rate, optimizer)
            continue
        project, answer = _projector(network, part, width, cells)
        cri = network.criterion()
        yield DeInfoReg(part.f, project, answer, network.outputs, cri, weights=weights, lr=rate, optimizer=optimizer)


def _projector(network: Network, part: Part, width: int, cells: int | None) -> tuple[nn.Module, nn.Module]:
    """It, and the classifier after it."""
    before, given = to_vectors(network, part, cells)
    if not network.is_image(part.seen):
        return nn.Sequential(*before), nn.Sequential(nn.Tanh(), network.linear(given, network.outputs))
    *maps, norm, relu = normed_maps(given, width)
    return nn.Sequential(*before, *maps), nn.Sequential(norm, relu, network.linear(width, network.outputs))
