"""Packets on a wire: every tree, type, shape and stride arrives as it left; what cannot be sent is refused by name."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeal import DataError
from pipeal.core.tree_codec import put_together, taken_apart
from pipeal.engine.distributed.channel import Wire
from pipeal.engine.distributed.flat import flat, row_for, unflat

from .lines import on_each, thread_ranks


@dataclasses.dataclass(frozen=True)
class Graph:
    nodes: Tensor
    count: int

    def __post_init__(self) -> None:
        assert isinstance(self.nodes, Tensor)


class Pair(NamedTuple):
    first: Tensor
    second: Any


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]


def tensors() -> st.SearchStrategy[Tensor]:
    """Of all types, with gaps, turned round, expanded, overlapping, empty, and of no dimension."""

    def made(shape: list[int], dtype: torch.dtype, how: str, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        whole = (torch.randn([*shape, 3], generator=draw) * 5).to(dtype)
        if how == "gaps":
            return whole[..., 1]
        if how == "turned":
            return whole.permute(*range(whole.dim() - 1, -1, -1))
        if how == "expanded":
            return whole[..., :1].expand(*shape, 4)
        if how == "overlapping":
            return torch.arange(7).to(dtype).unfold(0, 3, 1)
        if how == "image":
            return whole.new_zeros(2, 3, 4, 1).contiguous(memory_format=torch.channels_last)
        if how == "conjugate":
            return whole.conj()
        return whole if shape else whole[0]

    hows = ("plain", "gaps", "turned", "expanded", "overlapping", "image", "conjugate")
    shapes = st.lists(st.integers(0, 5), max_size=3)
    return st.builds(made, shapes, st.sampled_from(DTYPES), st.sampled_from(hows), st.integers(0, 99))


def same(one: Tensor, other: Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)
    return alike and (one.stride() == other.stride() or not one.numel())


@given(tensor=tensors())
def test_a_tensor_arrives_with_its_strides_and_only_what_it_holds_travels(tensor: Tensor) -> None:
    """On another layout some operators round differently, and law 1 would not hold across processes."""
    layout, row = flat(tensor)
    assert row.is_contiguous()
    assert row.numel() <= max(1, 2 * tensor.numel())
    layout = json.loads(json.dumps(layout))
    arrived = row_for(layout)
    assert arrived.shape == row.shape
    assert same(unflat(layout, arrived.copy_(row)), tensor)


def trees() -> st.SearchStrategy[Any]:
    plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    leaves = tensors() | plain | st.binary(max_size=4) | st.sampled_from([torch.float16, 1j])

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers()), inner, max_size=3)
            | st.dictionaries(st.text(max_size=3), inner, max_size=2).map(OrderedDict)
            | st.builds(Pair, tensors(), inner)
            | st.builds(Graph, tensors(), st.integers())
            | st.lists(inner, max_size=2).map(deque)
        )

    return st.recursive(leaves, nested, max_leaves=6)


def alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return same(one, other)
    if isinstance(one, Graph):
        return same(one.nodes, other.nodes) and one.count == other.count
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@given(tree=trees())
def test_a_tree_is_put_together_as_it_was_taken_apart(tree: Any) -> None:
    form, found = taken_apart(tree)
    assert alike(put_together(json.loads(json.dumps(form)), found), tree)


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"a test_trees\.\S*Odd cannot be sent|Odd cannot be sent to another process"):
        taken_apart((torch.ones(1), {"a": type("Odd", (), {})()}))
    with pytest.raises(DataError, match="a packet holds a sparse_coo tensor"):
        flat(torch.eye(2).to_sparse())


def test_nothing_is_imported_on_another_processs_word() -> None:
    assert "antigravity" not in sys.modules
    for name in ("antigravity:x", "os:system", "builtins:eval", "nowhere:Thing"):
        with pytest.raises(DataError, match="a container that this process does not know"):
            put_together(["r", name, ["a", 1]], [])
    assert "antigravity" not in sys.modules


def test_messages_of_any_length_arrive_in_order_and_a_peer_that_is_gone_is_known() -> None:
    trees = [None, torch.arange(3), (torch.ones(2, 3), {"k": [torch.zeros(0), 3]}), torch.zeros(300_000)]
    with thread_ranks(3) as worlds:

        def work(world: Any) -> Any:
            wire = Wire(world.endpoint, 2)
            if world.rank:
                for number, tree in enumerate(trees):
                    wire.post(0, "word", {"number": number})
                    wire.send(0, "tree", {"number": number, "long": "x" * 400 * number}, tree)
                return None
            found: dict[int, list[Any]] = {1: [], 2: []}
            for _ in range(4 * len(trees)):
                message = wire.receive([1, 2])
                tree = wire.body(message)
                found[message.source].append((message.kind, message.facts["number"], tree))
            return found

        for told in on_each(worlds, work)[0].values():
            assert [(kind, number) for kind, number, _ in told] == [
                (kind, number) for number in range(len(trees)) for kind in ("word", "tree")
            ]
            assert all(alike(tree, trees[number]) for kind, number, tree in told if kind == "tree")


def test_a_dict_keeps_its_order() -> None:
    tree = {"b": torch.ones(1), "a": {2: torch.zeros(2), 1: torch.ones(2)}}
    back = put_together(*taken_apart(tree))
    assert (list(back), list(back["a"])) == (["b", "a"], [2, 1])
    assert alike(back, tree)
