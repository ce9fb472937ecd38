"""Running a network to see its shapes, without a trace left in it or in the random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeal.core.modules import in_mode


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
