"""Grouping changes no answer and no gradient: laws over random lengths, thresholds and models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeal.core.tree import tensors
from pipeal.data.grouping import (
    AnnotatedModule,
    DataCollection,
    Grouper,
    LengthThresholdGrouper,
    PredefinedConsecutiveGrouper,
    UniGrouper,
)

from .models import TEXT_MODELS, Pairs, pairs, texts

some_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=8)
some_thresholds = st.sets(st.integers(1, 9), min_size=1, max_size=4).map(sorted)


def outcome(module: AnnotatedModule, batch: DataCollection, *groupers: Grouper) -> list[Tensor]:
    """Outputs as one padded batch in the order of the samples, then all gradients; through several groupings."""
    first, *others = groupers
    batch.group(first)
    for grouper in others:
        batch.regroup(grouper)
    out = batch.apply(module)
    out.regroup(UniGrouper())
    found = tensors(out.data_groups[0].value)
    module.zero_grad()
    # A weight of its own for each number: a sum alone would not notice samples that changed places.
    weights = [torch.linspace(-1, 1, tensor.numel(), device=tensor.device).view(tensor.shape) for tensor in found]
    sum((tensor * weight).sum() for tensor, weight in zip(found, weights, strict=True)).backward()
    return [*found, *(parameter.grad for parameter in module.parameters() if parameter.grad is not None)]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TEXT_MODELS)
@given(lengths=some_lengths, thresholds=some_thresholds, seed=st.integers(0, 99))
def test_outputs_and_gradients_are_those_of_the_ungrouped_batch(
    name: str, lengths: list[int], thresholds: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    module = TEXT_MODELS[name]()
    wanted = outcome(module, texts(lengths, seed), UniGrouper())
    grouped = outcome(module, texts(lengths, seed), LengthThresholdGrouper("sequence", thresholds))
    assert_same(grouped, wanted)
    singly = outcome(module, texts(lengths, seed), PredefinedConsecutiveGrouper([1] * len(lengths)), UniGrouper())
    assert_same(singly, wanted)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6),
    thresholds=some_thresholds,
    seed=st.integers(0, 99),
)
def test_two_length_dimensions(sizes: list[tuple[int, int]], thresholds: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    module = Pairs()
    wanted = outcome(module, pairs(sizes, seed), UniGrouper())
    grouped = outcome(
        module,
        pairs(sizes, seed),
        LengthThresholdGrouper("answer", thresholds),
        LengthThresholdGrouper("query", thresholds),
    )
    assert_same(grouped, wanted)


@given(sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=5))
def test_the_mask_of_two_lengths_is_true_where_both_are_inside(sizes: list[tuple[int, int]]) -> None:
    """Symptom (asym): padding of one text counted wherever the other was inside. Cause: *any* in the place of *all*."""
    batch = pairs(sizes)
    batch.group(UniGrouper())
    mask = batch.get_mask(0, ["query", "answer"])
    turned = batch.get_mask(0, ["answer", "query"])
    copied = batch.get_mask(0)
    assert torch.equal(turned, mask.transpose(1, 2))
    assert torch.equal(copied, mask.unsqueeze(-1).expand(copied.shape))
    for row, (left, right) in zip(mask, sizes, strict=True):
        wanted = torch.zeros_like(row)
        wanted[:left, :right] = True
        assert torch.equal(row, wanted)


@given(lengths=some_lengths, thresholds=some_thresholds)
def test_the_gradient_of_a_sample_does_not_come_from_padding(lengths: list[int], thresholds: list[int]) -> None:
    """What a module gives on padding is cut away: were it infinite, no gradient would show it."""

    class Wild(TEXT_MODELS["linear"]):  # type: ignore[misc]
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.linear(x).masked_fill(~mask.unsqueeze(-1), torch.inf)

        def get_output_annot(self) -> str:
            return "(b, l_seq, m_out)"

    found = outcome(Wild(), texts(lengths), LengthThresholdGrouper("sequence", thresholds), UniGrouper())
    assert all(tensor.isfinite().all() for tensor in found)


@pytest.mark.cuda
def test_on_a_gpu() -> None:
    lengths = [3, 1, 7, 2, 7]
    module = TEXT_MODELS["attention"]().cuda()
    wanted = outcome(module, texts(lengths).to_device("cuda"), UniGrouper())
    found = outcome(module, texts(lengths).to_device("cuda"), LengthThresholdGrouper("sequence", [2, 4]))
    assert all(tensor.is_cuda for tensor in found)
    assert_same(found, wanted)
