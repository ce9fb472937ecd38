"""What is local to a thread and decides what an action computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from pipeal.engine.device import Device, Precision
from pipeal.engine.schedule import Action


def autocast(device: Device, precision: Precision) -> AbstractContextManager[Any]:
    """The precision of forwards, whatever the caller's is.

    Without autocast's cache, which all threads of the process would share.
    """
    return torch.autocast(device.device.type, dtype=torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def settings(action: Action, device: Device, precision: Precision) -> AbstractContextManager[Any]:
    """All of it for an action, set where it is not so already."""
    wanted: list[AbstractContextManager[Any]] = []
    forward = action is Action.FORWARD
    if forward and precision == "bf16":
        wanted.append(autocast(device, precision))
    elif torch.is_autocast_enabled(device.device.type):  # the caller's
        wanted.append(torch.autocast(device.device.type, enabled=False))
    if forward and not torch.is_grad_enabled():
        wanted.append(torch.enable_grad())
    if action is Action.BACKWARD:
        # With autograd's own threads off, the backward of stages that share a GPU runs on their workers instead of on
        # the one thread that autograd has for that GPU, and the key, which is thread-local, holds there too.
        wanted.append(torch.autograd.set_multithreading_enabled(False))
    if len(wanted) == 1:
        return wanted[0]
    stack = ExitStack()
    for setting in wanted:
        stack.enter_context(setting)
    return stack
