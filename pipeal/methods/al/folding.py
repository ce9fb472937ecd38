"""The end of an answer's way with neighbouring linear maps as one: what layers need apart to learn, an answer does not.

::

    … ──► linear D -> K ──► h4 K -> K ──► h3 K -> K ──► h2 K -> K ──► h1 K -> V        as it is trained
    … ──► linear D -> V                                                                the same, but for rounding

Maps stay apart where they are smaller so, as those of narrow codes are, and where something lies between them or looks
at what one gives. No class here draws random numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

Map: TypeAlias = tuple[Tensor, Tensor | None]
"""A weight ``(out, in)`` and a bias ``(out,)``."""


class LinearMap(nn.Module, ABC):
    """A module that may be a linear map of the last dimension."""

    @abstractmethod
    def as_linear(self) -> Map | None:
        """Its weight and bias; None where it is none as it stands."""


def folded(modules: Iterable[nn.Module]) -> list[nn.Module] | None:
    """Fewer modules in a row that give what these give, but for rounding; None where no two of them are one."""
    apart = list(_flat(modules))
    found: list[nn.Module] = []
    for module in reversed(apart):
        one = _joined(module, found[-1]) if found else None
        if one is None:
            found.append(module)
        else:
            found[-1] = one
    return found[::-1] if len(found) < len(apart) else None


def _flat(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if type(module) is nn.Sequential and not _has_hooks(module):
            yield from _flat(module)
        elif type(module) is not nn.Identity or _has_hooks(module):
            yield module


def _joined(before: nn.Module, after: nn.Module) -> nn.Linear | None:
    """One map in the place of two; None where these are none, or smaller."""
    first, second = _linear(before), _linear(after)
    if first is None or second is None:
        return None
    (w1, b1), (w2, b2) = first, second
    if w1.dtype != w2.dtype:
        return None
    biases = [bias for bias in (b1, b2) if bias is not None]
    size, apart = len(w2) * w1.shape[1] + (len(w2) if biases else 0), sum(map(torch.numel, (w1, w2, *biases)))
    if size > apart:
        return None
    one = nn.Linear(w1.shape[1], len(w2), bias=bool(biases), dtype=w1.dtype, device="meta")
    with torch.no_grad():
        one.weight = nn.Parameter((w2.double() @ w1.double()).to(w1.dtype))
        if biases:
            added = [] if b1 is None else [w2.double() @ b1.double()]
            added += [] if b2 is None else [b2.double()]
            one.bias = nn.Parameter(torch.stack(added).sum(0).to(w1.dtype))
    return one.requires_grad_(any(tensor.requires_grad for tensor in (w1, w2, *biases)))


def _linear(module: nn.Module) -> Map | None:
    if _has_hooks(module):
        return None
    if type(module) is nn.Linear:
        return module.weight, module.bias
    return module.as_linear() if isinstance(module, LinearMap) else None


def _has_hooks(module: nn.Module) -> bool:
    """Whether something looks at it, or computes in its place."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)
