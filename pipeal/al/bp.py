"""Backpropagation as a layer: a whole network with one end-to-end loss, so that baselines share the engine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeal.al.optimizers import OptimizerFactory, follow_weights, open_optimizer, scale_rates
from pipeal.al.scaling import LossScaler, require_own, step_all
from pipeal.errors import ConfigError, ScheduleError
from pipeal.packet import Path, Tree, detach, device_of


class BP(nn.Module):
    """A network trained by ordinary backpropagation, in the shape of one layer of a pipeline.

    Args:
        model: ``x -> prediction``.
        cri: ``(prediction, y) -> scalar``; cross entropy if None.
        lr: The learning rate.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
    """

    draws_from_default = False

    def __init__(
        self,
        model: nn.Module,
        cri: nn.Module | None = None,
        lr: float = 1e-3,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.cri = nn.CrossEntropyLoss() if cri is None else cri
        self.opt = open_optimizer(optimizer, model, lr)
        self.scaler: LossScaler | None = None
        self._graph: Tensor | None = None
        self._losses: tuple[Tensor, ...] | None = None

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Keeps the end-to-end loss; returns the prediction, detached, and ``y``."""
        prediction = self.model(x)
        loss = self.cri(prediction, y)
        self._graph = loss if torch.is_grad_enabled() else None
        self._losses = (loss.detach(),)
        return detach(prediction), y

    def backward(self) -> None:
        """Backward through the whole network.

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
            require_own(self, BP, "backward", "update")
            self.scaler = LossScaler((self.opt,)).to(device_of(self))

    def loss(self) -> tuple[Tensor, ...] | None:
        """The loss of the last forward, detached; None before the first."""
        return self._losses

    def inference(self, x: Tree, path: Path) -> Tree:
        """``f`` is the network; ``b`` and ``h`` have nothing left to do."""
        if path not in ("f", "b", "h"):
            raise ConfigError(f"unknown inference path {path!r}; expected 'f', 'b' or 'h'")
        return self.model(x) if path == "f" else x

    def blocks(self) -> dict[str, nn.Module]:
        """The network, as ``f``."""
        return {"f": self.model}

    def scale_lr(self, factor: float) -> None:
        """Sets the learning rate to ``factor`` times its base value."""
        scale_rates((self.opt,), factor)

    def effective_parameters(self, *, last: bool = False) -> int:  # noqa: ARG002
        """All parameters take part in an inference."""
        return sum(p.numel() for p in self.model.parameters())

    def affiliated_parameters(self, *, last: bool = False) -> int:  # noqa: ARG002
        """None serves training alone."""
        return 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BP:
        """Moves the optimizer's state along with the weights."""
        super()._apply(fn, recurse)
        follow_weights((self.opt,))
        return self
