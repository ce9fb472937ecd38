"""Steps all optimizers of a layer with one call of PyTorch's fused kernel, where they are its own Adam or AdamW.

A step of ``torch.optim`` costs 45 µs of Python and dispatch before its kernel, for each optimizer; the two sides of an
AL layer paid it twice. Here the tensors of both go into one call. The kernel is the same and works on each tensor by
itself, so that the bits are, too; the optimizers keep their states, groups and learning rates, and may step by
themselves at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

_OF_THE_CALL = ("lr", "eps", "weight_decay", "maximize")
"""Keys of a group that the kernel takes once for all tensors, beside its betas."""

_KINDS = (torch.optim.Adam, torch.optim.AdamW)

_ONE = torch.ones((), device="cpu")
"""For steps on a CPU: a number would be made a tensor again for each of them, which takes four times as long."""


@torch.no_grad()
def step_and_clear(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Steps all optimizers, then clears all gradients: as ``step()`` and ``zero_grad()`` would, bit for bit.

    Those that share a parameter step one after the other: a kernel would write it twice at the same time.
    """
    optimizers = tuple(optimizers)
    learnt = [id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    share = len({*learnt}) < len(learnt)
    rows: dict[tuple[Any, ...], list[list[Tensor]]] = {}
    others = []
    for optimizer in optimizers:
        found = None if share else _rows_of(optimizer)
        if found is None:
            optimizer.step()
            others.append(optimizer)
            continue
        for key, own in found.items():
            row = rows.setdefault(key, [[], [], [], [], []])
            for tensors, more in zip(row, own, strict=True):
                tensors += more
    for (kernel, _, (beta1, beta2, lr, eps, weight_decay, maximize)), row in rows.items():
        parameters, gradients, means, squares, steps = row
        if steps[0].is_cpu:
            torch._foreach_add_(steps, _ONE, alpha=1.0)
        else:
            torch._foreach_add_(steps, 1)
        kernel(
            parameters,
            gradients,
            means,
            squares,
            [],
            steps,
            amsgrad=False,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
            grad_scale=None,
            found_inf=None,
        )
        for parameter in parameters:
            parameter.grad = None
    for optimizer in others:
        optimizer.zero_grad()


def _rows_of(optimizer: torch.optim.Optimizer) -> dict[tuple[Any, ...], list[list[Tensor]]] | None:
    """The tensors of a step, by kernel, type, device and what a call takes once; None where ``step()`` does more."""
    if not _steps_plainly(optimizer):
        return None
    rows: dict[tuple[Any, ...], list[list[Tensor]]] = {}
    states = optimizer.state
    for group in optimizer.param_groups:
        if not group.get("fused") or group["amsgrad"] or group["differentiable"] or type(group["lr"]) is not float:
            return None
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        call = (*group["betas"], *(group[key] for key in _OF_THE_CALL))  # a state that was read from text has lists
        kind = None
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = states.get(parameter)
            if not state or gradient.is_sparse:  # the first step makes the states; a sparse one is refused there
                return None
            own = parameter.dtype, parameter.device
            if own != kind:
                kind = own
                row = rows.setdefault((kernel, kind, call), [[], [], [], [], []])
                parameters, gradients, means, squares, steps = row
            parameters.append(parameter)
            gradients.append(gradient)
            means.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
            steps.append(state["step"])
    return rows


def _steps_plainly(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is nothing but the kernel: no subclass, no hook, no wrapper such as a scheduler's."""
    if type(optimizer) not in _KINDS or "step" in vars(optimizer) or "zero_grad" in vars(optimizer):
        return False
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    return not scaled and not any(hooks)
