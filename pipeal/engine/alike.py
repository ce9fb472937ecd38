"""What a graph of a layer holds, as far as that can change between two batches: the layer's makeup, and its input.

A graph goes on with the memory of the parameters and buffers that it was made with, and with the plain values of its
input. So a batch may be replayed where all of that is as it was, and nothing is taken for equal that may not be.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from enum import Enum
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeal.engine.compiling import numerics, signature
from pipeal.packet import Tree

_PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout, type(None))


class Makeup:
    """What a layer consists of, as of when this was made.

    Args:
        module: The layer.

    Attributes:
        tensors: Its parameters and buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._members = list(_members(self._parts))
        self.tensors: list[Tensor] = [*module.parameters(), *module.buffers()]

    def replaced(self) -> bool:
        """Whether another module, parameter or buffer came in the place of one since: loaded, moved or set."""
        return any(one is not other for one, other in zip_longest(_members(self._parts), self._members))

    def fault(self) -> str | None:
        """Why no batch of it can be captured, in words; None for nothing that can be seen without a batch."""
        for one in self.tensors:
            if one.layout is not torch.strided:
                return f"one of its parameters or buffers is sparse ({one.layout})"
        if any(part._compiled_call_impl is not None or "_orig_mod" in part._modules for part in self._parts):
            return "a module of it was given to torch.compile, whose kernels cannot be seen beforehand"
        return None

    def like(self, inputs: Tree) -> tuple[Hashable, str | None]:
        """What batches have in common that one graph fits; and why none fits any, in words."""
        unknown: list[str] = []

        def plain(value: object) -> Hashable:
            if not isinstance(value, _PLAIN):
                unknown.append(type(value).__name__)
            return type(value), repr(value)  # so that 1, 1.0 and True are three, and nan is like nan

        like = (
            signature(inputs, plain),
            tuple(part.training for part in self._parts),
            tuple((one.requires_grad, 0 if is_lazy(one) else one.data_ptr()) for one in self.tensors),
            numerics(),
        )
        if unknown:
            return None, f"its input holds a {unknown[0]}, which may change from batch to batch unseen"
        return like, None


def _members(parts: Iterable[nn.Module]) -> Iterator[object]:
    for part in parts:
        yield from part._modules.values()
        yield from part._parameters.values()
        yield from part._buffers.values()
