"""Running a network to see its shapes, without a trace left in it or in the random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# As in pipeal.core.tree: private by name, but what fx itself stands on.
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipeal.core.materialize import is_on_meta
from pipeal.core.modules import device_of, in_mode
from pipeal.core.tree import Tree, move

_META = torch.device("meta")
_EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_strided)
"""What makes tensors without numbers, such as the parameters of new modules."""


class ShapesAlone(TorchDispatchMode):
    """Within it, what meets a tensor on the meta device is taken for its shape; what meets none keeps its numbers.

    So a network whose weights are on the meta device can be given a real sample, and what it computes of that alone,
    such as a mask, can be looked at, also where it is to go to the device of the weights.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operator."""
        given: dict[str, Any] = dict(kwargs or {})
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in pytree.tree_leaves((args, given))):
            args, given = pytree.tree_map_only(Tensor, _shape_alone, (args, given))
            if given.get("device") is not None:
                given["device"] = _META
        elif given.get("device") == _META and func.overloadpacket not in _EMPTY:
            given["device"] = torch.device("cpu")
        return func(*args, **given)


def _shape_alone(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def brought(x: Tree, module: nn.Module) -> Tree:
    """An input for a module, on its device; for one on the meta device, as it is."""
    return x if is_on_meta(module) else move(x, device_of(module))


@contextmanager
def probing(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, no graph; afterwards, also of a block that raised, modes, buffers and the default generators
    are as they were. What is lazy keeps the sizes that it found."""
    buffers = [
        (part, name, buffer, buffer._version, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    devices = sorted({tensor.device.index for tensor in module.parameters() if tensor.device.type == "cuda"})
    with in_mode([module], False), torch.random.fork_rng(devices), torch.no_grad():
        try:
            yield
        finally:
            for part, name, buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)
                part._buffers[name] = buffer  # a forward may have put another in its place
