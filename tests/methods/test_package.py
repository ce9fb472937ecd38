"""A package: an ordered row of layers that can be counted, indexed, cut, copied and saved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC, ALPackage, LabelAE, PlacementError

X, Y = torch.ones(4, 6), torch.tensor([0, 1, 2, 1])


def package(depth: int = 4) -> ALPackage:
    torch.manual_seed(0)
    first = LabelAE(nn.Linear(3, 5), nn.Linear(5, 3), 3)
    sides = [first, *(AE(nn.Linear(5, 5), nn.Linear(5, 5)) for _ in range(depth - 1))]
    return ALPackage([AL(ENC(nn.Linear(6, 6), nn.Linear(6, 5)), side) for side in sides])


def test_it_is_ordered_iterable_and_indexable() -> None:
    model = package()
    layers = list(model)
    assert len(model) == len(layers) == 4
    assert [model[index] for index in range(4)] == layers
    assert model[-1] is layers[-1]
    with pytest.raises(IndexError):
        model[4]


def test_a_slice_is_a_package_of_the_same_layers() -> None:
    model = package()
    part = model[1:3]
    assert isinstance(part, ALPackage)
    assert list(part) == [model[1], model[2]]
    assert list(model[::2]) == [model[0], model[2]]
    with pytest.raises(PlacementError, match="at least one layer"):
        model[4:]


def test_one_layer_twice_is_refused() -> None:
    """``children()`` names a module once: the package would be shorter than it says, or train it twice."""
    layer = package(1)[0]
    with pytest.raises((PlacementError, TypeError)):
        ALPackage([layer, layer])


@pytest.mark.parametrize("exit_at", [1, 2, 3, 4, None])
def test_infer_takes_every_exit(exit_at: int | None) -> None:
    model, value = package(), X
    depth = exit_at or 4
    for layer in list(model)[:depth]:
        value = layer.enc.f(value)
    value = model[depth - 1].enc.b(value)
    for layer in list(model)[:depth][::-1]:
        value = layer.ae.h(value)
    assert torch.equal(model.infer(X, exit_at), value)
    assert value.shape == (4, 3)


@pytest.mark.parametrize("exit_at", [0, 5, -1])
def test_an_exit_that_does_not_exist(exit_at: int) -> None:
    with pytest.raises(PlacementError, match=f"exit {exit_at} does not exist; this package has exits 1 to 4"):
        package().infer(X, exit_at)


def test_losses_are_reported_by_layer() -> None:
    model = package()
    assert model.losses() == [()] * 4
    model(X, Y)
    found = model.losses()
    assert [len(row) for row in found] == [2] * 4
    assert found == [tuple(value.item() for value in layer.loss() or ()) for layer in model]


def test_learning_rates_of_all_layers() -> None:
    model = package()
    model.set_lr("ae", 0.5)
    model.scale_lr(0.5)
    assert {layer.ae_opt.param_groups[0]["lr"] for layer in model} == {0.25}
    assert {layer.enc_opt.param_groups[0]["lr"] for layer in model} == {0.0005}


def test_set_lr_takes_an_iterator_of_sides() -> None:
    model = package()
    model.set_lr(iter(("enc", "ae")), 0.5)
    assert all(group["lr"] == 0.5 for layer in model for group in layer.ae_opt.param_groups)


def test_every_parameter_is_effective_or_affiliated() -> None:
    model = package()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert model.effective_parameters() + model.affiliated_parameters() == total
    used = [p for layer in model for block in (layer.enc.f, layer.ae.h) for p in block.parameters()]
    used += list(model[-1].enc.b.parameters())
    assert model.effective_parameters() == sum(parameter.numel() for parameter in used)


def test_a_loaded_package_answers_as_the_saved_one() -> None:
    model, other = package(), ALPackage([copy.deepcopy(layer) for layer in package()])
    model(X, Y)
    model.backward()
    model.update()
    assert not torch.equal(other.infer(X), model.infer(X))
    assert other.load_state_dict(model.state_dict()) == nn.modules.module._IncompatibleKeys([], [])
    assert torch.equal(other.infer(X), model.infer(X))


def test_a_deep_copy_is_independent() -> None:
    model = package()
    twin = copy.deepcopy(model)
    before = model.infer(X)
    twin(X, Y)
    twin.backward()
    twin.update()
    assert torch.equal(model.infer(X), before)
    assert not torch.equal(twin.infer(X), before)


def test_a_package_needs_a_layer_and_layers_are_modules() -> None:
    with pytest.raises(PlacementError, match="needs at least one layer"):
        ALPackage([])
    with pytest.raises(TypeError, match=r"expected a layer that is an nn\.Module"):
        ALPackage([object()])  # type: ignore[list-item]
