"""Keyed dropout: the right share of zeros, the same mean, the same mask on the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeal import ConfigError, Dropout
from pipeal.core.rng import keyed
from pipeal.methods.dropout import dropped

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


class Operators(TorchDispatchMode):
    """Notes what is run: on a GPU each is a kernel, but for views and memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("empty", "view", "slice", "detach", "ones_like", "expand", "randn"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@given(p=st.floats(0.01, 0.99), dtype=st.sampled_from(["float32", "float64"]), key=st.integers(0, 9))
def test_on_a_gpu_the_same_bytes_drop_the_same_elements(p: float, dtype: str, key: int) -> None:
    """Its arithmetic, on a CPU: forth, back, and back once more."""
    layer, found = Dropout(p), []
    threshold = min(round(p * 256), 255)
    if threshold == 0:
        return
    for way in (layer, lambda x: dropped(x, threshold)):
        x = torch.arange(63, dtype=getattr(torch, dtype)).view(7, 9).requires_grad_()
        with keyed(key):
            out = way(x)
        (gradient,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        found.append((out, gradient, second))
    assert all(map(torch.equal, *found))


def test_on_a_gpu_dropout_keeps_a_byte_for_each_element() -> None:
    """Prediction 8 of the GPU reading: a mask of the type of the activation is kept. And no Python
    in the autograd, which took longer than the launch that it spared."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    before, after = Operators(), Operators()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        with before:
            Dropout(0.3)(torch.randn(16, 8, requires_grad=True)).sum().backward()
        with after:
            out = dropped(torch.randn(16, 8, requires_grad=True), 77)
            out.sum().backward()
    assert before.names == ["random_", "ge", "mul_", "mul", "sum", "mul"]
    assert after.names == ["random_", "ge", "mul", "mul", "sum", "mul", "mul"]
    assert kept == [4 * 128, 128]
    assert isinstance(out.grad_fn, type(torch.ones(1, requires_grad=True).mul(2).grad_fn))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_keeps_the_mean_and_the_mask(dtype: torch.dtype) -> None:
    x = torch.ones(400_000, device="cuda", dtype=dtype, requires_grad=True)
    with keyed(1, 2, 3):
        out = Dropout(0.3)(x)
    with keyed(1, 2, 3):
        again = Dropout(0.3)(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(out, again)
    assert torch.equal(x.grad, out)
    assert abs(out.double().mean().item() - 1) < 0.01
    assert len(out.unique()) == 2
