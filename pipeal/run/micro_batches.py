"""The micro-batches of pipelined backpropagation: a batch shared out, and filled up to few shapes."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeal.core.tree import Tree, batch_size, map_tensors

Shape = tuple[int, int]
"""What tells micro-batches apart that look different: their samples, and how long texts are, or 0."""


class MicroBatches:
    """Makes them, and counts what fills them up.

    Args:
        parts: Of each batch.
        pad_index: The token that fills up texts to the next of few lengths; None where inputs are no texts, or all of
            one length.
        longest: How long texts may be at most; None for any length.
    """

    def __init__(self, parts: int, pad_index: int | None, longest: int | None) -> None:
        self.parts = parts
        self._pad_index, self._longest = pad_index, longest
        self._useful = self._computed = 0

    @property
    def filling(self) -> float:
        """Which share of all that was made so far is padding and copies."""
        return 1 - self._useful / self._computed if self._computed else 0.0

    def of(self, x: Tree) -> tuple[list[Tree], list[int], Shape]:
        """Those of a batch, all of one shape; how many samples of each count, the rest being copies; and the shape."""
        rows = shared_out(batch_size(x), self.parts)
        most, length = len(rows[0]), 0
        useful = batch_size(x)
        if self._pad_index is not None and isinstance(x, Tensor) and x.dim() == 2:
            most, length = bound_of(most, steps=4), bound_of(x.shape[1], steps=2)
            if self._longest is not None:
                length = max(x.shape[1], min(length, self._longest))
            useful = x.numel()
            x = F.pad(x, (0, length - x.shape[1]), value=self._pad_index)
        self._useful += useful
        self._computed += most * self.parts * (length or 1)
        # Empty ones are of copies of the batch's first sample.
        filled = [[*own] + [own.start if own else 0] * (most - len(own)) for own in rows]
        found = [map_tensors(lambda one, own=own: _rows_of(one, own), x) for own in filled]  # type: ignore[misc]
        return found, [len(own) for own in rows], (most, length)


def shared_out(samples: int, parts: int) -> list[range]:
    """The samples of each part, as even as can be, with the larger ones first.

    >>> shared_out(5, 3)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    size, more = divmod(samples, parts)
    ends = accumulate([size + 1] * more + [size] * (parts - more), initial=0)
    return [range(begin, end) for begin, end in pairwise(ends)]


def bound_of(count: int, steps: int) -> int:
    """The least bound that is no less; between a power of two and the next there are so many steps of equal length.

    It follows from the batch alone, so that a run that is taken up again divides it as before.

    >>> [bound_of(count, steps=2) for count in (1, 3, 5, 6, 7, 13, 100)]
    [1, 3, 6, 6, 8, 16, 128]
    >>> [bound_of(count, steps=4) for count in (1, 3, 5, 6, 7, 13, 100)]
    [1, 3, 5, 6, 7, 14, 112]
    """
    step = max(1, (1 << (count - 1).bit_length()) // (2 * steps))
    return -(-count // step) * step


def _rows_of(tensor: Tensor, rows: list[int]) -> Tensor:
    """Those rows, in the layout that the tensor has."""
    found = tensor[torch.tensor(rows, device=tensor.device)]
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return found.contiguous(memory_format=torch.channels_last) if is_last else found.contiguous()
