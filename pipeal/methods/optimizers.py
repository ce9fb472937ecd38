"""What every layer that trains itself does with its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import Parameter, signature
from math import inf
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError

OptimizerFactory: TypeAlias = Callable[..., torch.optim.Optimizer]
"""Called as ``factory(parameter_groups, lr=…)``."""

LearningRates: TypeAlias = float | Mapping[str, float]
"""One learning rate for all of a layer, or, of a method with label sides, ``{"enc": …, "ae": …}``."""

adam: OptimizerFactory = partial(torch.optim.Adam, fused=True)
"""The published optimizer, in its fused form: one pass over the parameters of a side."""


_OF_ALL = ("step", "zero_grad", "param_groups", "state", "state_dict", "load_state_dict")
"""What an optimizer has, whose ever it is."""


def open_optimizer(factory: OptimizerFactory | None, module: nn.Module, lr: float) -> torch.optim.Optimizer:
    """An optimizer of a module's parameters (:data:`adam` if None) that remembers its base learning rate.

    Raises:
        ConfigError: ``factory`` makes no optimizer, or one that wants to compute losses by itself; or ``lr`` is no
            number of 0 or more.
    """
    rate = lr.item() if isinstance(lr, Tensor) and not lr.dim() else lr
    if not isinstance(rate, Real) or not 0 <= rate < inf:
        raise ConfigError(f"lr is {lr!r}; expected a number, at least 0")
    if factory is not None and (not callable(factory) or (isinstance(factory, type) and not _makes(factory))):
        found = repr(factory)
        if isinstance(factory, torch.optim.Optimizer):
            found = f"an {type(factory).__name__} that was made already, but every side needs its own"
        raise ConfigError(
            f"optimizer is {found}; expected what makes one, such as torch.optim.SGD or "
            "functools.partial(torch.optim.SGD, momentum=0.9), or None"
        )
    # As a group, because a module without parameters (an identity) is fine but an empty list is refused.
    groups: list[dict[str, Any]] = [{"params": list(module.parameters())}]
    is_complex = any(parameter.is_complex() for parameter in module.parameters())  # which the fused form does not take
    optimizer = (factory or (torch.optim.Adam if is_complex else adam))(groups, lr=float(rate))
    if lacking := [name for name in _OF_ALL if not hasattr(optimizer, name)]:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} has no {', '.join(lacking)}; expected what a torch.optim.Optimizer "
            "has: derive it from that, or hand on what the one within it has"
        )
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} computes losses by itself, several times per batch, and a layer "
            "computes them once; expected another, such as torch.optim.SGD, or None"
        )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def one_rate(lr: LearningRates, label: str) -> float:
    """The learning rate of a method without label sides.

    Raises:
        ConfigError: There is one per side.
    """
    if isinstance(lr, Mapping):
        raise ConfigError(f"the {label} form has no sides: give one learning rate, not one per side")
    return lr


def _makes(kind: type) -> bool:
    """Whether it makes optimizers; those of other libraries look like PyTorch's."""
    return issubclass(kind, torch.optim.Optimizer) or (hasattr(kind, "step") and hasattr(kind, "zero_grad"))


def scale_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Sets every learning rate to ``factor`` times its base value: of an optimizer that :func:`open_optimizer` did not
    make, the one that it has when it is first asked."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * factor


def follow_weights(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Brings optimizer states to the device, type and layout in memory of their parameters.

    ``nn.Module.to`` leaves them behind, and fused optimizers walk through a parameter and its state side by side.
    """
    for optimizer in optimizers:
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())
            for parameter, values in optimizer.state.items():
                for name, value in values.items():
                    if isinstance(value, Tensor) and _is_laid_out_otherwise(value, parameter):
                        values[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _is_laid_out_otherwise(value: Tensor, parameter: Tensor) -> bool:
    if value.shape != parameter.shape or value.layout is not torch.strided or parameter.layout is not torch.strided:
        return False
    return value.stride() != parameter.stride()
