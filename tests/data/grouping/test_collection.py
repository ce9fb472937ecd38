"""Samples into groups, groups into other groups, and back."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, DataError, ScheduleError
from pipeal.data.grouping import (
    Annotated,
    AnnotatedModule,
    CDimPadder,
    DataCollection,
    Grouper,
    LengthThresholdGrouper,
    PredefinedConsecutiveGrouper,
    PredefinedGrouper,
    UniGrouper,
    ValuePadder,
)

from .models import Linear, Pairs, pairs, texts

PROTEIN = {"protein": {"p": "(B, L_res, M_1)", "R": "(B, L_res, 3, 3)"}, "ligand": ("(B, L_atm, M_2)", "(B)")}


def complexes(sizes: list[tuple[int, int]]) -> list[Any]:
    """Nested samples with two lengths: dict, tuple, and a tensor without any length."""
    draw = torch.Generator().manual_seed(0)

    def sample(residues: int, atoms: int) -> Any:
        protein = {"p": torch.randn(residues, 2, generator=draw), "R": torch.randn(residues, 3, 3, generator=draw)}
        return {"protein": protein, "ligand": (torch.randn(atoms, 4, generator=draw), torch.tensor(residues))}

    return [sample(*size) for size in sizes]


def assert_equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@st.composite
def partitions(draw: st.DrawFn, count: int) -> list[list[int]]:
    """Any cut of any order, with empty groups among it."""
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    return [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


@given(sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6), data=st.data())
def test_any_grouping_and_back_gives_the_samples_in_order(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    samples = complexes(sizes)
    batch = DataCollection(PROTEIN, samples)
    batch.group(PredefinedGrouper(data.draw(partitions(len(sizes)))), {"protein": {"R": CDimPadder(torch.eye(3))}})
    for _ in range(2):
        batch.regroup(PredefinedGrouper(data.draw(partitions(len(sizes)))))
    direct = DataCollection(PROTEIN, samples)
    direct.group(PredefinedGrouper(batch.data_partition))
    # From groups or from samples: the same groups, padding included.
    assert_equal([group.value for group in batch.data_groups], [group.value for group in direct.data_groups])
    assert batch.length_info == direct.length_info
    batch.ungroup()
    assert_equal([sample.value for sample in batch.data_list], samples)


def test_a_group_is_padded_to_its_own_longest() -> None:
    batch = DataCollection(PROTEIN, complexes([(10, 3), (20, 6), (12, 20)]))
    batch.group(LengthThresholdGrouper("res", [15]), padding={"protein": {"R": CDimPadder(torch.eye(3))}})
    assert batch.data_partition == [[0, 2], [1]]
    short = batch.data_groups[0]
    assert short["protein"]["p"].value.shape == (2, 12, 2)
    assert short["protein"]["R"].value.shape == (2, 12, 3, 3)
    assert short["ligand"][0].value.shape == (2, 20, 4)
    assert_equal(short["protein"]["R"].value[0, 10:], torch.eye(3).expand(2, 3, 3))
    assert batch.length_info == {"res": [[10, 12], [20]], "atm": [[3, 20], [6]]}
    batch.regroup(LengthThresholdGrouper("atm", [10]))
    assert batch.data_partition == [[0, 1], [2]]
    assert batch["protein"].data_groups[0]["p"].value.shape == (2, 20, 2)
    assert batch["ligand"][1].data_groups[1].value.tolist() == [12]


def test_padding_with_a_value_reaches_every_grouping() -> None:
    batch = DataCollection("(B, L_t)", [torch.tensor([1]), torch.tensor([2, 3])], padding=ValuePadder(9))
    batch.group(UniGrouper())
    assert batch.data_groups[0].value.tolist() == [[1, 9], [2, 3]]
    batch.regroup(PredefinedGrouper([[1], [0]]))
    batch.regroup(UniGrouper(), padded_to={"t": 3})
    assert batch.data_groups[0].value.tolist() == [[1, 9, 9], [2, 3, 9]]
    assert batch.data_groups[0].value.dtype == torch.int64


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.uint8, -1),
        (torch.int8, 128),
        (torch.int64, 2.0**70),
        (torch.int64, 0.5),
        (torch.int64, -math.inf),
        (torch.int64, math.nan),
        (torch.bool, 2),
        (torch.float16, 1e9),
    ],
)
def test_padding_that_the_type_does_not_have_is_named(dtype: torch.dtype, value: float) -> None:
    """Symptom: -1 in uint8 was an error of the operator at the first group, and 255 at the next."""
    batch = DataCollection("(B, L_t)", [torch.ones(1, dtype=dtype), torch.ones(2, dtype=dtype)])
    with pytest.raises(DataError, match=r"does not fit a tensor of torch"):
        batch.group(UniGrouper(), ValuePadder(value))
    batch.group(PredefinedGrouper([[0], [1]]))
    with pytest.raises(DataError, match=r"does not fit a tensor of torch"):
        batch.regroup(UniGrouper(), ValuePadder(value))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, -math.inf), (torch.bfloat16, 1e30), (torch.uint8, 255.0), (torch.bool, True), (torch.int8, -128)],
)
def test_padding_at_the_ends_of_a_type(dtype: torch.dtype, value: float) -> None:
    batch = DataCollection("(B, L_t)", [torch.ones(1, dtype=dtype), torch.ones(2, dtype=dtype)])
    batch.group(UniGrouper(), ValuePadder(value))
    assert_equal(batch.data_groups[0].value[0, 1], torch.tensor(value, dtype=dtype))


def test_samples_without_any_position() -> None:
    batch = DataCollection("(B, L_t)", [torch.ones(0), torch.ones(2), torch.ones(0)])
    batch.group(LengthThresholdGrouper("t", [1]))
    assert [tuple(group.value.shape) for group in batch.data_groups] == [(2, 0), (1, 2)]
    assert batch.get_mask(0).shape == (2, 0)
    batch.regroup(UniGrouper())
    assert batch.data_groups[0].value.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_the_batch_may_be_any_dimension() -> None:
    batch = DataCollection("(L_t, B, M_d)", [torch.ones(1, 2), torch.ones(3, 2)])
    batch.group(PredefinedGrouper([[1], [0]]))
    batch.regroup(UniGrouper())
    assert batch.data_groups[0].value[..., 0].tolist() == [[1, 1], [0, 1], [0, 1]]
    assert batch.get_mask(0, ["t"]).tolist() == [[True, False, False], [True, True, True]]


def test_the_order_may_be_forgotten() -> None:
    batch = texts([3, 1, 2])
    first = batch.data_list[1].value
    batch.group(LengthThresholdGrouper("sequence", [1, 2]), forget_order=True)
    assert batch.data_partition == [[0], [1], [2]]
    batch.ungroup()
    assert [len(sample.value) for sample in batch.data_list] == [1, 2, 3]
    assert_equal(batch.data_list[0].value, first)


def test_outputs_nested_in_other_ways_come_back_in_order() -> None:
    sizes = [(2, 3), (1, 1), (4, 2), (1, 5)]
    batch = pairs(sizes)
    batch.group(LengthThresholdGrouper("query", [1, 2]))
    assert batch.data_partition == [[1, 3], [0], [2]]  # one group of one sample
    out = batch.apply(Pairs())
    out.ungroup()
    for sample, (left, right) in zip(out.data_list, sizes, strict=True):
        value = sample.value
        assert value["pairs"].shape == (left, right, 3)
        assert [tuple(part.shape) for part in value["sums"]] == [(left, 3), (right, 3)]
        torch.testing.assert_close(value["sums"][0], value["pairs"].sum(1))


def test_keys_and_masks_in_the_modules_names() -> None:
    class Product(AnnotatedModule):
        def forward(self, x: Any, mask: Any) -> Any:
            assert {key: tuple(part.shape) for key, part in mask["objects"].items()} == {
                key: tuple(part.shape) for key, part in x["objects"].items()
            }
            return {"out": (x["objects"]["feature"] * mask["objects"]["feature"]).sum((1, 2))}

        def get_input_annot(self) -> Any:
            return {"objects": {"feature": "(b, .., m_1)"}}

        def get_output_annot(self) -> Any:
            return {"out": "(b)"}

        def get_mask_hint(self) -> Any:
            return "copy"

    samples = complexes([(2, 1), (3, 2)])
    batch = DataCollection(PROTEIN, samples)
    batch.group(UniGrouper())
    names = {"protein": ("objects", {"p": ("feature", None)})}
    out = batch.apply(Product(), input_key_conv=names, output_key_conv={"out": ("energy", None)})
    found = out["energy"].data_groups[0].value
    torch.testing.assert_close(found, torch.stack([sample["protein"]["p"].sum() for sample in samples]))
    with pytest.raises(DataError, match="did you mean 'protein'"):
        batch.apply(Product(), input_key_conv={"protien": ("objects", None)})


def test_workers_may_send_collections() -> None:
    """A ``collate_fn`` that makes them runs in the loader's workers."""
    batch = DataCollection(PROTEIN, complexes([(2, 1), (3, 2)]), padding={"ligand": ValuePadder(1)})
    for _ in range(2):
        sent = pickle.loads(pickle.dumps(batch))
        assert_equal(*([data.value for data in each._as_data()] for each in (sent, batch)))
        if not batch.is_grouped:
            batch.group(UniGrouper())
            sent.group(UniGrouper())
            assert_equal(sent.data_groups[0].value, batch.data_groups[0].value)


