"""SCPL: vectors of one class are drawn together, those of others pushed apart.

::

        x ──► f ──► x'  (detached, to the next layer)
                ├─► projector ──► directions ──► cosines of all pairs / τ ──┐ supervised contrastive loss
        y ──────┼───────────────────────────────────────────────────────────┘
                └─► detached ──► head ──► answer ──► cross entropy, which trains the head alone

Cheng-Kai Wang, "Decomposing End-to-End Backpropagation Based on SCPL" (master's thesis, National Central University,
2022), and Ming-Yao Ho's of 2023; code minyaho/SCPL. The same loss stands in lyt0310603/DecoupleFlow. As there: the
projector of images, two linear maps with ReLU between them, 512 and 1024 wide; texts without one; τ = 0.1; the sum over
the others of a sample's class is divided by their number *with the sample itself*, which Khosla et al., "Supervised
Contrastive Learning" (NeurIPS 2020), leave out.

What is not as there:

* There the projector reads every pixel (``cells`` None), or, as "avg", means that halve each side. By default it reads
  the means of 4 × 4 cells, as bridges do here: 65,536 numbers to 512 are 34 million weights for the first stage of
  ResNet-18, three times the network's.
* There the last block learns by this loss too, and a predictor from what it hands on; in DecoupleFlow the last block
  learns by the cross entropy. Here it does, as under every method here.
* There hidden blocks have no classifier. Here each has a linear one on detached features, so that it is an exit; the
  features learn nothing from it.
* There an LSTM block is compared by its last states and an embedding by the mean over padding, too. Here all blocks of
  texts are, by the mean over words. The places of a language model are compared within their text
  (:mod:`pipeal.methods.pairs`, which also says what a split batch changes).
* A sample with no other beside it, as in a batch of one, has the loss zero; there it is not a number. So does one with
  no other of its class, as there. In a batch of a single class all are drawn to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, check_counts, check_named
from pipeal.core.tree import Tree, detach
from pipeal.methods.classified import Classified
from pipeal.methods.greedy import Greedy, linear_layer
from pipeal.methods.layer import read_by
from pipeal.methods.network import Network, Part
from pipeal.methods.optimizers import LearningRates, OptimizerFactory, one_rate
from pipeal.methods.pairs import directions, in_groups, require_classes, to_vectors

Projector: TypeAlias = Literal["identity", "linear", "mlp"]
PROJECTORS = ("identity", "linear", "mlp")


class SCPL(Classified):
    """A block, its contrastive loss, and a head that learns to answer from detached features.

    Args:
        f: ``x -> x'``, a block of the network.
        head: ``x' -> answer``.
        contrast: ``(x', y) -> scalar``, such as :class:`Contrast`.
        cri: ``(answer, y) -> scalar``; cross entropy if None.
        lr: The learning rate.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
    """

    draws_from_default = False
    contrast: nn.Module

    def __init__(
        self,
        f: nn.Module,
        head: nn.Module,
        contrast: nn.Module,
        cri: nn.Module | None = None,
        *,
        lr: float = 1e-3,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        super().__init__(f, head, cri, lr, optimizer, contrast=contrast)

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Keeps both losses; returns ``f(x)``, detached, and ``y``."""
        out = self.f(x)
        given = detach(out)
        answered = self.cri(read_by(self.head, given, "head"), y)
        self.keep(answered, self.contrast(out, y))
        return given, y

    def blocks(self) -> dict[str, nn.Module]:
        """The block and the head, by their parts of the way; as ``p``, what training alone needs."""
        return {**super().blocks(), "p": self.contrast}


class Contrast(nn.Module):
    """The supervised contrastive loss of features, after a projector.

    Args:
        project: From features to ``(B, D)``, or to vectors of places ``(B, T, D)``.
        temperature: What cosines are divided by.
    """

    def __init__(self, project: nn.Module, temperature: float = 0.1) -> None:
        super().__init__()
        self.project = project
        self.temperature = temperature

    def forward(self, features: Tree, y: Tensor) -> Tensor:
        """A scalar; computed in float32 under autocast, too."""
        vectors = self.project(features)
        with torch.autocast(vectors.device.type, enabled=False):
            return contrastive(*in_groups(vectors, y), self.temperature)


def contrastive(vectors: Tensor, y: Tensor, temperature: float) -> Tensor:
    """The mean over all samples of ``-Σ_j log(exp(s_ij) / Σ_{k ≠ i} exp(s_ik)) / n_i``: over the others ``j`` of the
    class of ``i``, which are ``n_i`` with ``i`` itself; ``s`` are cosines over the temperature.

    Args:
        vectors: ``(G, N, D)`` float32.
        y: ``(G, N)``.
        temperature: Above 0.

    Returns:
        A scalar; zero where nothing is labelled.
    """
    unit = directions(vectors)
    scores = unit @ unit.transpose(1, 2) / temperature
    labelled = y.ge(0)
    others = labelled.unsqueeze(1) & ~torch.eye(y.shape[1], dtype=torch.bool, device=y.device)
    alike = others & (y.unsqueeze(2) == y.unsqueeze(1))
    # Not -inf: a sample without others would have no gradient that is a number.
    total = scores.masked_fill(~others, torch.finfo(scores.dtype).min).logsumexp(2)
    count = alike.sum(2)
    losses = (count * total - (scores * alike).sum(2)) / (count + 1)
    return (losses * labelled).sum() / labelled.sum().clamp_min(1)


def make_layers(
    network: Network,
    lr: LearningRates,
    optimizer: OptimizerFactory | None,
    *,
    temperature: float = 0.1,
    projector: Projector | None = None,
    hidden: int | None = None,
    width: int | None = None,
    cells: int | None = 4,
) -> Iterator[SCPL | Greedy]:
    """A layer for each part of a network; see :func:`pipeal.methods.make_layers`.

    Args:
        network: Images, texts or a language model.
        lr: The learning rate.
        optimizer: As there.
        temperature: What cosines are divided by.
        projector: What a part's features go through before they are compared: nothing, a linear map or two; None for
            two of images and nothing of texts.
        hidden: Between the two maps; None for 512 of images, and as wide as the features of texts.
        width: After the last; None for 1024 of images, and as wide as the features of texts.
        cells: The most that a side of an image is divided into, whose means are projected; None for every pixel.

    Raises:
        ConfigError: An option is out of its range, there are learning rates for sides, or targets are no classes.
    """
    rate = one_rate(lr, "SCPL")
    require_classes(network, "SCPL")
    check_counts(hidden=hidden, width=width, cells=cells)
    if projector is not None:
        check_named("projector", projector, PROJECTORS)
    if not temperature > 0:
        raise ConfigError(f"temperature is {temperature}; expected a number above 0")
    for part in network.parts():
        if not part.ahead:
            yield linear_layer(network, part, rate, optimizer)
            continue
        head = part.linear_head(network.outputs)
        contrast = Contrast(_projector(network, part, projector, hidden, width, cells), temperature)
        yield SCPL(part.f, head, contrast, network.criterion(), lr=rate, optimizer=optimizer)


def _projector(
    network: Network, part: Part, kind: Projector | None, hidden: int | None, width: int | None, cells: int | None
) -> nn.Module:
    before, given = to_vectors(network, part, cells)
    image = network.is_image(part.seen)
    kind = kind or ("mlp" if image else "identity")
    hidden = hidden or (512 if image else given)
    width = width or (1024 if image else given)
    if kind == "mlp":
        before += [nn.Linear(given, hidden), nn.ReLU(), nn.Linear(hidden, width)]
    elif kind == "linear":
        before.append(nn.Linear(given, width))
    return nn.Sequential(*before)
