"""Whether what a layer has learnt is finite: only then is it worth keeping, and going back to."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pipeal.engine.state.layer_state import State

_STATISTICS = ("running_mean", "running_var")
"""What normalization keeps of its inputs: learnt, though nothing trains it, and once infinite for ever."""


def not_finite_in(state: State) -> str | None:
    """The name of something in a layer's state that is not finite; None where there is nothing.

    Trained weights, their gradients, what an optimizer keeps for each of their numbers and running statistics must be
    finite. What else there is may be infinite, as masks of attention are, but not NaN. Reads every tensor once; they
    are on the CPU.
    """
    for name, value, may_be_infinite in _learnt(state):
        if not _is_sound(value, may_be_infinite):
            return name
    return None


def _learnt(state: State) -> Iterator[tuple[str, Tensor, bool]]:
    """Every tensor with its name, and whether it may be infinite."""
    weights = state["module"]
    trained = {
        name for optimizer in state["optimizers"].values() for group in optimizer["parameters"] for name in group
    }
    for name, value in weights.items():
        if isinstance(value, Tensor):
            yield name, value, name not in trained and name.rpartition(".")[2] not in _STATISTICS
    for name, value in state["gradients"].items():
        yield f"the gradient of {name}", value, False
    for title, optimizer in state["optimizers"].items():
        names = [name for group in optimizer["parameters"] for name in group]
        for index, values in optimizer["state"]["state"].items():
            if isinstance(index, int) and isinstance(values, dict):
                weight = weights[names[index]]
                for key, value in values.items():
                    if isinstance(value, Tensor):
                        yield f"{key} of {names[index]} in {title}", value, value.shape != weight.shape


def _is_sound(value: Tensor, may_be_infinite: bool) -> bool:
    if value.is_complex():
        value = torch.view_as_real(value)
    if not value.is_floating_point() or not value.numel() or value.layout is not torch.strided:
        return True
    if value.element_size() == 1:  # of few operators for such types, none looks for the largest
        value = value.float()
    # One pass without a copy, unlike isfinite(); a NaN comes out at both ends.
    ends = torch.stack(torch.aminmax(value))
    return not bool((ends.isnan() if may_be_infinite else ~ends.isfinite()).any())
