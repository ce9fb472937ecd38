"""Where what a layer keeps lies in one stretch of memory, so that a single copy takes all of it along.

::

    │ buffers │ parameters │ what optimizers keep │ gradients │
    └──────────────────────┘
      all that an inference reads, of which it may write to the buffers

What shares a storage shares it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

_LINE = 512
"""Bytes to which storages are aligned, as by PyTorch's allocator: libraries choose kernels by it, and round by them."""


class Piece(NamedTuple):
    """Where a tensor lies in the memory of its layer: its storage there, and itself within that.

    Attributes:
        begin: Of the storage, in bytes.
        nbytes: Of the storage.
        offset: Of the tensor within it, in elements.
    """

    begin: int
    nbytes: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class Memory:
    """A stretch of memory, and the tensors over it. Each is made once: layers are alike.

    Args:
        flat: All of it, ``(size,)`` ``uint8``.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.size = flat.nbytes
        self._base = flat.data_ptr()
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._tensors: dict[Piece, Tensor] = {}

    def tensor(self, piece: Piece) -> Tensor:
        """What lies there. Its storage has the piece's bytes, and those over one storage have one here, too."""
        found = self._tensors.get(piece)
        if found is None:
            place = piece.begin, piece.begin + piece.nbytes
            if place not in self._storages:
                self._storages[place] = self.flat.untyped_storage()[place[0] : place[1]]
            found = torch.empty(0, dtype=piece.dtype, device=self.flat.device)
            found.set_(self._storages[place], piece.offset, piece.shape, piece.stride)
            self._tensors[piece] = found
        return found

    def offset(self, tensor: Tensor) -> int | None:
        """Where in it a tensor's data begins, in bytes; None for elsewhere."""
        place = tensor.data_ptr() - self._base
        return place if 0 <= place < self.size else None

    def holds(self, tensor: Tensor, piece: Piece) -> bool:
        """Whether a tensor's data is that piece of it."""
        place = self._base + piece.begin + piece.offset * piece.dtype.itemsize
        if tensor.data_ptr() != place or tensor.dtype != piece.dtype or tensor.layout is not torch.strided:
            return False
        return tensor.shape == piece.shape and tensor.stride() == piece.stride


@dataclass(frozen=True)
class Plan:
    """What a layer keeps, and where each of it lies.

    Attributes:
        tensors: Buffers, parameters, what optimizers keep, and gradients.
        pieces: Of each its place; None for what stays where it is.
        counts: How many of the first are buffers, and how many these or parameters.
        sizes: The bytes that come before each; last, of all.
    """

    tensors: Sequence[Tensor] = ()
    pieces: Sequence[Piece | None] = ()
    counts: tuple[int, int] = (0, 0)
    sizes: Sequence[int] = (0,)

    @property
    def size(self) -> int:
        """The bytes of all of it."""
        return self.sizes[-1]

    @property
    def buffers_size(self) -> int:
        """Those of buffers."""
        return self.sizes[self.counts[0]]

    @property
    def weights_size(self) -> int:
        """Those of buffers and parameters, all that an inference reads."""
        return self.sizes[self.counts[1]]

    @classmethod
    def of(cls, kept: Sequence[Tensor], counts: tuple[int, int], device: torch.device) -> Plan:
        """Gives what moves from a device a place, by its storage.

        Args:
            kept: As ``tensors``.
            counts: As there.
            device: Where the layer is.
        """
        pieces: list[Piece | None] = []
        begins: dict[int, int] = {}
        sizes = [0]
        for tensor in kept:
            end, piece = sizes[-1], None
            if moves(tensor, device):
                storage = tensor.untyped_storage()
                begin = begins.setdefault(storage.data_ptr(), end)
                piece = Piece(
                    begin, storage.nbytes(), int(tensor.storage_offset()), tensor.dtype, tensor.shape, tensor.stride()
                )
                end = max(end, begin + -(-storage.nbytes() // _LINE) * _LINE)
            pieces.append(piece)
            sizes.append(end)
        return cls(kept, pieces, counts, sizes)

    def all(self, most: int | None = None) -> list[tuple[Tensor, Piece]]:
        """What goes with the layer, with its place; of no more than so many of the tensors."""
        pairs = zip(self.tensors[:most], self.pieces[:most], strict=True)
        return [(tensor, piece) for tensor, piece in pairs if piece is not None]

    def weights(self) -> list[tuple[Tensor, Piece]]:
        """Of these the buffers and parameters."""
        return self.all(self.counts[1])

    def sources(self) -> Iterator[tuple[int, Tensor]]:
        """The storages of these as bytes, wherever they are now, each with where it begins."""
        begun = -1
        for tensor, piece in self.all():
            if piece.begin > begun:
                begun = piece.begin
                yield begun, torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

    def versions(self) -> list[int]:
        """How often each parameter was written to."""
        parameters = self.tensors[slice(*self.counts)]
        return [tensor._version for tensor in parameters if not tensor.is_inference()]


def gather(plan: Plan, memory: Memory) -> None:
    """Copies what does not lie in its place in some memory there."""
    missing = []
    for begin, source in plan.sources():
        offset = memory.offset(source)
        if offset != begin:  # where it is in it, another one may get its place
            missing.append((begin, source if offset is None else source.clone()))
    for begin, source in missing:
        memory.flat[begin : begin + source.nbytes].copy_(source)


def moves(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor goes with its layer, away from a device: one with memory there, laid out by strides."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.device != device:
        return False
    return tensor.untyped_storage().nbytes() > 0 and not (tensor.is_conj() or tensor.is_neg())
