"""The way back of a state into an optimizer, written where what it has kept lies."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


@torch.inference_mode(False)
def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """``load_state_dict``, without what it loses: types other than the parameter's, and the parameter's layout.

    What the optimizer has kept is written in place where it fits, as weights are: it may lie in a file.
    """
    before = {parameter: {**kept} for parameter, kept in optimizer.state.items()}
    given = copy.deepcopy(state)  # or the optimizer would go on in the very tensors of the state
    for group, own in zip(given["param_groups"], optimizer.param_groups, strict=True):
        for option, value in own.items():
            if isinstance(value, Tensor) and isinstance(group.get(option), Tensor):
                group[option] = group[option].to(value.device)
    optimizer.load_state_dict(given)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        if isinstance(index, int) and isinstance(values, dict):
            kept, own = optimizer.state[parameters[index]], before.get(parameters[index], {})
            for name, value in values.items():
                if isinstance(value, Tensor) and isinstance(kept.get(name), Tensor):
                    loaded = laid_out_like(parameters[index], value, kept[name].device)
                    kept[name] = own[name].copy_(loaded) if _is_like(own.get(name), loaded) else loaded


def _is_like(own: Any, loaded: Tensor) -> bool:
    """Whether a tensor can take another's numbers as it is; one that repeats its memory cannot."""
    return (
        type(own) is Tensor
        and own.layout is loaded.layout is torch.strided
        and (own.dtype, own.device, own.shape, own.stride())
        == (loaded.dtype, loaded.device, loaded.shape, loaded.stride())
        and not own.requires_grad
    )


def laid_out_like(parameter: Tensor, value: Tensor, device: torch.device) -> Tensor:
    """A copy. Fused optimizers walk through a parameter and its state side by side in memory."""
    if value.shape != parameter.shape or value.layout is not torch.strided:
        return value.to(device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, device=device, requires_grad=False).copy_(value)
