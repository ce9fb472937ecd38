"""What flows down a line: items, each of a kind, with plain values and a tree of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeal.core.errors import DataError
from pipeal.core.thin import Thin
from pipeal.core.tree import Tree, map_tensors
from pipeal.core.tree import tensors as tensors_of
from pipeal.core.tree_codec import Form, put_together, taken_apart
from pipeal.engine.distributed.flat import Layout, check_layout, flat, row_for, unflat

BEGIN, BATCH, EVALUATE, DECODER, ASK, ROW, LAYER, END = (
    "begin",
    "batch",
    "evaluate",
    "decoder",
    "ask",
    "row",
    "layer",
    "end",
)
"""The kinds: the first item of all; a batch to learn from; an epoch has been trained; what an answer needs of a layer
on its way down; a batch to answer; the answers of an epoch are complete; what a layer has learnt; the last item."""

KINDS = (BEGIN, BATCH, EVALUATE, DECODER, ASK, ROW, LAYER, END)


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

    Attributes:
        kind: Of the item.
        facts: Likewise.
        form: Of its tree.
        layouts: Of the tensors.
        rows: Their elements, on the CPU; never written to.
    """

    kind: str
    facts: Mapping[str, Any]
    form: Form
    layouts: Sequence[Layout]
    rows: Sequence[Tensor]

    @classmethod
    def of(cls, item: Item) -> Packed:
        """Takes an item apart; waits for copies from a GPU.

        Raises:
            DataError: Its tree holds a class of its own, or a tensor that cannot be sent.
        """
        form, tensors = taken_apart(_with_marks(map_tensors(lambda tensor: tensor.detach().to("cpu"), item.tree)))
        put_together(form, tensors, plain=True)  # told here, and not where it would arrive
        pairs = [flat(tensor) for tensor in tensors]
        return cls(item.kind, dict(item.facts), form, [layout for layout, _ in pairs], [row for _, row in pairs])

    def item(self) -> Item:
        """The item, in memory that it may share with :attr:`rows`."""
        tensors = [unflat(layout, row) for layout, row in zip(self.layouts, self.rows, strict=True)]
        return Item(self.kind, self.facts, _without_marks(put_together(self.form, tensors, plain=True)))

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(row.nbytes for row in self.rows)

    def head(self) -> list[Any]:
        """All but the tensors, as JSON."""
        return [self.kind, self.facts, self.form, self.layouts]

    def frames(self) -> list[Any]:
        """The bytes of the tensors, without a copy."""
        return [row.contiguous().view(torch.uint8).numpy() for row in self.rows]

    @classmethod
    def arrived(cls, head: Any, frames: Sequence[Any]) -> Packed:
        """What :meth:`head` and :meth:`frames` gave, on another process's word.

        Raises:
            DataError: It is none.
        """
        if not (isinstance(head, list) and len(head) == 4):
            raise DataError("an item's head is none")
        kind, facts, form, layouts = head
        if kind not in KINDS or not isinstance(facts, dict) or not isinstance(layouts, list):
            raise DataError(f"an item of the kind {str(kind)[:40]!r} is none")
        if len(layouts) != len(frames):
            raise DataError(f"an item has {len(frames)} tensors, but its head says {len(layouts)}")
        for layout, frame in zip(layouts, frames, strict=True):
            check_layout(layout, len(frame.buffer))
        rows = [row_for(layout) for layout in layouts]
        for row, frame in zip(rows, frames, strict=True):
            if row.numel():
                row.view(torch.uint8).copy_(torch.frombuffer(frame.buffer, dtype=torch.uint8))
        return cls(kind, facts, form, layouts, rows)

    def state(self) -> dict[str, Any]:
        """As plain values, for a snapshot."""
        return {"head": self.head(), "rows": list(self.rows)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Packed:
        """What :meth:`state` gave."""
        kind, facts, form, layouts = state["head"]
        return cls(kind, facts, form, layouts, state["rows"])


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
        if not (len(scales) == len(types) == count and all(kind is None or _is_dtype(kind) for kind in types)):
            raise DataError("a thin packet came whose scales and types are not those of its tensors")
        return Thin(light, scales, types)
    return tree


def _is_dtype(kind: Any) -> bool:
    return isinstance(kind, torch.dtype)
