"""The two ways to attend give one result."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeal.models.transformer import _MASKED, _attend_by_products, _attend_fused


@given(batch=st.integers(1, 3), heads=st.integers(1, 3), length=st.integers(1, 7), seed=st.integers(0, 99))
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
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)
