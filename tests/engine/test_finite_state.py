"""Whether what a layer has learnt is finite: weights, statistics and what optimizers keep must be, masks need not."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, BP, ENC
from pipeal.data.grouping.annotated import leave_out_of_names
from pipeal.engine import layer_state, load_layer_state
from pipeal.engine.state.layer_state import State
from pipeal.training.checkpoint.finite import not_finite_in


class Masked(nn.Module):
    """With a mask as attention has, and numbers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((3, 3), -inf).triu(1))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("small", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("tiny", torch.ones(2).to(torch.float8_e5m2))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def state() -> State:
    torch.manual_seed(0)
    layer = AL(ENC(Masked(), nn.Linear(4, 4)), AE(nn.Linear(4, 4), nn.Linear(4, 4)))
    layer(torch.randn(2, 4), torch.randn(2, 4))
    layer.backward()
    layer.update()
    return layer_state(layer)


def test_a_sound_state_is_sound() -> None:
    assert not_finite_in(state()) is None


def put(tensor: Tensor, value: float) -> None:
    tensor.view(-1)[-1] = value


BROKEN: dict[str, Callable[[State], Any]] = {
    "enc.f.linear.weight": lambda found: put(found["module"]["enc.f.linear.weight"], nan),
    "ae.h.bias": lambda found: put(found["module"]["ae.h.bias"], -inf),
    # They counted as a good checkpoint, though no later batch makes them finite again.
    "enc.f.norm.running_var": lambda found: put(found["module"]["enc.f.norm.running_var"], inf),
    "enc.f.norm.running_mean": lambda found: put(found["module"]["enc.f.norm.running_mean"], -inf),
    "enc.f.mask": lambda found: put(found["module"]["enc.f.mask"], nan),
    "enc.f.wave": lambda found: put(found["module"]["enc.f.wave"], nan),
    "enc.f.small": lambda found: put(found["module"]["enc.f.small"], nan),
    "enc.f.tiny": lambda found: found["module"].update({"enc.f.tiny": torch.tensor([nan]).to(torch.float8_e5m2)}),
    "exp_avg_sq of enc.f.linear.weight in enc_opt": lambda found: put(
        found["optimizers"]["enc_opt"]["state"]["state"][0]["exp_avg_sq"], inf
    ),
    "step of enc.f.linear.weight in enc_opt": lambda found: put(
        found["optimizers"]["enc_opt"]["state"]["state"][0]["step"], nan
    ),
    "the gradient of ae.g.bias": lambda found: found["gradients"].update({"ae.g.bias": torch.tensor([1.0, inf])}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_finite_is_named(name: str) -> None:
    found = state()
    BROKEN[name](found)
    assert not_finite_in(found) == name


class Wrapped(nn.Module):
    """Saves what it wraps under the names that this had before."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        leave_out_of_names(self, "module")

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def test_weights_whose_wrapper_left_itself_out_of_their_names_are_looked_at_and_loaded() -> None:
    """Symptom: no checkpoint of a model whose layers run grouped was written (KeyError), and before that an infinite
    weight of one passed for a mask."""

    def made() -> BP:
        return BP(nn.Sequential(Wrapped(nn.Linear(4, 4)), nn.Linear(4, 2)), nn.functional.cross_entropy)

    layer = made()
    layer(torch.randn(3, 4), torch.tensor([0, 1, 0]))
    layer.backward()
    state = layer_state(layer)  # with gradients
    assert not_finite_in(state) is None
    load_layer_state(other := made(), state)
    for mine, its in zip(layer.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]
    layer.model[0].module.weight.data[0, 0] = inf  # type: ignore[index, union-attr]
    assert not_finite_in(layer_state(layer)) == "model.0.weight"
