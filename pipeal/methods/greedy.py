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

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeal.core.errors import ScheduleError
from pipeal.core.modules import device_of
from pipeal.core.protocols import TURN, UP, Path, check_path, through_blocks
from pipeal.core.tree import Tree, detach
from pipeal.methods.network import Network
from pipeal.methods.optimizers import (
    LearningRates,
    OptimizerFactory,
    follow_weights,
    one_rate,
    open_optimizer,
    scale_rates,
)
from pipeal.methods.scaling import LossScaler, require_own, step_all


class Greedy(nn.Module):
    """A block and its classifier.

    Args:
        f: ``x -> x'``, a block of the network; any nesting of tensors.
        head: ``x' -> answer``.
        cri: ``(answer, y) -> scalar``; cross entropy if None.
        lr: The learning rate.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
    """

    draws_from_default = False

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
        self.scaler: LossScaler | None = None
        self._graph: Tensor | None = None
        self._losses: tuple[Tensor, ...] | None = None

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Keeps the loss of its own answer; returns ``f(x)``, detached, and ``y``."""
        out = self.f(x)
        loss = self.cri(self.head(out), y)
        self._graph = loss if torch.is_grad_enabled() else None
        self._losses = (loss.detach(),)
        return detach(out), y

    def backward(self) -> None:
        """Backward through the head and the block; the gradients stay inside this layer.

        Raises:
            ScheduleError: There is no forward to go back through.
        """
        if self._graph is None:
            raise ScheduleError("backward() without a forward(): call layer(x, y) first, with gradients enabled")
        graph, self._graph = self._graph, None
        torch.autograd.backward([graph] if self.scaler is None else self.scaler.scaled([graph]))

    def update(self) -> None:
        """Steps the optimizer and clears the gradients."""
        step_all((self.opt,), self.scaler)

    def scale_losses(self, wanted: bool = True) -> None:
        """As :meth:`pipeal.AL.scale_losses`."""
        if not wanted:
            self.scaler = None
        elif self.scaler is None:
            require_own(self, Greedy, "backward", "update")
            self.scaler = LossScaler((self.opt,)).to(device_of(self))

    def loss(self) -> tuple[Tensor, ...] | None:
        """The loss of the last forward, detached; None before the first."""
        return self._losses

    @through_blocks
    def inference(self, x: Tree, path: Path) -> Tree:
        """Up through the block, at the turn through the head; on the way down there is nothing to do."""
        check_path(path)
        block = self.blocks().get(path)
        return x if block is None else block(x)

    def blocks(self) -> dict[str, nn.Module]:
        """The block and the head, by their parts of the way."""
        return {UP: self.f, TURN: self.head}

    def scale_lr(self, factor: float) -> None:
        """Sets the learning rate to ``factor`` times its base value."""
        scale_rates((self.opt,), factor)

    def effective_parameters(self, *, last: bool = False) -> int:
        """How many parameters a full inference uses: the block's, and of the ``last`` layer the head's."""
        return _count(self.f) + (_count(self.head) if last else 0)

    def affiliated_parameters(self, *, last: bool = False) -> int:
        """How many parameters serve training alone: the head's of every layer but the ``last``."""
        return 0 if last else _count(self.head)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Greedy:
        """Moves the optimizer's state along with the weights."""
        super()._apply(fn, recurse)
        follow_weights((self.opt,))
        return self


def make_layers(network: Network, lr: LearningRates, optimizer: OptimizerFactory | None) -> list[Greedy]:
    """A layer for each part of a network; see :func:`pipeal.methods.make_layers`."""
    rate = one_rate(lr, "greedy")
    layers = []
    for part in network.parts():
        head = nn.Sequential(part.pool, nn.Linear(part.width, network.outputs))
        layers.append(Greedy(part.f, head, network.criterion(), rate, optimizer))
    return layers


def _count(block: nn.Module) -> int:
    return sum(weights.numel() for weights in block.parameters())
