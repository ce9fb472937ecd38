"""Decoupled greedy learning: every layer has a classifier of several maps, and learns by its loss alone.

::

        x ──► f ──► x'  (detached, to the next layer)
                └─► head ──► answer ──┐ cross entropy
        y ────────────────────────────┘ (and on to the next layer, as it is)

    head of images  (B, C, H, W) ─► means ─► 3 of 1 × 1 convolutions ─► means ─► 3 of linear maps ─► linear ─► answer
                                    H/4 × W/4      C channels           2 × 2        4 C wide

    head of texts   (B, T, D) ─► 3 of linear maps at each place ─► pool ─► 3 of linear maps ─► linear ─► answer
                                              D wide                            D wide
    at each place   (B, …, D) ─► pool ─► 6 of linear maps ─► linear ─► answers
                                              D wide

Each map is followed by a norm and ReLU, except for the one that answers. After Belilovsky, Eickenberg and Oyallon,
"Decoupled Greedy Learning of CNNs" (ICML 2020; eugenium/DGL), in which all layers learn at the same time. The head of
images is theirs, MLP-SR-aux; that of the last part is linear on pooled features, as theirs is of ResNets.

Other than there:

- Of plain convolutions their last part has two linear maps more, on 2 × 2 cells.
- Features of fewer than 5 × 5 pixels are not averaged over 2 × 2 cells, but over the one that is left of them; theirs
  are repeated four times.
- From a batch of one sample a norm takes no statistics where there is one pixel of it alone; it applies those that it
  has gathered. Theirs raise an error.
- The heads of texts, and of answers at each place, are no part of the paper. Their maps see one place each, their norms
  are layer norms: batch statistics would let padding, and what comes later in a text, into an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch import Tensor, nn

from pipeal.methods.greedy import Greedy
from pipeal.methods.network import Network, Part
from pipeal.methods.norm import BatchNorm, normed_maps
from pipeal.methods.optimizers import LearningRates, OptimizerFactory, one_rate
from pipeal.methods.pooling import AtEachPlace, CellMeans

_MAPS = 3
_COARSER = 4
"""How many times fewer pixels a side has before the convolutions."""
_CELLS = 2
"""On a side, before the linear maps."""


def make_layers(network: Network, lr: LearningRates, optimizer: OptimizerFactory | None) -> Iterator[Greedy]:
    """A layer for each part of a network; see :func:`pipeal.methods.make_layers`."""
    rate = one_rate(lr, "DGL")
    for part in network.parts():
        head = _head(network, part) if part.ahead else part.linear_head(network.outputs)
        yield Greedy(part.f, head, network.criterion(), rate, optimizer)


def _head(network: Network, part: Part) -> nn.Module:
    """That of a hidden part."""
    if network.is_image(part.seen):
        channels, *sides = part.seen.shape[1:]
        coarse = [-(-side // _COARSER) for side in sides]
        cells = [min(_CELLS, side) for side in coarse]
        convolutions = [
            step
            for _ in range(_MAPS)
            for step in (nn.Conv2d(channels, channels, 1, bias=False), BatchNorm(channels), nn.ReLU())
        ]
        width = channels * prod(cells)
        pooled = [*part.picks, CellMeans(*coarse), *convolutions, CellMeans(*cells), nn.Flatten()]
        return nn.Sequential(*pooled, *normed_maps(width, width), network.linear(width, network.outputs))
    if network.per_place:  # the pool puts vectors of places last, however they lie in the features
        maps = normed_maps(part.width, part.width, nn.LayerNorm) + normed_maps(part.width, part.width, nn.LayerNorm)
        return nn.Sequential(part.pool, *maps, part.linear(part.width, network.outputs))
    dim = (part.features if isinstance(part.features, Tensor) else part.features[0]).shape[-1]
    each = AtEachPlace(nn.Sequential(*normed_maps(dim, dim, nn.LayerNorm)))
    maps = normed_maps(part.width, part.width, nn.LayerNorm)
    return nn.Sequential(each, part.pool, *maps, part.linear(part.width, network.outputs))
