"""One fused call for all optimizers of a layer gives the bits of their own steps, and leaves alone what is more."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal.methods.al import TouchedAdam
from pipeal.methods.fused import _rows_of, step_and_clear
from pipeal.methods.optimizers import open_optimizer, scale_rates

Make = Callable[..., torch.optim.Optimizer]

FUSED: dict[str, Make] = {
    "adam": partial(torch.optim.Adam, fused=True),
    "adamw": partial(torch.optim.AdamW, fused=True, weight_decay=0.1),
    "decayed": partial(torch.optim.Adam, fused=True, weight_decay=0.01, betas=(0.8, 0.95), eps=1e-5),
    "rising": partial(torch.optim.Adam, fused=True, maximize=True),
}
OTHERS: dict[str, Make] = {
    "amsgrad": partial(torch.optim.Adam, fused=True, amsgrad=True),
    "foreach": partial(torch.optim.Adam, foreach=True),
    "plain": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "touched": TouchedAdam,
}


def sides(kinds: Sequence[Make], sizes: Sequence[int]) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Modules of different sizes, each with its own optimizer and learning rate."""
    modules = [nn.Sequential(nn.Linear(size, size + 1), nn.Linear(size + 1, 2)) for size in sizes]
    rates = (1e-2, 1e-2, 3e-3)
    return [
        (module, open_optimizer(kind, module, rate)) for module, kind, rate in zip(modules, kinds, rates, strict=False)
    ]


def state(made: Sequence[tuple[nn.Module, torch.optim.Optimizer]]) -> list[Tensor]:
    found: list[Tensor] = []
    for module, optimizer in made:
        weights = [*module.parameters()]
        found += [one.detach().clone() for one in weights]
        for weight in weights:
            found += [torch.as_tensor(value).clone() for _, value in sorted(optimizer.state.get(weight, {}).items())]
    return found


@given(
    kinds=st.lists(st.sampled_from(sorted({**FUSED, **OTHERS})), min_size=1, max_size=3),
    missing=st.sets(st.integers(0, 11)),
    seed=st.integers(0, 2**16),
)
def test_the_bits_are_those_of_each_optimizers_own_step(kinds: list[str], missing: set[int], seed: int) -> None:
    torch.manual_seed(seed)
    ours = sides([{**FUSED, **OTHERS}[kind] for kind in kinds], (3, 5, 4))
    theirs = deepcopy(ours)
    for step in range(4):
        for made in (ours, theirs):
            torch.manual_seed(step)
            every = [one for module, _ in made for one in module.parameters()]
            for number, one in enumerate(every):
                one.grad = None if number in missing and step % 2 else torch.randn_like(one)
            scale_rates([optimizer for _, optimizer in made], 1.0 / (step + 1))
        step_and_clear([optimizer for _, optimizer in ours])
        for _, optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
        assert all(one.grad is None for module, _ in ours for one in module.parameters())
        for found, wanted in zip(state(ours), state(theirs), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", FUSED)
def test_fused_optimizers_take_the_short_way_once_they_have_states(kind: str) -> None:
    ((module, optimizer),) = sides([FUSED[kind]], (3,))
    for expected in (False, True, True):
        for one in module.parameters():
            one.grad = torch.randn_like(one)
        assert (_rows_of(optimizer) is not None) is expected
        step_and_clear([optimizer])


def told(optimizer: torch.optim.Optimizer, heard: list[Any]) -> None:
    optimizer.register_step_post_hook(lambda *_: heard.append("post"))


def wrapped(optimizer: torch.optim.Optimizer, heard: list[Any]) -> None:
    own = optimizer.step

    def step(*args: Any) -> None:
        heard.append("own")
        own(*args)

    optimizer.step = step  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("change", [told, wrapped])
def test_a_hook_or_a_wrapper_around_the_step_is_called(
    change: Callable[[torch.optim.Optimizer, list[Any]], None],
) -> None:
    ((module, optimizer),) = sides([FUSED["adam"]], (3,))
    heard: list[Any] = []
    change(optimizer, heard)
    for _ in range(3):
        for one in module.parameters():
            one.grad = torch.randn_like(one)
        step_and_clear([optimizer])
    assert len(heard) == 3


def test_states_that_were_loaded_are_those_that_learn() -> None:
    """The states' tensors are other ones after it: a row kept from before would learn into nothing."""
    torch.manual_seed(0)
    ours = sides([FUSED["adam"]], (3,))
    for step in range(4):
        for one in ours[0][0].parameters():
            one.grad = torch.randn_like(one)
        if step == 2:
            optimizer = ours[0][1]
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        step_and_clear([ours[0][1]])
    assert all(float(values["step"]) == 4 for values in ours[0][1].state.values())


def test_betas_may_be_a_list_as_a_state_has_them_that_was_read_from_text() -> None:
    made = sides([FUSED["adam"]], (3,))
    module, optimizer = made[0]
    text = json.loads(json.dumps(optimizer.state_dict()))
    optimizer.load_state_dict(text)
    assert optimizer.param_groups[0]["betas"] == [0.9, 0.999]
    for _ in range(2):
        for one in module.parameters():
            one.grad = torch.randn_like(one)
        step_and_clear([optimizer])
    assert all(float(values["step"]) == 2 for values in optimizer.state.values())


@pytest.mark.parametrize("kinds", [("adam", "adam"), ("adam", "plain"), ("plain", "adam")], ids="-".join)
def test_a_parameter_of_both_sides_is_stepped_by_one_after_the_other(
    kinds: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of a GPU writes all tensors of a call at the same time."""
    torch.manual_seed(0)
    ours = nn.Linear(3, 2)
    theirs = deepcopy(ours)
    made = {
        module: [{**FUSED, **OTHERS}[kind](module.parameters(), lr=0.1) for kind in kinds] for module in (ours, theirs)
    }
    kernel = torch._fused_adam_

    def watched(parameters: Sequence[Tensor], *rest: Any, **options: Any) -> None:
        assert len({*map(id, parameters)}) == len(parameters)
        kernel(parameters, *rest, **options)

    monkeypatch.setattr(torch, "_fused_adam_", watched)
    for step in range(3):
        for module in made:
            torch.manual_seed(step)
            for one in module.parameters():
                one.grad = torch.randn_like(one)
        step_and_clear(made[ours])
        for optimizer in made[theirs]:
            optimizer.step()
        assert all(one.grad is None for one in ours.parameters())
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_a_rate_that_is_a_tensor_is_left_to_the_optimizer() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.1), fused=True)
    for _ in range(2):
        for one in module.parameters():
            one.grad = torch.randn_like(one)
        assert _rows_of(optimizer) is None
        step_and_clear([optimizer])


def test_a_default_device_changes_no_step() -> None:
    """Symptom: under a default device of the user's, what is added to the steps of a layer on the CPU was there."""
    made = sides([FUSED["adam"]], (3,))
    module, optimizer = made[0]
    for _ in range(2):
        for weight in module.parameters():
            weight.grad = torch.ones_like(weight)
        with torch.device("meta"):
            step_and_clear([optimizer])
    assert {float(one["step"]) for one in optimizer.state.values()} == {2.0}
