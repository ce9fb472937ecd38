"""Greedy layer-wise learning: every layer has a classifier of its own, and learns by its loss alone.

::

        x ──► f ──► x'  (detached, to the next layer)
                └─► head ──► answer ──┐ cross entropy
        y ────────────────────────────┘ (and on to the next layer, as it is)

There is no label side, and nothing to do on the way down: the answer of an exit is that of its head. After Bengio et
al., "Greedy Layer-Wise Training of Deep Networks" (NIPS 2006), and Belilovsky, Eickenberg and Oyallon, "Greedy
Layerwise Learning Can Scale to ImageNet" (ICML 2019) and "Decoupled Greedy Learning of CNNs" (ICML 2020), in which all
layers learn at the same time. Their code (eugenium/DGL) has deeper heads; these are linear, on pooled features.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pipeal.core.protocols import TURN, UP
from pipeal.core.tree import Tree, detach
from pipeal.methods.layer import LocalLayer
from pipeal.methods.network import Network
from pipeal.methods.optimizers import LearningRates, OptimizerFactory, one_rate, open_optimizer


class Greedy(LocalLayer):
    """A block and its classifier.

    Args:
        f: ``x -> x'``, a block of the network; any nesting of tensors.
        head: ``x' -> answer``.
        cri: ``(answer, y) -> scalar``; cross entropy if None.
        lr: The learning rate.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
    """

    def __init__(
        self,
        f: nn.Module,
        head: nn.Module,
        cri: nn.Module | None = None,
        lr: float = 1e-3,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        super().__init__()
        self.f = f
        self.head = head
        self.cri = nn.CrossEntropyLoss() if cri is None else cri
        self.opt = open_optimizer(optimizer, self, lr)

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Keeps the loss of its own answer; returns ``f(x)``, detached, and ``y``."""
        out = self.f(x)
        self.keep(self.cri(self.head(out), y))
        return detach(out), y

    def blocks(self) -> dict[str, nn.Module]:
        """The block and the head, by their parts of the way."""
        return {UP: self.f, TURN: self.head}


def make_layers(network: Network, lr: LearningRates, optimizer: OptimizerFactory | None) -> Iterator[Greedy]:
    """A layer for each part of a network; see :func:`pipeal.methods.make_layers`."""
    rate = one_rate(lr, "greedy")
    for part in network.parts():
        yield Greedy(part.f, part.linear_head(network.outputs), network.criterion(), rate, optimizer)
