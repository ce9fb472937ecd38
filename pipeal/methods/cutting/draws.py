"""Which functions, called between the submodules of a network, may draw random numbers.

PyTorch tags its operators that do. A function that is no such operator is not trusted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx
from torch.nn import functional as F

_HARMLESS: list[Callable[..., Any]] = [getattr, torch._assert]

Step = TypeVar("Step", bound=Callable[..., Any])


def draws_nothing(function: Step) -> Step:
    """Says of a function that it draws no random numbers."""
    _HARMLESS.append(function)
    return function


def may_draw_between(node: fx.Node) -> bool:
    """Whether a step between submodules may draw; the submodules are judged by :func:`pipeal.core.rng.may_draw`."""
    target = node.target
    if node.op == "call_method":
        return not _operator_draws_not(str(target))
    if node.op != "call_function" or target in _HARMLESS:
        return False
    name = getattr(target, "__name__", "")
    if target is getattr(operator, name, None) or target is getattr(math, name, None):
        return False
    if target is getattr(torch, name, None) or target is getattr(F, name, None):
        return not _operator_draws_not(name)
    return True


def _operator_draws_not(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name.startswith("fractional"):  # the operator does not, its function in F does
        return False
    return all(torch.Tag.nondeterministic_seeded not in getattr(packet, kind).tags for kind in packet.overloads())
