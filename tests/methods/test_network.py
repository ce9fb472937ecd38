"""Networks as methods take them: units, the parts that they are grouped into, and fresh copies of units."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import pytest
import torch

from pipeal.config.methods import MethodsConfig
from pipeal.core.errors import ConfigError
from pipeal.core.methods import METHODS
from pipeal.core.tree import Tree, tensors
from pipeal.methods import Network, make_layers
from pipeal.methods.network import part_sizes
from pipeal.models.charlm import CharDims, CharLM
from pipeal.models.text import LSTM, TextDims, Transformer
from pipeal.models.vision import VGG, Resnet, VisionDims

TEXT = {"embedding": 12, "hidden": 8, "code": 6, "heads": 3, "dropout": 0.0}


def network(name: str, parts: int | None = None) -> Network:
    vision = VisionDims(size=16, width=0.05, hidden=8, code=6, parts=parts)
    text = TextDims(**TEXT, parts=parts)  # type: ignore[arg-type]
    made = {
        "vgg": lambda: VGG.network(3, dims=vision),
        "resnet": lambda: Resnet.network(3, dims=vision),
        "lstm": lambda: LSTM.network(9, 3, dims=text),
        "transformer": lambda: Transformer.network(9, 3, dims=text),
        "charlm": lambda: CharLM.network(9, dims=CharDims(block=5, width=12, layers=4, parts=parts)),
    }
    return made[name]()


def sample(name: str) -> torch.Tensor:
    if name in ("vgg", "resnet"):
        return torch.randn(2, 3, 16, 16)
    return torch.randint(1, 9, (2, 5))


MODELS = {"vgg": 6, "resnet": 9, "lstm": 4, "transformer": 4, "charlm": 4}
"""With how many units each has."""


@pytest.mark.parametrize("name", MODELS)
def test_parts_group_units_as_evenly_as_can_be_and_end_with_the_features_that_they_say(name: str) -> None:
    for count in range(1, MODELS[name] + 1):
        torch.manual_seed(0)
        x: Tree = sample(name)
        parts = list(network(name, count).parts())
        assert len(parts) == count
        assert max(network(name, count).sizes) - min(network(name, count).sizes) <= 1
        for number, part in enumerate(parts):
            x = part.f(x)
            assert [one.shape[1:] for one in tensors(x) if one.dim() == 4] == [
                one.shape[1:] for one in tensors(part.features) if one.dim() == 4
            ], "of images, the channels and the sides"
            assert tensors(x)[0].shape[-1] == tensors(part.features)[0].shape[-1]
            assert part.pool(x).shape[-1] == part.width
            assert (part.number, len(part.ahead)) == (number, count - number - 1)
            assert all(unit.fresh is not None for group in part.ahead for unit in group)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_weights_learn_in_however_many_parts(name: str) -> None:
    """Grouping makes no other network: of a seed, all units drawn in order give the same features at the top."""
    tops = []
    for count in (1, 2, MODELS[name]):
        torch.manual_seed(0)
        x = sample(name)
        torch.manual_seed(1)
        for part in network(name, count).parts():
            x = part.f.eval()(x)
        tops.append(x)
    assert all(
        torch.equal(one, other) for top in tops[1:] for one, other in zip(tensors(top), tensors(tops[0]), strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [1.0, 0.5])
def test_fresh_copies_read_other_features_and_give_what_they_say(name: str, width: float) -> None:
    torch.manual_seed(0)
    x: Tree = sample(name)
    for part in network(name, MODELS[name]).parts():
        x = part.f(x)
        given, features = x, part.features
        for (unit,) in part.ahead:
            assert unit.fresh is not None
            block, features = unit.fresh(features, width)
            given = block(given)
            of_features, of_given = tensors(features)[0], tensors(given)[0]
            wide = 1 if of_given.dim() == 4 else -1
            assert of_features.shape[wide] == of_given.shape[wide]
            own = tensors(unit.features)[0].shape[wide]
            assert of_given.shape[wide] <= own if width < 1 else of_given.shape[wide] == own
            given_own = {id(one) for one in part.f.parameters()}
            assert not given_own & {id(one) for one in block.parameters()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_every_method_has_a_layer_for_each_part(name: str, method: str) -> None:
    for count in (2, 3):
        try:
            layers = list(make_layers(method, network(name, count)))
        except ConfigError as error:  # a method need not be for every kind of data, but says so
            refused = str(error)
            layers = []
        assert (
            METHODS[method].label in refused
            if not layers
            else len(layers) == (1 if METHODS[method].is_whole else count)
        )


def test_more_parts_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="parts is 10; expected 1 to 9: the network has 9 blocks"):
        network("resnet", 10)
    with pytest.raises(ConfigError, match="per_layer is 2 and parts 2; expected one of them alone"):
        CharDims(per_layer=2, parts=2)
    assert part_sizes(7, 3) == [3, 2, 2]


@pytest.mark.parametrize("section", [one.name for one in fields(MethodsConfig)])
def test_options_of_a_method_have_the_defaults_of_its_layers(section: str) -> None:
    """A key that the method does not know, or another default of it, would go unseen."""
    configured: Any = getattr(MethodsConfig(), section)
    module = import_module(f"pipeal.methods.{section}")
    known = {
        name: one.default
        for name, one in signature(module.make_layers).parameters.items()
        if one.kind is Parameter.KEYWORD_ONLY
    }
    assert {one.name: getattr(configured, one.name) for one in fields(configured)} == known
