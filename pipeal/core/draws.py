"""Which modules and updates may draw from PyTorch's default generators: :mod:`pipeal.core.rng` keys those."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from pipeal.core.modules import held


def may_draw(module: nn.Module) -> bool:
    """Whether the forward or backward of a module may draw from PyTorch's default generators.

    Modules of ``torch.nn`` are known: those with a dropout above zero draw, the others do not. Pipeal's own draw by
    :func:`~pipeal.core.rng.random_words` alone, unless they say ``draws_from_default = True``, as the layers of methods
    do (their base class sees to it) but for those of pipeal's own. Of other classes only those that say
    ``draws_from_default = False`` are trusted not to; a subclass says it for itself, since it may override the forward.
    Hooks, of gradients too, and functions and other callables in the place of modules are not trusted.
    """
    return any(_itself_may_draw(part) for part in module.modules())


def dropouts(module: nn.Module) -> list[nn.Module]:
    """The modules of ``torch.nn`` in a module that have a dropout, perhaps of zero, which may be raised at any time."""
    return [part for part in module.modules() if _is_known(part) and _chance(part) is not None]


def drops(dropout: nn.Module) -> bool:
    """Whether one of :func:`dropouts` drops at present."""
    return bool(_chance(dropout))


def updates_may_draw(module: nn.Module) -> bool:
    """Whether the update of a layer may draw from PyTorch's default generators, as an optimizer that adds noise does.

    The optimizers of ``torch.optim`` do not, nor do pipeal's or those whose class says ``draws_from_default = False``,
    unless a hook goes with their steps; of layers, only those whose class is trusted are asked for theirs.
    """
    attributes = (value for part in module.modules() for value in vars(part).values())
    parts = (part for value in attributes for _, part in held("", value))
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    return _itself_may_draw(module) or any(map(_step_may_draw, optimizers))


def _step_may_draw(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") and _declared(kind) is not False:
        return True
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _declared(kind: type) -> bool | None:
    """What a class says of itself; None if nothing."""
    default = False if kind.__module__.startswith("pipeal.") else None
    declared: bool | None = vars(kind).get("draws_from_default", default)
    return declared


def _itself_may_draw(module: nn.Module) -> bool:
    if "forward" in vars(module) or _has_hooks(module):
        return True
    # What is called in the place of a block, a criterion or an activation may be code that declares nothing.
    if any(callable(value) and not _is_quiet(value) for value in vars(module).values()):
        return True
    declared = _declared(type(module))
    if declared is not None:
        return bool(declared)
    if not _is_known(module):
        return True
    if isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d | LazyModuleMixin):
        return True
    return drops(module)


def _has_hooks(module: nn.Module) -> bool:
    """Whether code of somebody's own runs within its forward or backward."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    weights = [parameter for parameter in module._parameters.values() if parameter is not None]
    return bool(own) or any(one._backward_hooks or one._post_accumulate_grad_hooks for one in weights)


def _is_quiet(function: Any) -> bool:
    """Whether a callable is known not to draw: a usual activation, a class to make modules of, or an object whose class
    says so."""
    known = any(function is one for one in (F.relu, F.gelu, F.silu, torch.relu, torch.tanh))
    return known or isinstance(function, type) or _declared(type(function)) is False


def _is_known(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _chance(module: nn.Module) -> Any:
    """The dropout of a module of ``torch.nn``, a number of any library; None if it has none."""
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
    chance = module.p if is_dropout else getattr(module, "dropout", None)  # nn.LSTM, nn.MultiheadAttention
    return None if isinstance(chance, nn.Module) else chance  # as nn.TransformerEncoderLayer has it
