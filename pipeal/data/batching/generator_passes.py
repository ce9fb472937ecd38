"""Passes over buckets that draw what ``bionemo-size-aware-batching`` documents, from a generator that goes on.

::

    pass 0   shuffle each bucket │ choose, batch, choose, batch …     draws from the generator in this order
    pass 1   shuffle what pass 0 left │ choose, batch …               so pass e needs all e passes before it

There ``torch.multinomial`` chooses the bucket. What it draws depends on how PyTorch was built; the documented results
are those of a build whose exponential numbers come from Intel MKL. They are computed here, so that every build gives
the documented batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# MKL's generator MCG31m1 (L'Ecuyer, 1999): x' = a·x mod m, seeded with 32 bits of PyTorch's generator in every choice.
_MODULUS = 2**31 - 1
_MULTIPLIER = 1132489760

_WORD = 2**32 - 1


class GeneratorPasses:
    """The batches of ``BucketBatchSampler(shuffle=True, generator=…)`` of ``bionemo-size-aware-batching``.

    A pass shuffles the indices of each bucket, then chooses buckets at random, by how many samples each still holds,
    and takes a batch from each.

    Args:
        members: The indices of each bucket.
        bases: Makes the batches of each bucket from its shuffled indices.
        state: Of a CPU generator, before the first pass.
    """

    def __init__(
        self,
        members: Sequence[npt.NDArray[np.int64]],
        bases: Callable[[list[list[int]]], Sequence[Iterable[Sequence[int]]]],
        state: Tensor,
    ) -> None:
        self._bases = bases
        # MKL's numbers for one choice are the seed times these.
        self._powers = np.array([pow(_MULTIPLIER, place, _MODULUS) for place in range(len(members))], np.int64)
        # How the generator and the orders stand before a pass: the first, the one drawn last, and the next.
        self._before: dict[int, tuple[Tensor, list[Tensor]]] = {0: (state, [torch.from_numpy(m) for m in members])}

    def orders(self, epoch: int) -> list[list[int]]:
        """The indices of each bucket in a pass."""
        if epoch not in self._before:
            self.batches(epoch - 1)
        return [order.tolist() for order in self._shuffled(epoch)[1]]

    def batches(self, epoch: int) -> list[list[int]]:
        """All batches of a pass, counted from 0; those before it are drawn first, unless it follows the last drawn."""
        batches: list[list[int]] = []
        for number in range(max(known for known in self._before if known <= epoch), epoch + 1):
            generator, orders = self._shuffled(number)
            batches = self._chosen(orders, generator)
            after = generator.get_state(), orders
            self._before = {0: self._before[0], number: self._before[number], number + 1: after}
        return batches

    def _shuffled(self, number: int) -> tuple[torch.Generator, list[Tensor]]:
        state, before = self._before[number]
        generator = _generator(state)
        return generator, [order[torch.randperm(len(order), generator=generator)] for order in before]

    def _chosen(self, orders: list[Tensor], generator: torch.Generator) -> list[list[int]]:
        bases = [iter(base) for base in self._bases([order.tolist() for order in orders])]
        left = np.array([len(order) for order in orders])
        batches = []
        words = _words(_generator(generator.get_state()))
        choices = 0
        while (left > 0).any():
            uniform = (next(words) % _MODULUS or 1) * self._powers % _MODULUS / _MODULUS
            bucket = int(np.argmax(left / -np.log(uniform)))  # exponential numbers win in proportion to what is left
            choices += 1
            batch = next(bases[bucket], None)
            if batch is None:  # the base leaves out the rest
                left[bucket] = 0
            else:
                left[bucket] -= len(batch)
                batches.append([*map(int, batch)])
        torch.empty(choices, dtype=torch.int32).random_(generator=generator)  # a word each
        return batches


def _generator(state: Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _words(generator: torch.Generator) -> Iterator[int]:
    """The 32-bit words of a generator, without end."""
    while True:
        for pair in torch.empty(64, dtype=torch.int64).random_(-(2**63), None, generator=generator).tolist():
            yield pair >> 32 & _WORD
            yield pair & _WORD
