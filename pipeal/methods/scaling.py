"""Losses scaled up for fp16, in which small gradients would be zero: by a factor of the layer's own.

The factor doubles after 2,000 updates in a row whose gradients were finite. An update whose gradients were not is left
out, and halves it. Whether they were, the device alone knows: it decides, and the host does not wait. After
Micikevicius et al., "Mixed Precision Training" (ICLR 2018), with the numbers and operators of PyTorch's ``GradScaler``,
which reads its factor whenever it is saved, and so waits for a GPU. A layer whose gradients are not finite however
small the factor has become gives up: the factor is then not a number, and every update is left out, until someone looks
(:meth:`LossScaler.gave_up`; a state with such a factor is no checkpoint).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError

FIRST = 65536.0
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000
FLOOR = 2.0**-14
"""The smallest factor: losses this small overflow in fp16 only where weights or inputs are out of all bounds."""


class LossScaler(nn.Module):
    """Scales the losses of a layer, and updates with what comes of them; the factor is part of the layer's state.

    Args:
        optimizers: All of the layer's.

    Attributes:
        scale: The factor; not a number once it has given up.
        good: The updates in a row whose gradients were finite.
        left_out: How many were not, and were left out, since losses are scaled.

    Raises:
        ConfigError: One of them cannot leave an update out without asking the host.
    """

    scale: Tensor
    good: Tensor
    left_out: Tensor

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        super().__init__()
        for optimizer in optimizers:
            if not _leaves_out(optimizer):
                raise ConfigError(
                    "fp16 needs an optimizer that can leave an update out on the device; found "
                    f"{type(optimizer).__name__}; use its fused form (fused=True), or precision='bf16'"
                )
        for name, value in self.at_first().items():
            self.register_buffer(name, value)

    def at_first(self) -> dict[str, Tensor]:
        """Its state before the first update."""
        return {
            "scale": torch.full((), FIRST, dtype=torch.float32),
            "good": torch.zeros((), dtype=torch.int32),
            "left_out": torch.zeros((), dtype=torch.float64),
        }

    def scaled(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """The losses times the factor, to go back through."""
        return [loss * self.scale for loss in losses]

    @torch.no_grad()
    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Steps all optimizers with the gradients as they are without the factor; none of them if one is not finite."""
        broken = self.scale.isnan().float()  # once given up, for good
        inverse = self.scale.reciprocal()
        for gradients in _by_kind(optimizers):
            there = broken.to(gradients[0].device)  # of a layer on several devices
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, there, inverse.to(there.device))
            if there is not broken:
                broken = torch.maximum(broken, there.to(broken.device))
        for optimizer in optimizers:
            begun = _without_momentum(optimizer)
            optimizer.found_inf = broken  # type: ignore[attr-defined]  # as GradScaler tells them
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
            for parameter in begun:
                # Made by empty_like: where the kernel left the update out, it holds what the memory held before.
                if (buffer := optimizer.state.get(parameter, {}).get("momentum_buffer")) is not None:
                    buffer.masked_fill_(broken.to(buffer.device).bool(), 0.0)
        torch._amp_update_scale_(self.scale, self.good, broken, GROWTH, BACKOFF, INTERVAL)
        self.scale.masked_fill_(self.scale < FLOOR, torch.nan)
        self.left_out += broken

    def overflows(self) -> int:
        """How many updates were skipped; waits for a GPU."""
        return int(self.left_out)

    def gave_up(self) -> bool:
        """Whether gradients were not finite with the smallest factor either; waits for a GPU."""
        return bool(self.scale.isnan())


def _leaves_out(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it can skip an update on the device. A copy of a fused optimizer can, but no longer says so."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused or getattr(optimizer, "_step_supports_amp_scaling", False)


def _without_momentum(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters for which the next step of an SGD makes a buffer; other fused optimizers begin with zeros."""
    return [
        parameter
        for group in optimizer.param_groups
        if group.get("momentum")
        for parameter in group["params"]
        if parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
    ]


def _by_kind(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[list[Tensor]]:
    """All gradients, by type and device; that of a parameter which several optimizers have is there once."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    gradients = {id(parameter): parameter.grad for group in groups for parameter in group["params"]}
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients.values():
        if gradient is not None:
            values = gradient._values() if gradient.is_sparse else gradient
            found.setdefault((values.dtype, values.device), []).append(values)
    return found.values()
