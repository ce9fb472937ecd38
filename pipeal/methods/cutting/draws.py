"""Random numbers that a forward draws while it is followed, and what it does by them, such as leaving a block out."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

_UNIFORM = (torch.ops.aten.rand, torch.ops.aten.rand_like, torch.ops.aten.uniform_)
_GREATEST = 1 - 2**-24
"""What ``torch.rand`` gives at most."""


def with_draws(follow: Callable[[], fx.Graph]) -> tuple[fx.Graph, bool]:
    """The graph that ``follow`` makes, and whether it would be another one with other random numbers.

    A block that is left out where ``torch.rand([]) < p`` is no such case while ``p`` is zero: the least and the
    greatest numbers give one graph. Numbers from other generators than PyTorch's, or of other kinds, always are.
    """
    before = _others()
    with _Draws() as draws:
        graph = follow()
    if _others() != before or not draws.seen <= {*_UNIFORM}:
        return graph, True
    for number in (0.0, _GREATEST) if draws.seen else ():
        with _Draws(number):
            if _steps(follow()) != _steps(graph):
                return graph, True
    return graph, False


class _Draws(TorchDispatchMode):
    """Within it, notes the operators that draw; where there is a number, that is what they give."""

    supports_higher_order_operators = True

    def __init__(self, number: float | None = None) -> None:
        super().__init__()
        self.seen = set[Any]()
        self._number = number

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operator."""
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):  # a higher-order operator has none
            self.seen.add(func.overloadpacket)
            if self._number is not None:
                out.fill_(self._number)
        return out


def _others() -> list[Any]:
    """The states of the generators of Python and, where it is loaded, of NumPy."""
    numpy = sys.modules.get("numpy")
    words = [] if numpy is None else numpy.random.get_state()
    return [random.getstate(), *(one.tobytes() if hasattr(one, "tobytes") else one for one in words)]


def _steps(graph: fx.Graph) -> list[tuple[str, Any]]:
    return [(node.op, None if node.op == "get_attr" else node.target) for node in graph.nodes]