def test_a_collection_of_groups_that_are_padded_already() -> None:
    value = torch.arange(6).view(2, 3)
    batch = DataCollection("(B, L_t)", data_groups=[value], length_info={"t": [[1, 3]]})
    batch.regroup(LengthThresholdGrouper("t", [1]))
    assert [group.value.tolist() for group in batch.data_groups] == [[[0]], [[3, 4, 5]]]
    moved = batch.to_device("cpu")
    assert len(moved) == 2
    assert_equal(moved.data_groups[1].value, value[1:])


def test_batch_normalisation_sees_the_group_in_training_and_nothing_of_it_in_evaluation() -> None:
    """What the documentation of AnnotatedModule says of it."""
    norm = Annotated(nn.BatchNorm1d(2), "(b, m_x)", "(b, m_x)")
    samples = [torch.tensor([float(n), -float(n)]) for n in range(4)]

    def outputs(*sizes: int) -> Tensor:
        batch = DataCollection("(B, M_x)", samples)
        batch.group(PredefinedConsecutiveGrouper(sizes))
        out = batch.apply(norm)
        out.regroup(UniGrouper())
        return out.data_groups[0].value.detach()

    assert not torch.allclose(outputs(2, 2), outputs(4))
    assert norm.module.num_batches_tracked == 3
    norm.eval()
    torch.testing.assert_close(outputs(2, 2), outputs(4))


