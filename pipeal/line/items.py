"""What flows down a line: items, each of a kind, with plain values and a tree of tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf, isfinite, prod
from typing import Any

import torch
from torch import Tensor

from pipeal.core.errors import DataError, a_type
from pipeal.core.thin import Thin
from pipeal.core.tree import Tree
from pipeal.core.tree import tensors as tensors_of
from pipeal.core.tree_codec import Form, dtype_named, put_together, taken_apart
from pipeal.engine.distributed.flat import Layout, check_layout, flat, row_for, unflat
from pipeal.engine.distributed.sockets import HEAD_BYTES, packed_head

BEGIN, STATE, BATCH, EVALUATE, DECODER, ASK, ROW, LAYER, CHECKPOINT, END = (
    "begin",
    "state",
    "batch",
    "evaluate",
    "decoder",
    "ask",
    "row",
    "layer",
    "checkpoint",
    "end",
)
"""The kinds: the first item of all; what a layer goes on with; a batch to learn from; an epoch has been trained; what
an answer needs of a layer on its way down; a batch to answer; the answers of an epoch are complete; what a layer has
learnt; all of these have been sent, for a checkpoint; the last item, which makes one as well."""

KINDS = (BEGIN, STATE, BATCH, EVALUATE, DECODER, ASK, ROW, LAYER, CHECKPOINT, END)

_FACTS: Mapping[str, Mapping[str, type]] = {
    BEGIN: {"begun": str, "asked": str, "config": str, "blueprint": dict, "facts": dict, "batches": int},
    STATE: {"layer": int},
    BATCH: {"batch": int, "lr_scale": float, "updates": bool},
    EVALUATE: {"epoch": int, "part": dict},  # and from the second stage on what the layers before have lost
    DECODER: {"layer": int},
    ASK: {"part": str},
    ROW: {"epoch": int},
    LAYER: {"layer": int},
    CHECKPOINT: {},
    END: {},
}

FRAME_BYTES = 1 << 17
"""Tensors travel in pieces: a connection on which one piece takes longer than its heartbeat counts as lost, and all
connections of a link share its rate."""

_LONGEST = " " * 100
"""More than a link says before an item's head."""

_DEEPEST = 50
"""So many collections one within the other may be in an item."""

_MOST_PLACES = 1 << 48

_MOST_DIMENSIONS = 64
"""As in PyTorch."""

_LONGEST_LAYOUT = 100 + _MOST_DIMENSIONS * 2 * 20
"""At most so many characters say what a tensor is."""


