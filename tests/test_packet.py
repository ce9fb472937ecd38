"""Trees of tensors: mapped, cut, moved and named whatever their shape."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from bench.virtual import VirtualLayer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, BP, ENC, ALPackage
from pipeal.core.errors import DataError
from pipeal.core.modules import device_of, layers_of, module_of
from pipeal.core.packet import Packet
from pipeal.core.protocols import TrainableLayer
from pipeal.core.samples import iterate
from pipeal.core.tree import batch_size, describe, detach, map_tensors, move, shapes_of, tensors

Pair = namedtuple("Pair", "left right")

others = st.none() | st.integers() | st.text(max_size=3) | st.booleans()
leaves = st.integers(0, 9).map(lambda value: torch.full((2,), float(value), requires_grad=True)) | others
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=2).map(OrderedDict)
    ),
    max_leaves=8,
)


def leaves_of(tree: Any) -> list[Any]:
    """All leaves in order, without torch's help."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves_of(value)]
    return [leaf for value in tree for leaf in leaves_of(value)] if isinstance(tree, list | tuple) else [tree]


def test_batches_with_numbers_end_where_their_length_says() -> None:
    """A data set whose numbers go around ended no epoch."""

    class Around:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index % 3

    assert list(islice(iterate(Around()), 5)) == [0, 1, 2]
    assert list(iterate([1, 2])) == [1, 2]
    with pytest.raises(DataError, match="; call it"):
        iterate(list)  # type: ignore[arg-type]


@given(tree=trees)
def test_a_map_keeps_shape_kinds_and_other_values(tree: Any) -> None:
    doubled = map_tensors(lambda tensor: tensor * 2, tree)

    def check(before: Any, after: Any) -> None:
        assert type(before) is type(after)
        if isinstance(before, Tensor):
            assert torch.equal(before * 2, after)
        elif isinstance(before, dict):
            assert list(before) == list(after)
            for key in before:
                check(before[key], after[key])
        elif isinstance(before, list | tuple):
            assert len(before) == len(after)
            for one, two in zip(before, after, strict=True):
                check(one, two)
        else:
            assert before == after

    check(tree, doubled)


@given(tree=trees)
def test_tensors_are_all_tensors_in_order(tree: Any) -> None:
    wanted = [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]
    found = list(tensors(tree))
    assert len(found) == len(wanted)
    assert all(one is two for one, two in zip(found, wanted, strict=True))


@given(tree=trees)
def test_what_is_cut_needs_no_gradient_and_shares_memory_unless_it_is_a_weight(tree: Any) -> None:
    for before, after in zip(tensors(tree), tensors(detach(tree)), strict=True):
        assert not after.requires_grad
        assert (after.data_ptr() == before.data_ptr()) != before.requires_grad


@given(tree=trees)
def test_a_move_to_where_it_is_copies_nothing(tree: Any) -> None:
    there = torch.device("cpu")
    assert all(one is two for one, two in zip(tensors(tree), tensors(move(tree, there)), strict=True))
    assert all(tensor.is_meta for tensor in tensors(move(tree, torch.device("meta"))))


@given(tree=trees)
def test_the_batch_size_is_that_of_the_first_tensor(tree: Any) -> None:
    assert batch_size(tree) == (2 if any(True for _ in tensors(tree)) else 0)


def test_sizes_and_shapes_without_a_dimension() -> None:
    assert batch_size(torch.tensor(3.0)) == 0
    assert batch_size((torch.zeros(0, 4), torch.zeros(5))) == 0
    assert all(describe(shapes_of(tree)) == "no tensor" for tree in (None, [], (1, "a")))
    assert describe(shapes_of({"x": torch.zeros(1, dtype=torch.bfloat16), "n": 3})) == "(1,) bfloat16"