class Convolution(Linear):
    """Gives fewer positions than it takes."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x)[:, 1:]

    def get_output_annot(self) -> str:
        return "(b, l_seq, m_out)"


class Given(Grouper):
    """Gives anything."""

    def __init__(self, gives: Any) -> None:
        self.gives = gives

    def partition(self, lengths: Any, count: int) -> Any:
        return self.gives


class Uneven(nn.Module):
    """Gives as many features as there are positions: another width in every group."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_ones(x.shape[:2])


def annotated(takes: Any, gives: Any = "(b)", hint: Any = None) -> Annotated:
    return Annotated(nn.Identity(), takes, gives, hint)


MISTAKES = {
    "no samples": (lambda: DataCollection("(B, L_t)", []), DataError, "no samples"),
    "neither": (lambda: DataCollection("(B, L_t)"), ConfigError, "data_list or of data_groups"),
    "no tensor": (lambda: DataCollection("(B)", [3]), DataError, r"sample 0 is an int"),
    "dimensions": (lambda: DataCollection("(B, L_t)", [torch.ones(2), torch.ones(2, 2)]), DataError, "sample 1"),
    "fixed size": (lambda: DataCollection("(B, L_t, 3)", [torch.ones(2, 2)]), DataError, r"\(2, 2\).*\(L_t, 3\)"),
    "widths": (lambda: DataCollection("(B, M_x)", [torch.ones(2), torch.ones(3)]), DataError, "only lengths"),
    "types": (lambda: DataCollection("(B)", [torch.ones(()), torch.tensor(1)]), DataError, "float32.*|int64"),
    "two lengths": (lambda: DataCollection("(B, L_t, L_t)", [torch.ones(2, 3)]), DataError, "'t' twice, as 2 and as 3"),
    "missing": (lambda: DataCollection({"word": "(B)"}, [{"wrod": torch.ones(())}]), DataError, "'word'.*mean 'wrod'"),
    "no dict": (lambda: DataCollection({"x": "(B)"}, [torch.ones(())]), DataError, "sample 0 is no dict but a Tensor"),
    "no batch": (lambda: DataCollection("(L_t)", [torch.ones(1)]), ConfigError, "one batch dimension"),
    "small letters": (lambda: DataCollection("(b, l_t)", [torch.ones(1)]), ConfigError, "'b' is no dimension"),
    "no brackets": (lambda: DataCollection("B, L_t", [torch.ones(1)]), ConfigError, "in brackets"),
    "no text": (lambda: DataCollection(3, [torch.ones(1)]), ConfigError, "holds an int"),
    "fractions": (
        lambda: DataCollection("(B, L_t)", data_groups=[torch.ones(1, 3)], length_info={"t": [[1.5]]}),
        DataError,
        "whole numbers",
    ),
    "too long": (
        lambda: DataCollection("(B, L_t)", data_groups=[torch.ones(1, 3)], length_info={"t": [[4]]}),
        DataError,
        "3 positions of 't', but a sample of 4",
    ),
    "no rows": (
        lambda: DataCollection("(B, L_t)", data_groups=[torch.ones(0, 3)], length_info={"t": [[]]}),
        DataError,
        "at least one sample in each",
    ),
    "no length_info": (lambda: DataCollection("(B, L_t)", data_groups=[torch.ones(1, 3)]), DataError, "'t'"),
    "padder": (lambda: DataCollection("(B)", [torch.ones(())], padding=0), ConfigError, "wanted a Padder"),
    "padded part": (
        lambda: DataCollection({"x": "(B)"}, [{"x": torch.ones(())}], padding={"y": ValuePadder(1)}),
        DataError,
        "unknown input 'y'",
    ),
    "grouper's length": (lambda: texts([1]).group(LengthThresholdGrouper("sequenze", [1])), DataError, "'sequence'"),
    "padded_to": (lambda: texts([1]).group(UniGrouper(), padded_to={"seq": 3}), DataError, "unknown length 'seq'"),
    "padded_to half": (
        lambda: texts([1]).group(UniGrouper(), padded_to={"sequence": 3.5}),
        ConfigError,
        "padded_to is 3.5; wanted a whole",
    ),
    "widths of groups": (
        lambda: DataCollection("(B, M_x)", data_groups=[torch.ones(1, 2), torch.ones(3, 4)]),
        DataError,
        r"group 1 has \(3, 4\) float32 on cpu for \(B, M_x\), group 0 has \(1, 2\)",
    ),
    "types of groups": (
        lambda: DataCollection("(B)", data_groups=[torch.ones(1), torch.tensor([1])]),
        DataError,
        "group 1 has .* int64",
    ),
    "no grouper": (lambda: texts([1]).group(UniGrouper), ConfigError, "wanted a Grouper"),  # type: ignore[arg-type]
    "no groups": (lambda: texts([1]).group(Given(None)), ConfigError, "gave None; wanted a list of groups"),
    "no indices": (lambda: texts([1]).group(Given([0])), ConfigError, "a group is 0; wanted a list"),
    "early": (lambda: texts([1]).apply(Linear()), ScheduleError, r"call group\(\) first"),
    "early groups": (lambda: texts([1]).data_groups, ScheduleError, "not in groups"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_data_is_named(name: str) -> None:
    make, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        make()


APPLIED = {
    "not annotated": (nn.Linear(4, 3), ConfigError, "wrap it in Annotated"),
    "other dimensions": (
        annotated("(b, l_seq)"),
        DataError,
        r"Identity takes \(b, l_seq\) .* not fit;",
    ),
    "other size": (annotated("(b, l_seq, 5)"), DataError, "not fit where l_seq is L_sequence; annotate"),
    "no such input": (annotated({"x": "(b, ..)"}), DataError, "no dict but a Shape"),
    "new length": (annotated("(b, ..)", "(b, l_new)"), ConfigError, r"takes no \(l_new\)"),
    "mask": (annotated("(b, l_seq, m_x)", "(b)", ["sequence"]), DataError, "mask of Identity.*'seq'"),
    "mask of 3": (annotated("(b, ..)", "(b, ..)", 3), ConfigError, "mask hint of Identity is 3"),
    "widths": (
        Annotated(Uneven(), "(b, l_seq, ..)", "(b, m_x)"),
        DataError,
        r"the output of Uneven has \(1, 2\) float32 on cpu for \(B, M_x\), group 0 has \(1, 1\)",
    ),
    "no tuple": (annotated("(b, ..)", ("(b, ..)", "(b)")), DataError, "output of Identity is no tuple but a Tensor"),
    "a dict": (annotated("(b, ..)", {"x": "(b, ..)"}), DataError, "output of Identity is no dict but a Tensor"),
    "output": (annotated("(b, ..)", "(b)"), DataError, r"the output of Identity has the shape \(1, 1, 4\)"),
    "shorter": (Convolution(), DataError, r"\(1, 0, 3\).*1 samples padded to {'sequence': 1}"),
}


@pytest.mark.parametrize("name", APPLIED)
def test_a_module_that_does_not_suit_is_named(name: str) -> None:
    module, kind, message = APPLIED[name]
    batch = texts([1, 2])
    batch.group(PredefinedGrouper([[0], [1]]))
    with pytest.raises(kind, match=message):
        batch.apply(module)


def test_what_is_done_out_of_order_is_named() -> None:
    batch = texts([1, 2])
    for call in (batch.ungroup, lambda: batch.regroup(UniGrouper()), lambda: batch.get_mask(0)):
        with pytest.raises(ScheduleError, match="not in groups"):
            call()
    batch.group(UniGrouper())
    with pytest.raises(ScheduleError, match="already"):
        batch.group(UniGrouper())
    with pytest.raises(ScheduleError, match="ungroup"):
        _ = batch.data_list
    assert repr(batch) == "DataCollection(2 samples, 1 groups)"
