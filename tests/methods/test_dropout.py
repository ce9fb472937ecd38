"""Keyed dropout: the right share of zeros, the same mean, the same mask on the way back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from pipeal import ConfigError, Dropout
from pipeal.core.rng import keyed

probabilities = st.floats(0, 1, exclude_max=True)


@example(p=0.999, shape=[9], dtype="float32")  # rounded to 256/256, and divided by zero
@given(p=probabilities, shape=st.lists(st.integers(0, 5), max_size=4), dtype=st.sampled_from(["float32", "float64"]))
def test_any_probability_and_shape_gives_zeros_and_one_scaled_value(p: float, shape: list[int], dtype: str) -> None:
    x = torch.ones(shape, dtype=getattr(torch, dtype))
    with keyed(0, 0, 0):
        out = Dropout(p)(x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert torch.isfinite(out).all()
    assert len(out[out != 0].unique()) <= 1


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9, 0.99])
def test_the_rate_is_p_and_the_mean_is_kept(p: float) -> None:
    x = torch.ones(400_000)
    with keyed(1, 2, 3):
        out = Dropout(p)(x)
    nearest = round(p * 256) / 256
    spread = (nearest * (1 - nearest) / x.numel()) ** 0.5
    assert abs((out == 0).double().mean().item() - nearest) < 5 * spread
    assert abs(out.double().mean().item() - 1) < 5 * spread / (1 - nearest)


def test_neighbours_are_independent() -> None:
    """Eight elements share a draw of 64 bits: none of the eight may follow another."""
    with keyed(4, 5, 6):
        dropped = (Dropout(0.5)(torch.ones(80_000)) == 0).double().view(-1, 8)
    assert (torch.corrcoef(dropped.T) - torch.eye(8)).abs().max() < 0.05
    assert (dropped.mean(0) - 0.5).abs().max() < 0.03


@given(p=probabilities, key=st.integers(0, 100))
def test_the_mask_of_the_backward_is_that_of_the_forward(p: float, key: int) -> None:
    x = torch.full((7, 9), 3.0, requires_grad=True)
    with keyed(key):
        out = Dropout(p)(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad * 3, out.detach())


@given(p=probabilities)
def test_in_evaluation_it_is_the_identity(p: float) -> None:
    x = torch.randn(5, 3)
    assert Dropout(p).eval()(x) is x


def test_a_probability_of_zero_is_the_identity_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    x = torch.ones(5)
    assert Dropout(0.0)(x) is x
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_a_probability_that_is_none(p: float) -> None:
    with pytest.raises(ConfigError, match="expected 0 <= p < 1"):
        Dropout(p)


def test_it_takes_any_memory_layout() -> None:
    x = torch.randn(4, 6, 5)
    with keyed(1):
        plain = Dropout(0.5)(x.transpose(0, 2).contiguous())
    with keyed(1):
        strided = Dropout(0.5)(x.transpose(0, 2))
    assert torch.equal(plain, strided)


def test_the_operator_of_compiled_graphs_draws_the_same_mask() -> None:
    """Under the mode, too, that gives operators that draw a generator, or lends them the default one's place."""
    ones = torch.ones(20)
    with keyed(3, 1, 4):
        wanted = [Dropout(0.5)(ones) for _ in range(2)]
    with keyed(3, 1, 4, whole_default=True):
        for one in wanted:
            mask = torch.ops.pipeal.dropout_mask(torch.zeros(()), 20, 128, torch.float32, ones.device)
            assert torch.equal(mask, one)


@pytest.mark.parametrize("backend", ["eager", "aot_eager_decomp_partition"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_draws_the_same_masks_in_the_same_order(backend: str, dynamic: bool) -> None:
    """In one graph. A compiler takes operators on the same inputs for one, unless it is told that they are not."""
    drop = Dropout(0.3)

    def block(x: Tensor) -> tuple[Tensor, ...]:
        return drop(x), drop(x), drop(x.abs())

    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (5, 9):
        x = torch.randn(rows, 7, requires_grad=True)
        with keyed(rows):
            wanted = block(x)
        with keyed(rows):
            found = compiled(x)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert not torch.equal(found[0], found[1])
        gradients = [torch.autograd.grad(sum(some).sum(), x)[0] for some in (found, wanted)]
        torch.testing.assert_close(*gradients)


def test_outside_a_key_it_follows_the_default_generator() -> None:
    torch.manual_seed(3)
    one = Dropout(0.5)(torch.ones(64))
    two = Dropout(0.5)(torch.ones(64))
    torch.manual_seed(3)
    assert torch.equal(Dropout(0.5)(torch.ones(64)), one)
    assert not torch.equal(one, two)


def test_layers_batches_and_draws_differ() -> None:
    def mask(*key: int) -> list[float]:
        with keyed(*key):
            return [*Dropout(0.5)(torch.ones(64)).tolist(), *Dropout(0.5)(torch.ones(64)).tolist()]

    masks = [mask(seed, layer, batch) for seed in range(3) for layer in range(3) for batch in range(3)]
    halves = [tuple(half) for found in masks for half in (found[:64], found[64:])]
    assert len(set(halves)) == len(halves)
    assert mask(1, 2, 0) == masks[9 + 6]
