"""Items as they travel: what arrives is what was sent, to the last bit, and what is none is refused."""

from __future__ import annotations

import json
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from pipeal.core.errors import DataError
from pipeal.core.tree import Tree, tensors
from pipeal.engine.distributed.flat import flat
from pipeal.line import items
from pipeal.line.items import ASK, BATCH, BEGIN, CHECKPOINT, DECODER, END, EVALUATE, LAYER, ROW, STATE, Item, Packed
from tests.line.frames import Frame

FACTS: dict[str, dict[str, Any]] = {
    BEGIN: {
        "begun": "0a",
        "asked": "train: {}",
        "config": "train: {}",
        "blueprint": {},
        "facts": {"samples": 3},
        "batches": 0,
    },
    STATE: {"layer": 1},
    CHECKPOINT: {},
    BATCH: {"batch": 3, "lr_scale": 0.5, "updates": True},
    EVALUATE: {"epoch": 1, "part": {"seconds": 0.5}},
    DECODER: {"layer": 1},
    ASK: {"part": "test"},
    ROW: {"epoch": 1},
    LAYER: {"layer": 0},
    END: {},
}
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def travelled(packed: Packed, largest_bytes: float = inf) -> Packed:
    """As the next stage has it."""
    return Packed.arrived(json.loads(json.dumps(packed.head())), list(map(Frame, packed.frames())), largest_bytes)


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    bits = torch.randint(0, 255, (max(1, torch.Size(shape).numel()) * 16,), dtype=torch.uint8)
    dtype = draw(st.sampled_from(DTYPES))
    values = bits.bool() if dtype is torch.bool else bits.view(dtype)
    made = values[: torch.Size(shape).numel()].view(shape)
    how = draw(st.sampled_from(("as it is", "transposed", "every other", "expanded", "a column", "conjugated")))
    if how == "transposed" and made.dim() > 1:
        return made.transpose(0, 1)
    if how == "every other" and made.dim():
        return made[::2]
    if how == "expanded":
        return made.unsqueeze(0).expand(3, *made.shape)
    if how == "a column" and made.dim() > 1 and made.shape[1]:
        return made[:, 0]
    if how == "conjugated" and dtype is torch.complex64:
        return made.conj()
    return made


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
TREES = st.recursive(
    st.one_of(any_tensor(), PLAIN),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def same(found: Tree, wanted: Tree) -> bool:
    """Equal to the last bit, with the same strides."""
    if isinstance(wanted, Tensor):
        return (
            isinstance(found, Tensor)
            and (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            and (found.stride() == wanted.stride() or not wanted.numel())
            and bits(found).equal(bits(wanted))
        )
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


def bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


@given(TREES, TREES)
@example([], torch.empty(4)[::2][:0])  # of none, with a stride
def test_an_item_arrives_as_it_was_sent(x: Tree, y: Tree) -> None:
    sent = Item(BATCH, FACTS[BATCH], (x, y))
    packed = Packed.of(sent)
    for found in (packed.item(), travelled(packed).item(), Packed.of_state(packed.state()).item()):
        assert (found.kind, found.facts) == (sent.kind, sent.facts)
        assert same(found.tree, sent.tree)
    assert packed.size == sum(len(Frame(frame).buffer) for frame in packed.frames())
    assert packed.largest >= max((tensor.nbytes for tensor in tensors(sent.tree)), default=0) or not packed.parts


@pytest.mark.parametrize("kind", FACTS)
def test_every_kind_travels(kind: str) -> None:
    tree: Tree = None
    if kind in (BATCH, ASK):
        tree = (torch.ones(2, 3), {"mask": torch.zeros(0)})
    elif kind in (BEGIN, STATE, DECODER, LAYER):
        tree = {"weight": torch.ones(2)}
    found = travelled(Packed.of(Item(kind, FACTS[kind], tree))).item()
    assert (found.kind, found.facts) == (kind, FACTS[kind])
    assert same(found.tree, tree)


def test_what_has_arrived_is_memory_of_its_own() -> None:
    """The message's memory goes back to ZeroMQ."""
    packed = Packed.of(Item(ASK, FACTS[ASK], (torch.ones(4), None)))
    frame = Frame(packed.frames()[0])
    arrived = Packed.arrived(json.loads(json.dumps(packed.head())), [frame])
    frame.buffer[:] = bytes(len(frame.buffer))
    assert arrived.item().tree[0].equal(torch.ones(4))


@dataclass
class Record:
    x: Tensor


class Named(NamedTuple):
    x: Tensor


@pytest.mark.parametrize("tree", [Record(torch.ones(1)), Named(torch.ones(1)), {"a": [Named(torch.ones(1))]}], ids=str)
def test_a_class_of_its_own_is_refused_where_it_is_sent(tree: Tree) -> None:
    with pytest.raises(DataError, match=r"where only tensors, numbers, texts and collections of them may be") as error:
        Packed.of(Item(BATCH, FACTS[BATCH], (tree, None)))
    assert "\n" not in str(error.value)


def test_a_sparse_tensor_is_refused_where_it_is_sent() -> None:
    Packed.of(Item(BATCH, FACTS[BATCH], (torch.eye(2), None)))  # of the same form
    with pytest.raises(DataError, match="make it dense"):
        Packed.of(Item(BATCH, FACTS[BATCH], (torch.eye(2).to_sparse(), None)))


@pytest.mark.parametrize(
    ("part", "count"), [("a text that fills a head. " * 100, 500), (torch.ones(1), 50_000)], ids=type
)
def test_a_head_that_is_too_long_is_refused_where_it_is_made(part: Any, count: int) -> None:
    with pytest.raises(DataError, match="more than 1048576; put numbers into tensors"):
        Packed.of(Item(BATCH, FACTS[BATCH], ([part] * count, None)))


def test_gaps_are_kept_neither_here_nor_there() -> None:
    """Symptom: 60 items of 2 MiB in all took 380. A stage keeps what the next one has not saved."""
    packed = Packed.of(Item(BATCH, FACTS[BATCH], (torch.ones(64, 200, 128)[:, -1], torch.ones(3))))
    for kept in (packed, travelled(packed), Packed.of_state(packed.state())):
        assert kept.item().tree[0].shape == (64, 128)
        held = {id(part): part for part in tensors([*kept.parts, kept.__dict__.get("_kept")])}
        assert sum(part.untyped_storage().nbytes() for part in held.values()) == packed.size == 4 * (64 * 128 + 3)


@pytest.mark.parametrize("shape", [[2], [0, 2]])
def test_what_has_come_counts_as_what_it_takes(shape: list[int]) -> None:
    """Symptom: of 4 MiB none or 8 bytes counted, so that a peer could fill memory."""
    strides = [0, 99][-len(shape) :]
    head = head_of(layouts=[["float32", shape, strides, 100]])
    assert Packed.arrived(head, [Frame(torch.ones(100).numpy().tobytes())]).size == 400


def test_what_may_be_sent_may_arrive() -> None:
    """As deep as that, and no deeper: 47 lists were sent, and refused where they came."""
    sent: dict[int, Packed] = {}
    tree: Tree = torch.ones(1)
    for levels in range(60):
        with suppress(DataError):
            sent[levels] = Packed.of(Item(BATCH, FACTS[BATCH], (tree, None)))
        tree = [tree]
    assert list(sent) == list(range(len(sent)))
    assert 40 < len(sent) < 50
    for packed in sent.values():
        travelled(packed)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_where_it_is_sent() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises((DataError, RuntimeError)):
        Packed.of(Item(BATCH, FACTS[BATCH], (nested, None)))


def test_what_of_a_batch_may_not_fit_is_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest waits for the thread that sends it."""
    made: list[Tensor] = []
    monkeypatch.setattr(items, "flat", lambda tensor: (made.append(tensor), flat(tensor))[1])
    plain = Packed.of(Item(BATCH, FACTS[BATCH], (torch.ones(2, 3), [torch.zeros(0), torch.ones(2, dtype=torch.int8)])))
    assert (plain.size, plain.largest) == (26, 24)
    assert not made
    assert sum(len(Frame(frame).buffer) for frame in plain.frames()) == plain.size
    assert len(made) == 3
    Packed.of(Item(BATCH, FACTS[BATCH], (torch.ones(2, 3).t(), None)))
    Packed.of(Item(ASK, FACTS[ASK], (torch.ones(2, 3), None)))
    assert len(made) == 5


def head_of(**changes: Any) -> list[Any]:
    head = json.loads(json.dumps(Packed.of(Item(BATCH, FACTS[BATCH], (torch.ones(2, 3), None))).head()))
    names = ("kind", "facts", "form", "layouts")
    return [changes.get(name, part) for name, part in zip(names, head, strict=True)]


def deep(levels: int) -> list[Any]:
    form: list[Any] = ["T"]
    for _ in range(levels):
        form = ["t", form, None]
    return form


@pytest.mark.parametrize(
    ("head", "frames"),
    [
        ([], 1),
        ("item", 1),
        ({"kind": BATCH}, 1),
        (head_of()[:3], 1),
        (head_of(kind="order"), 1),
        (head_of(kind=["batch"]), 1),
        (head_of(facts=[]), 1),
        (head_of(facts={}), 1),
        (head_of(facts={**FACTS[BATCH], "more": 1}), 1),
        (head_of(facts={**FACTS[BATCH], "batch": -1}), 1),
        (head_of(facts={**FACTS[BATCH], "batch": True}), 1),
        (head_of(facts={**FACTS[BATCH], "batch": 2**70}), 1),
        (head_of(facts={**FACTS[BATCH], "lr_scale": float("nan")}), 1),
        (head_of(facts={**FACTS[BATCH], "lr_scale": inf}), 1),
        (head_of(facts={**FACTS[BATCH], "lr_scale": "1"}), 1),
        (head_of(facts={**FACTS[BATCH], "updates": 1}), 1),
        (head_of(kind=EVALUATE, facts={**FACTS[EVALUATE], "layers": [1]}, form=None, layouts=[]), 0),
        (head_of(kind=EVALUATE, facts={"epoch": 1, "part": deep(60)}, form=None, layouts=[]), 0),
        (head_of(form=None), 1),
        (head_of(form=[]), 1),
        (head_of(form=["T"]), 1),
        (head_of(form=["t", ["T"]]), 1),
        (head_of(form=["l", ["T"], None]), 1),
        (head_of(form=["t", ["T"], ["T"]]), 1),
        (head_of(form=["t", ["T"], ["v", "no such device"]]), 1),
        (head_of(form=["t", ["T"], ["y", "nn"]]), 1),
        (head_of(form=["t", ["T"], ["r", "pipeal.line.items:Item"]]), 1),
        (head_of(form=["t", ["T"], ["n", "collections:Counter"]]), 1),
        (head_of(form=["t", ["T"], ["d", [["l"], 1]]]), 1),
        (head_of(form=["t", ["T"], ["c", "a", "b"]]), 1),
        (head_of(form=deep(60)), 1),
        (head_of(layouts={}), 1),
        (head_of(layouts=[]), 1),
        (head_of(layouts=[None]), 1),
        (head_of(layouts=[["float32", [2, 3], None, 6, 0]]), 1),
        (head_of(layouts=[["float32", "6", None, 6]]), 1),
        (head_of(layouts=[["float32", [1] * 65, None, 1]]), 1),
        (head_of(layouts=[["nn", [2, 3], None, 6]]), 1),
        (head_of(layouts=[[["float32"], [2, 3], None, 6]]), 1),
        (head_of(layouts=[["float32", [-2, -3], None, 6]]), 1),
        (head_of(layouts=[["float32", [2.0, 3.0], None, 6]]), 1),
        (head_of(layouts=[["float64", [2, 3], None, 6]]), 1),
        (head_of(layouts=[["float32", [2, 3], None, 7]]), 1),
        (head_of(layouts=[["float32", [2, 3], [3], 6]]), 1),
        (head_of(layouts=[["float32", [2, 3], [-3, 1], 6]]), 1),
        (head_of(layouts=[["float32", [2, 3], [2**40, 1], 6]]), 1),
        (head_of(layouts=[["float32", [6, 2**40], [1, 0], 6]]), 1),
        (head_of(layouts=[["float32", [0, 2**62, 2**62], None, 0]]), 0),
        (head_of(), 0),
        (head_of(), 2),
    ],
    ids=lambda value: str(value)[-70:],
)  # fmt: skip
def test_what_is_no_item_is_refused_by_an_error_and_takes_no_memory(head: Any, frames: int) -> None:
    """Two elements that lie 2^40 apart were given that much memory; so was one repeated as often, once it was used."""
    content = torch.ones(6).numpy().tobytes()
    with pytest.raises((ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)):
        Packed.arrived(head, [Frame(content)] * frames, 1 << 20)


def test_an_item_may_be_as_large_as_a_line_allows_and_no_larger() -> None:
    packed = Packed.of(Item(ASK, FACTS[ASK], (torch.ones(100), torch.ones(3))))
    assert packed.largest == 400
    assert same(travelled(packed, 400).item().tree, packed.item().tree)
    with pytest.raises(DataError, match="reaches over 400 bytes; at most 399 may"):
        travelled(packed, 399)
    spread = Packed.of(Item(ASK, FACTS[ASK], (torch.ones(100, 100)[:, 0], None)))
    assert (spread.size, spread.largest) == (400, 4 * (99 * 100 + 1))


def test_what_is_too_long_for_a_head_is_told_where_the_item_is_made() -> None:
    """Symptom: the thread at the socket found it, and the stage ended with it at every start, but never the line."""
    with pytest.raises(DataError, match=r"what is said beside the tensors of an item has .* bytes, more than 1048576"):
        Packed.of(Item(LAYER, {"layer": 0}, {f"a long name {number}": torch.zeros(1) for number in range(30_000)}))
