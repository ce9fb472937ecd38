"""Blocks that write into what they receive, and how they are kept from it.

A layer's input is the output of the layer before, which still needs it for its backward; the engine refuses a forward
that writes there. A network cut before ``nn.ReLU(inplace=True)`` has such forwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeal.core.tree import Tree, map_tensors, tensors
from pipeal.methods.cutting.probe import probing


@dataclass(frozen=True, slots=True)
class Harmless:
    """A block that leaves its input alone, once ``writers`` do.

    Attributes:
        module: The block, or what gives it a copy of its own.
        writers: Its submodules whose ``inplace`` has to be switched off.
        out: What it gives for the sample.
    """

    module: nn.Module
    writers: list[nn.Module]
    out: Tree


def leave_input_alone(module: nn.Module, x: Tree) -> Harmless:
    """Tries a block on a copy of ``x``, and finds out how it keeps from writing into its input.

    Submodules that would work in place on it are to work out of place. Where that is not enough (a function in place),
    or changes the result (because what was written is read again), the block gets a copy of its input each time.
    """
    with probing(module):
        out, writers, wrote = _run(module, x)
        if not writers and not wrote:
            return Harmless(module, [], out)
        _set_inplace(writers, False)
        try:
            again, _, still_writes = _run(module, x)
        finally:
            _set_inplace(writers, True)
        if not still_writes and _equal(out, again):
            return Harmless(module, writers, out)
    return Harmless(OnACopy(module), [], out)


class OnACopy(nn.Module):
    """Gives a block a copy of the input, for it to write into.

    Args:
        module: The block.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tree) -> Tree:
        """As the block."""
        return self.module(map_tensors(Tensor.clone, x))


def _run(module: nn.Module, x: Tree) -> tuple[Tree, list[nn.Module], bool]:
    """The result on a copy of ``x``, the submodules in place on it, and whether it was written to."""
    mine = map_tensors(Tensor.clone, x)
    before = [tensor._version for tensor in tensors(mine)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors(mine)}
    writers: list[nn.Module] = []

    def see(part: nn.Module, inputs: tuple[object, ...]) -> None:
        received = [value for value in inputs if isinstance(value, Tensor)]
        # A dropout in place writes in training only, which this is not; so the flag counts, not the deed.
        if any(value.untyped_storage().data_ptr() in storages for value in received) and part not in writers:
            writers.append(part)

    hooks = [
        part.register_forward_pre_hook(see) for part in module.modules() if getattr(part, "inplace", False) is True
    ]
    try:
        out = module(mine)
    finally:
        for hook in hooks:
            hook.remove()
    return out, writers, [tensor._version for tensor in tensors(mine)] != before


def _set_inplace(writers: list[nn.Module], inplace: bool) -> None:
    for part in writers:
        part.inplace = inplace  # type: ignore[assignment]


def _equal(one: Tree, other: Tree) -> bool:
    return all(map(torch.equal, tensors(one), tensors(other)))
