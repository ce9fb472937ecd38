"""The two forms that a model has as a class: its BP form, and the AL form of the same network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from pipeal.core.modules import device_of
from pipeal.core.tree import Tree, move
from pipeal.methods import Network
from pipeal.methods.al import ALPackage, LearningRates, OptimizerFactory, make_layers


class Blocks(nn.Sequential):
    """Blocks in order, each on its own device.

    :func:`pipeal.methods.al.set_device` places them; the forward moves activations between them.
    """

    calls_in_order = True  # and does nothing else: see :meth:`pipeal.methods.al.BP.block_count`

    def forward(self, x: Tree) -> Tree:
        """Takes ``x`` through all blocks."""
        for block in self:
            x = block(move(x, device_of(block)))
        return x


class BPForm(Blocks, ABC):
    """The BP form of a model."""

    @classmethod
    @abstractmethod
    def network(cls, *sizes: Any, **options: Any) -> Network:
        """What every method makes its layers of; the arguments are those of the class. A model has its own."""


class ALForm(ALPackage):
    """The AL form of a model.

    Args:
        sizes: As the BP form takes them.
        lr: One learning rate, or ``{"enc": …, "ae": …}``.
        optimizer: Called for each side of each layer as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
        options: As the BP form takes them.
    """

    _bp: type[BPForm]

    def __init__(
        self, *sizes: Any, lr: LearningRates = 1e-3, optimizer: OptimizerFactory | None = None, **options: Any
    ) -> None:
        super().__init__(make_layers(self._bp.network(*sizes, **options), lr, optimizer))
