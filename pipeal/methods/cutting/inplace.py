"""Blocks that write into what they receive, and how they are kept from it.

A layer's input is the output of the layer before, which still needs it for its backward; the engine refuses a forward
that writes there. A network cut before ``nn.ReLU(inplace=True)`` has such forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# As in pipeal.core.tree: private by name, but what fx itself stands on.
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

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
        reads = _ReadsLater(writers)
        try:
            with reads if _has_no_numbers(out) else nullcontext():
                again, _, still_writes = _run(module, x, reads.watch)
        finally:
            _set_inplace(writers, True)
        if not still_writes and (not reads.found if _has_no_numbers(out) else _equal(out, again)):
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


class _ReadsLater(TorchDispatchMode):
    """Finds out without numbers whether it would make a difference that writers write: whether what they are given is
    read after the first of them, by anything but them.

    Args:
        writers: They do not write at the time.

    Attributes:
        found: Whether it is.
    """

    def __init__(self, writers: list[nn.Module]) -> None:
        super().__init__()
        self.found = False
        self._writers = writers
        self._storages: set[int] = set()
        self._at_work = self._wrote = False

    def watch(self, x: Tree) -> list[RemovableHandle]:
        """Watches this input; gives the hooks to remove."""
        self._storages = set(map(_memory, tensors(x)))

        def begin(*_: object) -> None:
            self._at_work = True

        def end(*_: object) -> None:
            self._at_work, self._wrote = False, True

        begins = [part.register_forward_pre_hook(begin) for part in self._writers]
        return begins + [part.register_forward_hook(end) for part in self._writers]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Looks at what an operator is given."""
        kwargs = dict(kwargs or {})
        if self._wrote and not self._at_work:
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.found = self.found or any(_memory(one) in self._storages for one in given)
        return func(*args, **kwargs)


def _run(
    module: nn.Module, x: Tree, watch: Callable[[Tree], list[RemovableHandle]] = lambda _: []
) -> tuple[Tree, list[nn.Module], bool]:
    """The result on a copy of ``x``, the submodules in place on it, and whether it was written to."""
    mine = map_tensors(Tensor.clone, x)
    before = [tensor._version for tensor in tensors(mine)]
    storages = set(map(_memory, tensors(mine)))
    writers: list[nn.Module] = []

    def see(part: nn.Module, inputs: tuple[object, ...]) -> None:
        received = [value for value in inputs if isinstance(value, Tensor)]
        # A dropout in place writes in training only, which this is not; so the flag counts, not the deed.
        if any(_memory(value) in storages for value in received) and part not in writers:
            writers.append(part)

    hooks = [
        part.register_forward_pre_hook(see) for part in module.modules() if getattr(part, "inplace", False) is True
    ]
    hooks += watch(mine)
    try:
        out = module(mine)
    finally:
        for hook in hooks:
            hook.remove()
    return out, writers, [tensor._version for tensor in tensors(mine)] != before


def _set_inplace(writers: list[nn.Module], inplace: bool) -> None:
    for part in writers:
        part.inplace = inplace  # type: ignore[assignment]


def _memory(tensor: Tensor) -> int:
    """What tensors over the same memory have in common; on the meta device, all have the same address."""
    return tensor.untyped_storage()._cdata


def _has_no_numbers(out: Tree) -> bool:
    return any(tensor.is_meta for tensor in tensors(out))


def _equal(one: Tree, other: Tree) -> bool:
    return all(map(torch.equal, tensors(one), tensors(other)))
