"""Thin packets: how far rounding is off, that it happens once, and that what is not finite stays so."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeal.core.options import PacketFormat
from pipeal.core.rng import keyed
from pipeal.core.thin import Thin, nearest, rounded, thick, thin
from pipeal.core.tree import tensors
from pipeal.core.tree_codec import put_together, taken_apart

KINDS: list[Any] = [kind for kind in get_args(PacketFormat) if kind != "as_is"]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


@st.composite
def rows(draw: st.DrawFn, dtype: torch.dtype, *, finite: bool = True) -> Tensor:
    """Rows of all magnitudes: zeros of either sign, subnormal, huge, and of very different values side by side."""
    info = torch.finfo(dtype)
    count, length = draw(st.integers(1, 4)), draw(st.one_of(st.integers(1, 9), st.sampled_from([33, 100])))
    special = [0.0, -0.0, info.tiny, -info.smallest_normal / 8, info.max, info.min, 1.0, 127.0, 1e-36, 3e38]
    if not finite:
        special += [float("nan"), float("inf"), float("-inf")]
    drawn = torch.randn(count, length, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    scale = draw(st.sampled_from([1e-44, 1e-38, 1e-36, 1e-20, 1e-3, 1.0, 1e4, 1e30, 3e37]))
    values = (drawn.double() * scale).to(dtype)
    for _ in range(draw(st.integers(0, 3))):
        row, column = draw(st.integers(0, count - 1)), draw(st.integers(0, length - 1))
        values[row, column] = torch.tensor(draw(st.sampled_from(special)), dtype=torch.float64).to(dtype)
    return values


@given(st.sampled_from(FLOATS).flatmap(rows), st.sampled_from(KINDS))
def test_what_was_rounded_once_stays_bit_for_bit(x: Tensor, kind: PacketFormat) -> None:
    """Who rounds again what has travelled, such as another transport, changes nothing."""
    with keyed(0):
        once = rounded(x, kind)
        if x.element_size() < 4:  # of half precision chance finds something between two values again
            kind = nearest(kind)
        again = rounded(once, kind)
    assert once.dtype == x.dtype
    assert once.shape == x.shape
    same = once.isfinite()
    assert torch.equal(same, again.isfinite())
    assert bits(once[same]) == bits(again[same])


@given(st.sampled_from(FLOATS).flatmap(rows), st.sampled_from(KINDS))
def test_a_thin_tree_is_thick_again_with_the_same_bits_wherever_that_is_done(x: Tensor, kind: PacketFormat) -> None:
    """What travels is plain tensors: put together elsewhere it gives what it gives here."""
    with keyed(0):
        light = thin((x, None, {"y": x}), kind)
    form, sent = taken_apart(light)
    arrived = thick(put_together(form, [tensor.clone() for tensor in sent]))
    for one, other in zip(tensors(thick(light)), tensors(arrived), strict=True):
        assert bits(one) == bits(other)


@given(st.sampled_from([torch.float32, torch.float64]).flatmap(rows))
def test_int8_is_off_by_half_a_step_of_its_row_at_most(x: Tensor) -> None:
    if x.shape[-1] < 2:
        return
    x = x.clamp(-3e38, 3e38)
    step = x.abs().amax(-1, keepdim=True).double() / 127
    off = (rounded(x, "int8").double() - x.double()).abs()
    assert bool((off <= step * (0.5 + 2e-3) + 1.5e-36).all())  # cut scales are short by up to 2^-16
    with keyed(1):
        off = (rounded(x, "int8-stochastic").double() - x.double()).abs()
    assert bool((off <= step * (1 + 2e-3) + 1.5e-36).all())


@given(st.sampled_from(FLOATS).flatmap(lambda dtype: rows(dtype, finite=False)), st.sampled_from(KINDS))
def test_what_is_not_finite_never_becomes_a_number(x: Tensor, kind: PacketFormat) -> None:
    with keyed(0):
        found = rounded(x, kind)
    wrong = ~x.isfinite()
    assert bool((~found[wrong].isfinite()).all())
    if isinstance(thin(x, nearest(kind)), Thin) and kind != "bf16":
        spoilt = wrong.any(-1) | (x.double().abs() > torch.finfo(torch.float32).max).any(-1)
        assert torch.equal(found.isnan().any(-1), spoilt)
        assert torch.equal(found.isnan().all(-1), spoilt)


def test_zeros_and_ones_are_exact() -> None:
    """A mask of float32, say."""
    mask = (torch.rand(5, 7) > 0.5).float()
    for kind in KINDS:
        assert torch.equal(rounded(mask, kind), mask)


def test_what_is_small_becomes_zero_and_nothing_else() -> None:
    """Steps of a subnormal scale would be lost where subnormal numbers are flushed."""
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([[1.4e-36, -1e-40], [1.6e-36, 0.0]], dtype=dtype)
        assert rounded(x, "int8")[0].tolist() == [0.0, 0.0]
        assert float(rounded(x, "int8")[1, 0]) == pytest.approx(1.6e-36)


def test_no_draw_moves_what_was_rounded() -> None:
    """A whole number of steps is found a hair above or below, and the highest and the lowest draw must not reach it."""
    x = torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    with keyed(0):
        for _ in range(5):
            once = rounded(x, "int8-stochastic")
            assert bits(rounded(once, "int8-stochastic")) == bits(once)


def test_chance_is_right_in_the_mean_and_keyed() -> None:
    x = torch.linspace(-1, 1, 64).expand(2000, 64)
    with keyed(7, 1, 3):
        once = rounded(x, "int8-stochastic")
    with keyed(7, 1, 3):
        assert torch.equal(once, rounded(x, "int8-stochastic"))
    with keyed(7, 1, 4):
        assert not torch.equal(once, rounded(x, "int8-stochastic"))
    step = 1 / 127
    assert float((once.mean(0) - x[0]).abs().max()) < 5 * step / 2 / 2000**0.5  # 5 standard errors, at most
    assert float((rounded(x, "int8").mean(0) - x[0]).abs().max()) > step / 3


@pytest.mark.parametrize(("kind", "share"), [("bf16", 0.5), ("int8", 0.2657), ("int8-stochastic", 0.2657)])
def test_what_travels_is_small(kind: PacketFormat, share: float) -> None:
    x = torch.randn(16, 10, 64)
    sent = sum(tensor.nbytes for tensor in tensors(thin(x, kind)))
    assert sent <= share * x.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_row_of_numbers_passes_as_it_is(kind: PacketFormat) -> None:
    kept = {
        "classes": torch.arange(6).reshape(2, 3),
        "mask": torch.rand(4, 5) > 0.5,
        "a number per sample": torch.randn(4),
        "one in a row": torch.randn(4, 1) if kind != "bf16" else torch.tensor(3.1),
        "complex": torch.randn(2, 8, dtype=torch.complex64),
        "sparse": torch.eye(8).to_sparse(),
        "empty": torch.randn(4, 0) if kind != "bf16" else torch.randn(0),
        "text": "left alone",
    }
    assert thin(kept, kind) is kept
    if kind == "bf16":  # bf16 would take precision from fp16, and no bytes
        half = torch.randn(4, 64, dtype=torch.float16)
        assert thin(half, kind) is half


@pytest.mark.parametrize("kind", KINDS)
def test_trees_keep_their_form_and_share_what_is_not_rounded(kind: PacketFormat) -> None:
    @dataclasses.dataclass(frozen=True)
    class Graph:
        nodes: Tensor
        count: int

        def __post_init__(self) -> None:
            assert self.nodes.shape == (3, 8)

    classes = torch.arange(3)
    tree = (Graph(torch.randn(3, 8), 3), [classes, {"wide": torch.randn(2, 3, 9).transpose(1, 2)}], None)
    with keyed(0):
        found = rounded(tree, kind)
    assert found[0].count == 3
    assert found[1][0] is classes
    assert found[1][1]["wide"].stride() == tree[1][1]["wide"].stride()  # type: ignore[index, call-overload]
    assert found[2] is None
    assert found[0].nodes is not tree[0].nodes
    assert thin(tree, "as_is") is tree


def test_gradients_do_not_come_back_through_it() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    assert not rounded(x * 2, "int8").requires_grad
