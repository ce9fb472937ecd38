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

from pipeal.core.tree import Tree, detach
from pipeal.methods.classified import Classified
from pipeal.methods.layer import read_by
from pipeal.methods.network import Network, Part
from pipeal.methods.optimizers import LearningRates, OptimizerFactory, one_rate


class Greedy(Classified):
    """A block and its classifier, as :class:`pipeal.methods.classified.Classified` has them; the block may give any
    nesting of tensors."""

    draws_from_default = False

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Keeps the loss of its own answer; returns ``f(x)``, detached, and ``y``."""
        out = self.f(x)
        self.keep(self.cri(read_by(self.head, out, "head"), y))
        return detach(out), y


def make_layers(network: Network, lr: LearningRates, optimizer: OptimizerFactory | None) -> Iterator[Greedy]:
    """A layer for each part of a network; see :func:`pipeal.methods.make_layers`."""
    rate = one_rate(lr, "greedy")
    for part in network.parts():
        yield linear_layer(network, part, rate, optimizer)


def linear_layer(network: Network, part: Part, lr: float, optimizer: OptimizerFactory | None) -> Greedy:
    """A part with a linear classifier: what every part has here, and the last one under other methods."""
    return Greedy(part.f, part.linear_head(network.outputs), network.criterion(), lr, optimizer)
