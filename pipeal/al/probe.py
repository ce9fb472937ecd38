"""Running a network to see its shapes, without a trace left in it or in the random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode, and afterwards each part in the mode it had: a user may have frozen some."""
    before = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in before:
            part.training = training
        yield
    finally:
        for part, mode in before:
            part.training = mode


@contextmanager
def probing(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, no graph, and afterwards modes, buffers and the default generators as they were."""
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]
    devices = sorted({tensor.device.index for tensor in module.parameters() if tensor.device.type == "cuda"})
    with in_mode(module, False), torch.random.fork_rng(devices), torch.no_grad():
        yield
        for buffer, version, value in buffers:
            if buffer._version != version:
                buffer.copy_(value)


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
