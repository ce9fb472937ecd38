"""A batch in parts: cut along its first dimension, and what comes of the parts put together again.

::

    8 samples do not fit ─► 4 do not fit ─► 2, 2 do ─► the other 4 ─► 2, 2        gradients and losses: each part's,
                                                                                  by its share of the samples
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.core.tree import Tree, describe, map_tensors, shapes_of, tensors
from pipeal.engine.runner.layer import Passed


class UncuttableError(Exception):
    """A batch cannot be cut, or its parts do not fit together; the message says why."""


def samples_in(packet: Tree) -> int:
    """How many samples all tensors of a packet have.

    Raises:
        UncuttableError: It holds no tensors, or they are not of one length.
    """
    lengths = {tensor.shape[0] if tensor.dim() else None for tensor in tensors(packet)}
    if len(lengths) != 1 or None in lengths:
        raise UncuttableError(
            f"its packet has {describe(shapes_of(packet))}, and only tensors with one entry per sample can be cut"
        )
    return int(lengths.pop() or 0)


def halves(rows: range, most: int) -> list[range]:
    """Cuts in two until no part has more than ``most`` samples.

    >>> halves(range(7), 2)
    [range(0, 2), range(2, 4), range(4, 6), range(6, 7)]
    """
    if len(rows) <= most:
        return [rows]
    middle = rows.start + (len(rows) + 1) // 2
    return [*halves(range(rows.start, middle), most), *halves(range(middle, rows.stop), most)]


def cut(packet: Tree, rows: range) -> Tree:
    """Some samples of a packet; shares its memory."""
    return map_tensors(lambda tensor: tensor[rows.start : rows.stop], packet)


class Gathered:
    """Gradients, losses and results of the parts of a batch.

    Args:
        module: The layer; its gradients are taken from it after each part.
        samples: How many samples the whole batch has.
    """

    def __init__(self, module: nn.Module, samples: int) -> None:
        self._parameters = list(module.parameters())
        self._samples = samples
        self._parts: list[tuple[Passed, int]] = []
        self._gradients: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, passed: Passed, rows: range) -> None:
        """Takes over what a part gave, and the gradients that it left."""
        self._parts.append((passed, len(rows)))
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                share = parameter.grad.mul_(len(rows) / self._samples)
                held = self._gradients.get(number)
                self._gradients[number] = share if held is None else held.add_(share)
                parameter.grad = None

    def put_gradients(self) -> None:
        """Leaves the gradients of the whole batch in the layer."""
        for number, gradient in self._gradients.items():
            self._parameters[number].grad = gradient

    @torch.no_grad()
    def passed(self) -> Passed:
        """What the whole batch gives.

        Raises:
            UncuttableError: The parts' results are not of one length, or hold plain values that differ.
        """
        onward = _joined([passed.onward for passed, _ in self._parts], [count for _, count in self._parts])
        columns = [passed.losses for passed, _ in self._parts]
        if any(losses is None for losses in columns):
            return Passed(onward, None)
        shares = [count / self._samples for _, count in self._parts]
        weighted = [
            torch.stack([loss * share for loss, share in zip(column, shares, strict=True)]).sum(0)
            for column in zip(*(losses or [] for losses in columns), strict=True)
        ]
        return Passed(onward, weighted)


def _joined(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    plain = [map_tensors(lambda _: None, part) for part in parts]  # type: ignore[arg-type, return-value]
    found = [tensors(part) for part in parts]
    fitting = all(
        tensor.dim() and tensor.shape[0] == count for row, count in zip(found, counts, strict=True) for tensor in row
    )
    alike = all([tensor.shape[1:] for tensor in row] == [tensor.shape[1:] for tensor in found[0]] for row in found)
    if not fitting or not alike or any(one != plain[0] for one in plain):
        shapes = "; ".join(dict.fromkeys(describe(shapes_of(part)) for part in parts))
        raise UncuttableError(f"what its parts hand on cannot be put together: {shapes}")
    columns = iter([torch.cat(column) for column in zip(*found, strict=True)])
    return map_tensors(lambda _: next(columns), parts[0])
