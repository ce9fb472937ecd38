"""Linear maps that follow each other as one: the same answers, and never more parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeal.methods.al.codes import class_side, recode_side
from pipeal.methods.al.folding import folded
from pipeal.methods.al.place_codes import ClassCodes, OnwardCodes
from pipeal.models import CharDims, VisionDims, build_language, build_vision

pytestmark = pytest.mark.usefixtures("one_thread")


def count(modules: Any) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    biases=st.lists(st.booleans(), min_size=5, max_size=5),
    between=st.lists(st.booleans(), min_size=5, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_a_row_of_maps_gives_the_same_in_no_more_parameters(
    widths: list[int], biases: list[bool], between: list[bool]
) -> None:
    torch.manual_seed(sum(widths))
    row: list[nn.Module] = []
    for before, after, bias, tanh in zip(widths, widths[1:], biases, between, strict=False):
        row.append(nn.Sequential(nn.Linear(before, after, bias=bias), *([nn.Tanh()] if tanh else [])))
    found, x = folded(row), torch.randn(4, 3, widths[0])
    if found is None:
        return
    assert count(found) <= count(row)
    torch.testing.assert_close(nn.Sequential(*found)(x), nn.Sequential(*row)(x))


def test_maps_with_something_between_or_seen_stay_apart() -> None:
    assert folded([nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 9)]) is None
    assert folded([nn.Linear(9, 2), nn.Linear(2, 9)]) is None, "they are smaller apart"
    seen = nn.Linear(9, 9)
    seen.register_forward_hook(lambda *_: None)
    assert folded([nn.Linear(9, 9), seen]) is None
    nothing = nn.Identity()
    nothing.register_forward_hook(lambda _, __, out: out * 100)
    assert folded([nn.Linear(9, 9), nothing, nn.Linear(9, 9)]) is None
    assert len(folded([nothing, nn.Linear(9, 9), nn.Linear(9, 9)]) or []) == 2, "and it is still there"
    own = nn.Linear(9, 9)
    vars(own)["forward"] = lambda x: x
    assert folded([nn.Linear(9, 9), own]) is None
    assert folded([nn.Linear(9, 9), nn.Linear(9, 9, dtype=torch.float64)]) is None
    assert folded([ClassCodes(5, 8, class_dim=1).h, nn.Linear(5, 5)]) is None, "its classes are elsewhere"
    assert len(folded([nn.Linear(9, 9), nn.Identity(), nn.Linear(9, 9)]) or []) == 1


@pytest.mark.parametrize("codes", [True, False])
def test_label_decoders_are_one_map(codes: bool) -> None:
    first, onward = (ClassCodes(5, 16), OnwardCodes(16, 16)) if codes else (class_side(5, 16), recode_side(16, 16))
    row, x = [onward.h, first.h], torch.randn(3, 16)
    found = folded(row)
    assert found is not None
    assert [tuple(map_.weight.shape) for map_ in found] == [(5, 16)]  # type: ignore[arg-type]
    torch.testing.assert_close(found[0](x), first.h(onward.h(x)))


def test_with_codes_what_answers_is_as_large_as_the_network_by_backpropagation() -> None:
    torch.manual_seed(0)
    dims = VisionDims(size=16, width=0.1, code=40, labels="codes")
    package, network = (build_vision("resnet", mode, classes=7, dims=dims) for mode in ("al", "bp"))
    sizes = CharDims(layers=2, width=16, heads=2, block=6)
    texts, alone = (build_language("charlm", mode, characters=11, dims=sizes) for mode in ("al", "bp"))
    for ours, other, x in (
        (package, network, torch.randn(2, 3, 16, 16)),
        (texts, alone, torch.randint(11, (2, 6))),
    ):
        assert count([ours.to_bp()]) == other.effective_parameters() < ours.effective_parameters()
        torch.testing.assert_close(ours.to_bp()(x), ours.eval().infer(x))
