"""Thin packets: what a layer hands on to the next, rounded to bfloat16 or to 8-bit integers with a scale for each row.

::

    layer k ── thin ──► int8 values, a scale per row ── thick ──► what layer k + 1 gets
                        (what travels, and waits in queues)       (of the type that layer k gave)

Of a tree, tensors of floating-point numbers of at least two dimensions are rounded, where that makes them smaller:
with ``bf16`` those of more than two bytes a number, with ``int8`` those whose rows, along the last dimension, are long
enough to pay for a scale (2 numbers of float32, 5 of half precision). All others pass as they are: whole numbers, truth
values, a number per sample, in ``(B,)`` or ``(B, 1)``.

A row's scale is its largest magnitude, which stays exact, as do zeros: a mask of 0 and 1 is not changed. What was
rounded once is not changed by rounding it again, to the nearest; nor, of float32 and float64, by chance.

A row that holds a NaN or an infinity becomes NaN as a whole: what is not finite never becomes a number. A row without
a magnitude of 1.5e-36 or more becomes zeros, and a row of float64 with one beyond what float32 holds NaN. To bfloat16,
NaN and infinities stay what they are, and what is above 3.39e38 becomes infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeal.core.options import PacketFormat
from pipeal.core.rng import random_words
from pipeal.core.tree import Tree, map_tensors

LEVELS = 127
"""The largest magnitude of an 8-bit value; -128 is not used."""

_LEVEL = torch.tensor(1 / LEVELS, dtype=torch.float32, device="cpu")
"""Times 127 it is 1, in float32, too."""

_SCALE_BYTES = 4
_LEAST_SCALE = 128 * torch.finfo(torch.float32).tiny
"""Of smaller rows, values would be subnormal: some processors lose bits of these, and some all."""


@dataclass(frozen=True, slots=True)
class Thin:
    """A tree whose tensors were rounded.

    Attributes:
        tree: The tree as it was, with rounded tensors in the place of those that were to be rounded.
        scales: For each tensor in order, the scales of its rows, ``(…, 1)`` of float32; None without.
        types: For each tensor in order, the type that it had; None where it is as it was.
    """

    tree: Tree
    scales: list[Tensor | None]
    types: list[torch.dtype | None]


@torch.no_grad()
def thin(tree: Tree, kind: PacketFormat) -> Tree:
    """Rounds what a layer hands on, for its way to the next.

    ``int8-stochastic`` rounds up or down by chance, so that a value is right in the mean; it draws from the key in
    force (:class:`pipeal.core.rng.keyed`), else from PyTorch's default generator.

    Args:
        tree: A tree of tensors. One that is thin already stays as it is.
        kind: How; ``as_is`` gives the tree back.

    Returns:
        A :class:`Thin`, or the tree itself where nothing of it is rounded. Shares what is not rounded with the tree.
    """
    if kind == "as_is" or isinstance(tree, Thin):
        return tree
    scales: list[Tensor | None] = []
    types: list[torch.dtype | None] = []

    def rounded_down(tensor: Tensor) -> Tensor:
        scale, dtype = None, None
        if _saves(tensor, kind):
            dtype = tensor.dtype
            if kind == "bf16":
                tensor = tensor.to(torch.bfloat16)
            else:
                tensor, scale = _to_int8(tensor.float(), by_chance=kind == "int8-stochastic")
        scales.append(scale)
        types.append(dtype)
        return tensor

    light = map_tensors(rounded_down, tree)
    return Thin(light, scales, types) if any(types) else tree


@torch.no_grad()
def thick(tree: Tree) -> Tree:
    """What :func:`thin` was given, rounded: new tensors of the types and the shapes of then. Other trees stay as they
    are."""
    if not isinstance(tree, Thin):
        return tree
    columns = iter(zip(tree.scales, tree.types, strict=True))

    def as_before(tensor: Tensor) -> Tensor:
        scale, dtype = next(columns)
        if scale is not None:
            tensor = torch.mul(tensor, _LEVEL).mul_(scale)
        return tensor if dtype is None else tensor.to(dtype)

    return map_tensors(as_before, tree.tree)


def rounded(tree: Tree, kind: PacketFormat) -> Tree:
    """What arrives of a tree that is handed on; the arguments are those of :func:`thin`."""
    return thick(thin(tree, kind))


def nearest(kind: PacketFormat) -> PacketFormat:
    """The same without chance, for predictions and for counting bytes."""
    return "int8" if kind == "int8-stochastic" else kind


def _saves(tensor: Tensor, kind: PacketFormat) -> bool:
    """Whether a tensor is to be rounded, and becomes smaller by it."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.dim() < 2:
        return False
    length, size = tensor.shape[-1], tensor.element_size()
    return size > 2 if kind == "bf16" else length + _SCALE_BYTES < length * size


def _to_int8(x: Tensor, *, by_chance: bool) -> tuple[Tensor, Tensor]:
    """``(…, N)`` float32 as ``(…, N)`` int8 and the scales ``(…, 1)`` float32 of its rows."""
    steps = x.abs()  # and written over below: another block of memory would take longer than all that is computed
    scale = steps.amax(-1, keepdim=True)  # NaN where there is one
    scale.masked_fill_(scale < _LEAST_SCALE, 0.0)
    scale.masked_fill_(~scale.isfinite(), torch.nan)
    # Whatever becomes of NaN as an integer, times NaN it is NaN again.
    torch.mul(x, torch.where(scale > 0, LEVELS / scale, 0.0), out=steps)
    if by_chance:
        draws = random_words((x.numel() + 7) // 8, x.device).view(torch.uint8)[: x.numel()].view(x.shape)
        # Between 0 and 1, but no nearer to them than a whole number is off that was divided and multiplied before.
        steps.add_(1 / 512).add_(draws, alpha=1 / 256).floor_()
    else:
        steps.round_()
    return steps.clamp_(-LEVELS, LEVELS).to(torch.int8), scale
