"""A layer with a classifier: what most methods without label sides are made of."""

from __future__ import annotations

from torch import nn

from pipeal.core.protocols import TURN, UP
from pipeal.methods.layer import LocalLayer
from pipeal.methods.optimizers import OptimizerFactory, open_optimizer


class Classified(LocalLayer):
    """A block and its classifier, and what training alone needs beside them; a method adds its ``forward``.

    Args:
        f: ``x -> x'``, a block of the network.
        head: ``x' -> answer``.
        cri: ``(answer, y) -> scalar``; cross entropy if None.
        lr: The learning rate.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
        beside: By their names, modules that learn with them.
    """

    def __init__(
        self,
        f: nn.Module,
        head: nn.Module,
        cri: nn.Module | None = None,
        lr: float = 1e-3,
        optimizer: OptimizerFactory | None = None,
        **beside: nn.Module,
    ) -> None:
        super().__init__()
        self.f = f
        self.head = head
        for name, module in beside.items():
            self.add_module(name, module)
        self.cri = nn.CrossEntropyLoss() if cri is None else cri
        self.opt = open_optimizer(optimizer, self, lr)

    def blocks(self) -> dict[str, nn.Module]:
        """The block and the head, by their parts of the way."""
        return {UP: self.f, TURN: self.head}
