"""What heads look ahead to: which units are copied, and what each copy reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal.core.errors import ConfigError
from pipeal.methods import Network, al
from pipeal.methods.lookahead import Ahead, Repeated, sampled
from pipeal.methods.network import Part, Unit
from pipeal.models.charlm import CharDims, CharLM
from pipeal.models.text import LSTM, TextDims, Transformer
from pipeal.models.vision import VGG, Resnet, VisionDims

IMAGES: dict[str, Any] = {"size": 16, "width": 0.05, "hidden": 8, "code": 6}
WORDS: dict[str, Any] = {"embedding": 12, "hidden": 8, "code": 6, "heads": 3, "dropout": 0.0}
PLAIN = {"charlm": "linear"}


@given(count=st.integers(1, 60), depth=st.integers(1, 60), below=st.integers(0, 60))
def test_units_are_spaced_as_the_paper_spaces_them(count: int, depth: int, below: int) -> None:
    """By its code, unit ``l`` of ``n`` has ``n - 1 - l`` to come; ties apart, it does not matter which ``l`` it is."""
    layer, layers = below, below + count + 1
    if depth >= layers - 1 - layer:
        wanted = list(range(layer + 1, layers))
    else:
        wanted = [round(layer + (layers - layer - 1) / depth * i) for i in range(1, depth + 1)]
    found = [layer + 1 + place for place in sampled(count, depth)]
    assert len(found) == min(count, depth) == len(set(found))
    assert found[-1] == layers - 1
    for i, (one, other) in enumerate(zip(found, wanted, strict=True), 1):
        tie = 2 * count * i % (2 * depth) == depth
        assert one == other or (tie and one == other + 1)


def units(*widths: int) -> list[Unit]:
    """Linear maps, each to a width of its own; copies say which unit they are of."""

    def unit(number: int, width: int) -> Unit:
        def fresh(given: Tensor, times: float) -> tuple[nn.Module, Tensor]:
            made: Any = nn.Linear(given.shape[1], round(width * times))
            made.number = number
            return made, torch.empty(1, made.out_features, device="meta")

        return Unit(list, torch.empty(1, width, device="meta"), fresh)

    return [unit(number, width) for number, width in enumerate(widths)]


def part(features: Tensor, *ahead: list[Unit]) -> Part:
    return Part(nn.Identity(), 0, features, (), features, 0, nn.Identity(), ahead)


@pytest.mark.parametrize(
    ("depth", "wanted"), [(None, [0, 2, 3]), (1, [5]), (2, [2, 5]), (3, [1, 3, 5]), (6, range(6)), (9, range(6))]
)
@pytest.mark.parametrize("times", [1.0, 0.5])
def test_each_copy_reads_what_the_one_before_gives(depth: int | None, wanted: list[int], times: float) -> None:
    row = units(4, 6, 8, 10, 12, 14)
    below = part(torch.empty(1, 5, device="meta"), row[:2], row[2:3], row[3:])
    copies, features = Ahead(depth, times).of(below)
    assert [copy.number for copy in copies] == list(wanted)
    assert nn.Sequential(*copies)(torch.zeros(3, 5)).shape == (3, features.shape[1])
    assert features.shape == (1, round((4 + 2 * wanted[-1]) * times))


def test_what_cannot_be() -> None:
    features = torch.empty(1, 5, device="meta")
    assert Ahead().of(part(features)) == ([], features)
    with pytest.raises(ConfigError, match="depth is 0; expected a whole number, at least 1"):
        Ahead(depth=0)
    for width in (0.0, float("nan"), 1e9):  # the last one filled the memory
        with pytest.raises(ConfigError, match=r"width is .*; expected a number above 0 and at most 64"):
            Ahead(width=width)
    with pytest.raises(ConfigError, match="a block still to come reads the network's input"):
        Ahead().of(part(features, [Unit(list, features)]))


NETWORKS: dict[str, Callable[[Ahead, Any], Network]] = {
    "vgg": lambda ahead, kind: VGG.network(3, dims=VisionDims(**IMAGES, ahead=ahead, bridges=kind)),
    "resnet": lambda ahead, kind: Resnet.network(3, dims=VisionDims(**IMAGES, ahead=ahead, bridges=kind)),
    "lstm": lambda ahead, kind: LSTM.network(9, 3, dims=TextDims(**WORDS, ahead=ahead, bridges=kind)),
    "transformer": lambda ahead, kind: Transformer.network(9, 3, dims=TextDims(**WORDS, ahead=ahead, bridges=kind)),
    "charlm": lambda ahead, kind: CharLM.network(9, dims=CharDims(layers=4, ahead=ahead, bridges=kind)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("ahead", [Ahead(), Ahead(depth=2, width=0.5), Ahead(shared=True)], ids=["all", "thin", "one"])
def test_bridges_of_al_look_ahead_and_learn(name: str, ahead: Ahead) -> None:
    """Copies learn by the associated loss; the last bridge, which answers take at the top, is as without them."""
    torch.manual_seed(0)
    layers = list(al.make_layers(NETWORKS[name](ahead, "lookahead"), 1e-3, None))
    plain = list(al.make_layers(NETWORKS[name](ahead, PLAIN.get(name, "pooled")), 1e-3, None))
    counts = [[sum(p.numel() for p in one.blocks()["b"].parameters()) for one in form] for form in (layers, plain)]
    assert all(one > other for one, other in zip(counts[0][:-1], counts[1][:-1], strict=True))
    assert counts[0][-1] == counts[1][-1]
    x: Any = torch.randn(4, 3, 16, 16) if name in ("vgg", "resnet") else torch.randint(1, 9, (4, 6))
    y: Any = torch.randint(0, 9, (4, 6)) if name == "charlm" else torch.tensor([0, 1, 2, 0])
    before = [[p.detach().clone() for p in one.blocks()["b"].parameters()] for one in layers]
    for layer in layers:
        x, y = layer(x, y)
        layer.backward()
        assert all(p.grad is not None for p in layer.blocks()["b"].parameters()), "each copy is on the way to the loss"
        layer.update()
    moved = [
        any(not torch.equal(p, q) for p, q in zip(one.blocks()["b"].parameters(), old, strict=True))
        for one, old in zip(layers, before, strict=True)
    ]
    assert all(moved)


def test_shared_copies_are_one_block_gone_through_as_often_as_there_are_copies() -> None:
    (unit,) = next(NETWORKS["charlm"](Ahead(), "linear").parts()).ahead[0]
    features = torch.empty(1, 1, 32, device="meta")
    below = part(features, *[[unit]] * 3)
    apart, _ = Ahead().of(below)
    (together,), given = Ahead(shared=True).of(below)
    assert isinstance(together, Repeated)
    assert together.times == len(apart) == 3
    x = torch.randn(2, 5, 32)
    assert torch.equal(together.eval()(x), together.block(together.block(together.block(x))))
    assert given.shape == features.shape
    thin, given = Ahead(width=0.5, shared=True).of(below)
    assert [type(one) for one in thin[1:]] == [Repeated], "the first of them reads wider features"
    assert given.shape[-1] == 16