def test_a_device_is_that_of_the_first_parameter_or_buffer() -> None:
    assert device_of(nn.Linear(1, 1, device="meta")).type == "meta"
    assert device_of(nn.BatchNorm1d(2, affine=False, device="meta")).type == "meta"
    assert device_of(nn.Identity()).type == "cpu"


def side() -> AL:
    return AL(ENC(nn.Linear(1, 1), nn.Linear(1, 1)), AE(nn.Linear(1, 1), nn.Linear(1, 1)))


def test_layers_of_a_package_a_list_or_a_module_with_children() -> None:
    layers = [side(), side()]
    package = ALPackage(layers)
    plain = nn.Module()
    plain.a, plain.b = layers
    assert layers_of(package) == layers_of(layers) == layers_of(iter(layers)) == layers_of(plain) == layers


@pytest.mark.parametrize("layer", [side(), BP(nn.Linear(1, 1)), VirtualLayer(0, 0)], ids=lambda x: type(x).__name__)
def test_what_the_engine_trains(layer: TrainableLayer) -> None:
    assert isinstance(layer, TrainableLayer)
    assert module_of(layer) is layer


def test_what_the_engine_does_not_train() -> None:
    assert not isinstance(nn.Linear(1, 1), TrainableLayer)
    with pytest.raises(TypeError, match="found int"):
        module_of(3)  # type: ignore[arg-type]


def test_a_packet_cannot_be_changed_on_its_way() -> None:
    packet = Packet(3, None, None)
    assert packet.lr_scale == 1.0
    with pytest.raises(AttributeError):
        packet.batch = 4  # type: ignore[misc]


@dataclass(frozen=True)
class Record:
    """A user's own packet."""

    x: torch.Tensor
    rest: tuple[torch.Tensor, int]


def test_dataclasses_are_looked_into() -> None:
    """Symptom: gradients leaked between layers. Cause: pytree takes a dataclass for a leaf."""
    leaf = torch.ones(2, requires_grad=True)
    found = detach({"record": Record(leaf * 2, (leaf * 3, 4))})["record"]
    assert not found.x.requires_grad
    assert not found.rest[0].requires_grad
    assert found.rest[1] == 4
    assert len(tensors(found)) == 2


@dataclass(frozen=True)
class Masked:
    """One with a field that its ``__init__`` makes."""

    x: torch.Tensor
    mask: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", self.x > 0)


def test_fields_that_a_dataclass_makes_by_itself_go_along() -> None:
    """Symptom: "field mask is declared with init=False, it cannot be specified with replace()"."""
    record = Masked(torch.tensor([-1.0, 1.0]))
    object.__setattr__(record, "mask", torch.tensor([True, True]))
    found = map_tensors(lambda tensor: ~tensor if tensor.dtype == torch.bool else 2 * tensor, record)
    assert (found.x.tolist(), found.mask.tolist()) == ([-2, 2], [False, False])


def test_what_has_no_strides_is_copied_as_well() -> None:
    """Symptom: a sparse weight, or a sparse batch made in inference mode, was refused by ``as_strided``."""
    sparse = torch.eye(3).to_sparse().requires_grad_()
    found = detach(sparse)
    assert not found.requires_grad
    assert torch.equal(found.to_dense(), torch.eye(3))
    assert found.values().data_ptr() != sparse.detach().values().data_ptr()


def test_a_container_that_cannot_be_looked_into_is_refused() -> None:
    class Odd(dict[str, torch.Tensor]):
        pass

    with pytest.raises(TypeError, match=r"Odd.*register"):
        detach(Odd(x=torch.ones(1)))


@pytest.mark.cuda
def test_what_comes_from_a_gpu_is_there_when_it_is_read() -> None:
    """Symptom: the copy went into pinned memory and was not waited for; the CPU read what had been there before."""
    product = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        product = (product @ product / 64).tanh()
    moved = move((product,), torch.device("cpu"))[0].clone()
    torch.cuda.synchronize()
    assert torch.equal(moved, product.cpu())
