"""The two ways to attend give one result, and neither sees what is masked, however well it would match."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeal.models.causal import CausalAttention
from pipeal.models.transformer import _MASKED, SelfAttention, _attend_by_products, _attend_fused


@given(batch=st.integers(1, 3), heads=st.integers(1, 3), length=st.integers(1, 7), seed=st.integers(0, 99))
@example(batch=2, heads=3, length=3, seed=64)  # its largest gradient is 8.7, and one of 0.07 is off by 2.4e-6
@settings(max_examples=30, deadline=None)
def test_the_products_equal_the_fused_kernel(batch: int, heads: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(3, batch, heads, length, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    hidden = torch.rand(batch, length, generator=generator) < 0.4
    hidden[:, 0] = False
    bias = torch.zeros(batch, length, dtype=torch.float64).masked_fill_(hidden, _MASKED)
    results = []
    for attend in (_attend_fused, _attend_by_products):
        out = attend(qkv, bias)
        (grad,) = torch.autograd.grad(out.square().sum(), qkv)
        results.append((out.detach(), grad))
    (fused, fused_grad), (products, products_grad) = results
    torch.testing.assert_close(fused, products, atol=1e-6, rtol=1e-5)
    # The products' softmax is of float32, and its errors reach a gradient by the largest factor.
    torch.testing.assert_close(fused_grad, products_grad, atol=1e-6 * float(fused_grad.abs().max()), rtol=0)


def looks_at(attention: SelfAttention | CausalAttention) -> None:
    """Lets each place score another by the product of their features: those of large features outdo all others."""
    dim = attention.out.in_features
    with torch.no_grad():
        attention.qkv.weight.copy_(torch.eye(dim).repeat(3, 1))
        attention.qkv.bias.zero_()
        attention.out.weight.copy_(torch.eye(dim))
        attention.out.bias.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_is_not_seen_however_well_it_would_match(dtype: torch.dtype) -> None:
    """With scores near zero a mask of -20 is as good as any: it let through what scored 60."""
    attention = SelfAttention(4, 1)
    looks_at(attention)
    attention.to(dtype)
    words = torch.tensor([[[3.0, 0, 0, 0], [0, 3.0, 0, 0]]], dtype=dtype)
    padding = torch.full((1, 3, 4), 20.0, dtype=dtype)  # scores of 30, where the words' own are 0 and 4.5
    mask = torch.tensor([[True, True, False, False, False]])
    padded = attention(torch.cat((words, padding), 1), mask)[:, :2]
    torch.testing.assert_close(padded, attention(words, mask[:, :2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_future_is_not_seen_however_well_it_would_match(dtype: torch.dtype) -> None:
    attention = CausalAttention(4, 1)
    looks_at(attention)
    attention.to(dtype)
    past = torch.tensor([[[3.0, 0, 0, 0], [0, 3.0, 0, 0]]], dtype=dtype)
    future = torch.full((1, 3, 4), 20.0, dtype=dtype)
    seen = attention(torch.cat((past, future), 1))[:, :2]
    torch.testing.assert_close(seen, attention(past))