@dataclass(frozen=True)
class Item:
    """One of them.

    Attributes:
        kind: One of :data:`KINDS`.
        facts: Plain values, which JSON can hold.
        tree: Tensors in tuples, lists and dicts, some of them thin (:mod:`pipeal.core.thin`); no other class, since no
            code runs on another machine's word.
    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tree: Tree = None


@dataclass(frozen=True)
class Packed:
    """An item as it travels, and as it is kept until it has arrived for good.

    A batch is made ready to travel on the thread that sends it, as far as nothing can go wrong then.

    Attributes:
        kind: Of the item.
        facts: Likewise.
        form: Of its tree.
        parts: Of the tensors in order, on the CPU, and never written to: those without gaps; of others the layout and
            the row that travels, and no more, which counts where many items are kept.
    """

    kind: str
    facts: Mapping[str, Any]
    form: Form
    parts: Sequence[Tensor | tuple[Layout, Tensor]]

    @classmethod
    def of(cls, item: Item) -> Packed:
        """Takes an item apart; waits for copies from a GPU.

        Raises:
            DataError: Its tree holds a class of its own, or a tensor that cannot be sent; or it is no item of its kind;
                or what there is beside the elements is too long for a head.
        """
        form, found = taken_apart(_with_marks(item.tree))
        packed = cls(item.kind, dict(item.facts), form, [_part(tensor.detach().to("cpu")) for tensor in found])
        # Whatever would be refused where it arrives is told here.
        _check_facts(item.kind, item.facts)
        has_short_head = _check_form(item.kind, json.dumps(form), len(found))
        if not (item.kind == BATCH and has_short_head and packed.is_plain):
            _check_depth([packed.facts])
            packed_head([_LONGEST, *packed.head()])
        return packed

    def item(self) -> Item:
        """The item, in memory that it may share with :attr:`parts`."""
        return self._kept if self.is_plain else self._made()

    @cached_property
    def _kept(self) -> Item:
        return self._made()

    def _made(self) -> Item:
        tensors = [part if isinstance(part, Tensor) else unflat(*part) for part in self.parts]
        return Item(self.kind, self.facts, _without_marks(put_together(self.form, tensors, plain=True)))

    @cached_property
    def is_plain(self) -> bool:
        """Whether no tensor has gaps."""
        return all(isinstance(part, Tensor) for part in self.parts)

    @cached_property
    def flats(self) -> Sequence[tuple[Layout, Tensor]]:
        """The layouts of the tensors, and what of them travels."""
        return [flat(part) if isinstance(part, Tensor) else part for part in self.parts]

    @property
    def size(self) -> int:
        """Bytes of its tensors, as they travel."""
        return sum(part.nbytes if isinstance(part, Tensor) else part[1].nbytes for part in self.parts)

    @property
    def largest(self) -> int:
        """Bytes that the largest of its tensors reaches over, there where it arrives."""
        sizes = (part.nbytes if isinstance(part, Tensor) else _bytes(part[0]) for part in self.parts)
        return max(sizes, default=0)

    def head(self) -> list[Any]:
        """All but the tensors, as JSON."""
        return [self.kind, self.facts, self.form, [layout for layout, _ in self.flats]]

    def frames(self) -> list[Any]:
        """The bytes of the tensors, without a copy, in frames of at most :data:`FRAME_BYTES`."""
        rows = [row.contiguous().view(torch.uint8).numpy() for _, row in self.flats]
        return [row[begin : begin + FRAME_BYTES] for row in rows for begin in range(0, len(row), FRAME_BYTES)]

    @classmethod
    def arrived(cls, head: Any, frames: Sequence[Any], largest_bytes: float = inf) -> Packed:
        """What :meth:`head` and :meth:`frames` gave, on another process's word; all of it is looked at.

        Args:
            head: As it came.
            frames: Likewise.
            largest_bytes: The most that one of its tensors may reach over.

        Raises:
            DataError: It is none; so does whatever else goes wrong with it, by an error of any kind.
        """
        if not (isinstance(head, list) and len(head) == 4):
            raise DataError("an item's head is none")
        kind, facts, form, layouts = head
        if kind not in KINDS or not isinstance(facts, dict) or not isinstance(layouts, list):
            raise DataError(f"an item of the kind {str(kind)[:40]!r} is none")
        _check_facts(kind, facts)
        _check_depth([facts, form])
        wanted = []
        for layout in layouts:
            if not (isinstance(layout, list) and len(layout) == 4 and 0 <= len(layout[1]) <= _MOST_DIMENSIONS):
                raise DataError(f"a tensor of an item has {str(layout)[:80]} as its layout")
            if prod(max(1, count) for count in layout[1]) > _MOST_PLACES:  # of none, too, where one is 0
                raise DataError(f"a tensor of an item has the shape {str(layout[1])[:80]}")
            size = layout[3] * dtype_named(layout[0]).itemsize
            check_layout(layout, size)
            # A few elements may say that they are spread over as much memory as there is, or repeated without end.
            if (found := _bytes(layout)) > largest_bytes:
                raise DataError(
                    f"a tensor of an item reaches over {found} bytes; at most {largest_bytes:.0f} may (largest_mib)"
                )
            wanted += [min(FRAME_BYTES, size - begin) for begin in range(0, size, FRAME_BYTES)]
        if wanted != [len(frame.buffer) for frame in frames]:
            raise DataError(f"an item has {len(frames)} frames, but its head is of {len(wanted)}, or of other sizes")
        rows, left = [row_for(layout) for layout in layouts], iter(frames)
        for row in rows:  # not by PyTorch, which would copy with as many threads as the layers have
            whole = row.view(torch.uint8).numpy()
            for begin in range(0, len(whole), FRAME_BYTES):
                whole[begin : begin + FRAME_BYTES] = next(left).buffer
        arrived = cls(kind, facts, form, list(map(_part_of, layouts, rows)))
        _check_tree(kind, arrived.item().tree)
        return arrived

    def state(self) -> dict[str, Any]:
        """As plain values, for a snapshot."""
        return {"head": self.head(), "rows": [row for _, row in self.flats]}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Packed:
        """What :meth:`state` gave."""
        kind, facts, form, layouts = state["head"]
        return cls(kind, facts, form, list(map(_part_of, layouts, state["rows"])))


def _part(tensor: Tensor) -> Tensor | tuple[Layout, Tensor]:
    """What is kept of a tensor; raises as :func:`flat`."""
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return tensor if is_plain and tensor.is_contiguous() else flat(tensor)


def _part_of(layout: Layout, row: Tensor) -> Tensor | tuple[Layout, Tensor]:
    """The same of one that has come."""
    return unflat(layout, row) if layout[2] is None else (layout, row)


_THIN = "thin"
"""The one key of a dict that stands for a :class:`Thin` on its way."""


def _with_marks(tree: Tree) -> Tree:
    """A pair may be thin on either side: on its way, a dict of a kind that no layer hands on."""
    if isinstance(tree, Thin):
        return {_THIN: (tree.tree, tree.scales, tree.types)}
    return tuple(map(_with_marks, tree)) if type(tree) is tuple else tree


def _without_marks(tree: Tree) -> Tree:
    """Raises DataError where what is thin does not fit together."""
    if type(tree) is tuple:
        return tuple(map(_without_marks, tree))
    if type(tree) is dict and [*tree] == [_THIN]:
        light, scales, types = tree[_THIN]
        count = len(tensors_of(light))
        if not (len(scales) == len(types) == count and all(isinstance(kind, torch.dtype | None) for kind in types)):
            raise DataError("a thin packet came whose scales and types are not those of its tensors")
        return Thin(light, scales, types)
    return tree


def _bytes(layout: Layout) -> int:
    """How much memory its tensor has elements of, and how much it would take as one of its own, the larger of them."""
    dtype, shape, strides, length = layout
    reach = length if strides is None else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return int(max(length, reach, prod(shape)) * dtype_named(dtype).itemsize)


def _check_facts(kind: str, facts: Mapping[str, Any]) -> None:
    wanted = _FACTS[kind]
    layers = facts.get("layers", {}) if kind == EVALUATE else {}
    names = facts.keys() - ({"layers"} if kind == EVALUATE else set())
    if (
        names != wanted.keys()
        or not isinstance(layers, dict)
        or not all(_is(facts[name], expected) for name, expected in wanted.items())
    ):
        raise DataError(f"an item of the kind {kind!r} has {str(facts)[:80]} beside its tensors")


def _is(value: Any, expected: type) -> bool:
    if isinstance(value, bool) or expected is bool:
        return isinstance(value, bool) and expected is bool
    if expected is float:
        return isinstance(value, (int, float)) and isfinite(value)
    if expected is int:
        return isinstance(value, int) and 0 <= value < 2**62
    return isinstance(value, expected)


@lru_cache(maxsize=8)
def _check_form(kind: str, text: str, count: int) -> bool:
    """Looks at the form, as JSON, of a tree of so many tensors; says whether its head is short, whatever their shapes.

    That of a batch mostly is that of the one before.
    """
    form = json.loads(text)
    _check_depth([form])  # there, it is looked at beside the facts
    _check_tree(kind, _without_marks(put_together(form, [torch.empty(0)] * count, plain=True)))
    return len(text) + count * _LONGEST_LAYOUT < HEAD_BYTES // 2


def _check_depth(value: Any) -> None:
    """Recursion that just fits on the thread at the socket need not fit where the item is used."""
    level = [value]
    for _ in range(_DEEPEST):
        insides = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = [part for inside in insides for part in inside]
        if not level:
            return
    raise DataError(f"an item has more than {_DEEPEST} collections one within the other")


def _check_tree(kind: str, tree: Tree) -> None:
    if kind in (BATCH, ASK):
        fits = isinstance(tree, tuple) and len(tree) == 2
    elif kind in (BEGIN, STATE, DECODER, LAYER):
        fits = isinstance(tree, dict) and all(isinstance(name, str) for name in tree)
    else:
        fits = tree is None
    if not fits:
        raise DataError(f"an item of the kind {kind!r} has {a_type(tree)} that is not of that kind")
