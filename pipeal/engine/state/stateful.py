"""Where a layer keeps what it learns: its parameters by name, its optimizers, and what else has a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeal.core.errors import ConfigError
from pipeal.core.modules import held
from pipeal.core.tree import describe, shapes_of

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
"""Types of values that a checkpoint keeps as they are."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def stateful(module: nn.Module) -> tuple[dict[str, torch.optim.Optimizer], dict[str, Any]]:
    """The optimizers that modules have as attributes, and what else has a state; by dotted path, each once.

    Raises:
        ConfigError: A layer steps an optimizer that is not among them.
    """
    found: dict[int, tuple[str, Any]] = {}
    for prefix, one in module.named_modules():
        for name, value in vars(one).items():
            if name not in _OF_EVERY_MODULE:
                for path, part in held(f"{prefix}.{name}".lstrip("."), value):
                    if _has_state(part):
                        found.setdefault(id(part), (path, part))
    stepped = _stepped(module)  # asked once: a layer may make them each time, wherever in memory there is room
    if lost := stepped.keys() - found.keys() - _within(keeper for _, keeper in found.values()):
        optimizer = stepped[lost.pop()]
        raise ConfigError(
            f"an optimizer of {type(module).__name__}, {type(optimizer).__name__}, is not kept where it is looked "
            "for, so that its state would be lost; make it an attribute of the layer, or put it into a list, tuple "
            "or dict that is one"
        )
    optimizers = {path: one for path, one in found.values() if isinstance(one, torch.optim.Optimizer)}
    return optimizers, {path: one for path, one in found.values() if path not in optimizers}


def tensors_kept_by(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[Any, Tensor]]:
    """What optimizers keep for each parameter, with what it is."""
    for number, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            if isinstance(state, Mapping):
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        yield (number, id(parameter), name), value


def release(module: nn.Module) -> None:
    """Lets go of all that a layer holds: its tensors go to the meta device, in the layer and in its optimizers."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not (tensor.is_meta or is_lazy(tensor)):
            away: Tensor = torch.empty_like(tensor.detach(), device="meta")
            if isinstance(tensor, nn.Parameter):
                away = nn.Parameter(away, tensor.requires_grad)
            tensor.grad = None
            with suppress(RuntimeError):  # where others have an eye on a tensor, it stays, and so does its memory
                torch.utils.swap_tensors(tensor, away)  # unlike Module.to(), also where an optimizer has it
    for optimizer in stateful(module)[0].values():
        optimizer.state.clear()


def state_of(other: Any) -> Any:
    """The state of what is no optimizer, uncopied."""
    return other.get_state() if isinstance(other, torch.Generator) else other.state_dict()


def named_parameters(module: nn.Module, weights: Mapping[str, Any]) -> list[tuple[str, nn.Parameter]]:
    """The parameters, by the names that ``state_dict()`` has for them: a wrapper may leave its own out."""
    names = {id(value): name for name, value in reversed(list(weights.items()))}
    return [(names.get(id(parameter), name), parameter) for name, parameter in module.named_parameters()]


def trained_by(name: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """For each group, the names of its parameters in the layer.

    Raises:
        ConfigError: It trains what is no parameter of the layer.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"optimizer {name!r} trains {describe(shapes_of(parameter))}, which is no parameter of the layer, "
                    "so that its values would be lost; register it there, as an nn.Parameter"
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _stepped(module: nn.Module) -> dict[int, torch.optim.Optimizer]:
    """What a layer of a method says that it steps, by id; others may use the name for something else."""
    method = getattr(module, "optimizers", None)
    stepped = method() if callable(method) else None
    if not isinstance(stepped, list | tuple):
        return {}
    return {id(one): one for one in stepped if isinstance(one, torch.optim.Optimizer)}


def _within(values: Iterable[Any]) -> set[int]:
    """What objects with a state hold, by id: it is for them to keep it."""
    attributes = (one for value in values for one in getattr(value, "__dict__", {}).values())
    return {id(part) for one in attributes for _, part in held("", one)}


def _has_state(value: Any) -> bool:
    if isinstance(value, (*PLAIN, Tensor, nn.Module, type)):
        return False
    if isinstance(value, torch.Generator):
        return True
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
