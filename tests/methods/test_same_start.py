"""Copies that begin as the blocks they stand for: of all blocks, they make local losses learn as BP does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeal import ALPackage, ConfigError, Pipeline
from pipeal.core.methods import METHODS
from pipeal.core.options import Precision
from pipeal.methods import Network, make_layers
from pipeal.methods.lookahead import Ahead
from pipeal.models.charlm import CharDims, CharLM
from pipeal.models.text import LSTM, TextDims, Transformer
from pipeal.models.vision import VGG, Resnet, VisionDims
from pipeal.models.weights import with_weights

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = 99
"""Copies: of every block still to come."""

IMAGES: dict[str, Any] = {"size": 16, "width": 0.1, "hidden": 8, "code": 6}
WORDS: dict[str, Any] = {"embedding": 12, "hidden": 8, "code": 6, "heads": 3, "dropout": 0.0}
SAME = Ahead(depth=ALL, same_start=True)

NETWORKS: dict[str, Callable[[dict[str, Any]], Network]] = {
    "vgg": lambda more: VGG.network(3, dims=VisionDims(**IMAGES, **more), one_by_one=True),
    "resnet": lambda more: Resnet.network(3, dims=VisionDims(**IMAGES | more), one_by_one=True),
    "lstm": lambda more: LSTM.network(9, 3, dims=TextDims(**WORDS, **more)),
    "transformer": lambda more: Transformer.network(9, 3, dims=TextDims(**WORDS, **more)),
    "charlm": lambda more: CharLM.network(9, dims=CharDims(layers=4, dropout=0.0, **more)),
}


def drawn(name: str, count: int, side: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Batches."""
    classes = torch.randint(0, 9, (count, 4, 6)) if name == "charlm" else torch.randint(0, 3, (count, 4))
    if name in ("vgg", "resnet"):
        return list(zip(torch.randn(count, 4, 3, side, side), classes, strict=True))
    return list(zip(torch.randint(1, 9, (count, 4, 6)), classes, strict=True))


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, fused=True)


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
@pytest.mark.parametrize(("optimizer", "lr"), [(sgd, 0.1), (adam, 3e-3)], ids=["sgd", "adam"])
@pytest.mark.parametrize("parts", [None, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_with_copies_of_all_blocks_each_part_learns_bit_for_bit_what_backpropagation_does(
    name: str, parts: int | None, optimizer: Any, lr: float, schedule: str
) -> None:
    torch.manual_seed(1)
    network = NETWORKS[name]({"parts": parts})
    layers: list[Any] = list(make_layers("auglocal", network, lr, optimizer, depth=ALL, pyramid=0.0, same_start=True))
    whole = deepcopy(nn.Sequential(*(layer.f for layer in layers), layers[-1].head))
    learns, criterion, batches = optimizer(list(whole.parameters()), lr), network.criterion(), drawn(name, 12)
    with Pipeline(ALPackage(layers), ["cpu"] * 2, schedule, threads=1) as pipe:
        pipe.run(batches)
    for x, y in batches:
        learns.zero_grad()
        criterion(whole(x), y).backward()
        learns.step()
    for part, ours in zip(whole, [*(layer.f for layer in layers), layers[-1].head], strict=True):
        wanted = part.state_dict()
        assert [key for key, tensor in ours.state_dict().items() if not torch.equal(tensor, wanted[key])] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("parts", [None, 2])
@pytest.mark.parametrize("name", ["charlm", "resnet"])
def test_al_with_one_hot_codes_learns_bit_for_bit_what_backpropagation_does(
    name: str, parts: int | None, optimizer: Any, precision: Precision
) -> None:
    """Each begins from its own seed, as a run does. Codes that the autoencoder loss moves would be told apart soon.

    Of 32 pixels a head sees 4 × 4 places; of 2 × 2 all operators take the same mean."""
    more: dict[str, Any] = {"parts": parts, "bridges": "lookahead", "ahead": SAME, "labels": "one-hot"}
    network = NETWORKS[name](more | ({"size": 32} if name == "resnet" else {}))
    batches = drawn(name, 40, 32)

    def learnt(method: str, **options: Any) -> tuple[list[Tensor], Tensor, Tensor]:
        torch.manual_seed(3)
        package = ALPackage(list(make_layers(method, network, 3e-3, optimizer, **options)))
        with Pipeline(package, ["cpu"] * 2, threads=1, precision=precision) as pipe:
            before = pipe.predict(batches[0][0])
            pipe.run(batches)
            after = pipe.predict(batches[0][0])
        return [tensor for layer in package for tensor in tensors(layer.blocks()["f"])], before, after

    whole, before, wanted = learnt("bp", same_start=True)
    assert (wanted - before).abs().max() > 0.05
    for ours, begun, found in (learnt("al"), learnt("auglocal", depth=ALL, pyramid=0.0, same_start=True)):
        assert alike(ours, whole[: len(ours)])
        assert torch.equal(begun, before)
        assert torch.equal(found, wanted)


def test_backpropagation_begins_as_local_losses_with_one_start_do() -> None:
    for name, make in NETWORKS.items():
        network = make({"parts": 2})
        torch.manual_seed(5)
        layers: list[Any] = list(make_layers("auglocal", network, 1e-3, depth=ALL, pyramid=0.0, same_start=True))
        torch.manual_seed(5)
        begun = make_layers("bp", network, 1e-3, same_start=True)
        if name == "vgg":
            with pytest.raises(ConfigError, match=r"ends in another head than .*; expected one linear map"):
                list(begun)
            continue
        (whole,) = begun
        assert alike(tensors(whole), [one for layer in layers for one in tensors(layer.f)] + tensors(layers[-1].head))


def copies_of(layer: Any, above: list[Tensor]) -> list[Tensor]:
    """The first tensors of a head, or bridge, as many as there are above."""
    head = layer.blocks()["head" if "head" in layer.blocks() else "b"]
    return tensors(head)[: len(above)]


@pytest.mark.parametrize("method", ["auglocal", "al"])
@pytest.mark.parametrize("name", NETWORKS)
def test_copies_begin_as_their_blocks_and_are_drawn_where_these_are_not(name: str, method: str) -> None:
    def made(here: int | None) -> list[Any]:
        more = {"bridges": "lookahead", "ahead": SAME} if method == "al" else {}
        options: dict[str, Any] = {} if method == "al" else {"depth": ALL, "pyramid": 0.0, "same_start": True}
        row, source = [], make_layers(method, NETWORKS[name](more), 1e-3, None, **options)
        for number in range(99):
            torch.manual_seed(number)  # as pipeal.run seeds each layer by its number
            with torch.device("cpu" if here in (None, number) else "meta"):
                layer = next(source, None)
            if layer is None:
                return row
            row.append(layer)
        raise AssertionError

    layers = made(None)
    for number, layer in enumerate(layers):
        above = [one for later in layers[number + 1 :] for one in tensors(later.blocks()["f"])]
        assert alike(copies_of(layer, above), above)
        alone = made(number)[number]
        assert alike(tensors(alone), tensors(layer)), "a rank that has this layer alone draws the same"


def tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]


def alike(ours: list[Tensor], others: list[Tensor]) -> bool:
    return len(ours) == len(others) and all(map(torch.equal, ours, others))


@pytest.mark.parametrize("name", ["charlm", "resnet", "vgg"])
def test_all_exits_of_al_whose_labels_are_codes_say_the_same(name: str) -> None:
    """Codes are handed on as they are, and bridges begin alike: each part is the network from there on."""
    torch.manual_seed(0)
    network = NETWORKS[name]({"bridges": "lookahead", "ahead": SAME, "labels": "codes"})
    package = ALPackage(list(make_layers("al", network, 3e-3)))
    batches = drawn(name, 10)
    with Pipeline(package, "cpu", threads=1) as pipe:
        pipe.run(batches)
        answers = [pipe.predict(batches[0][0], exit_at) for exit_at in range(1, len(package) + 1)]
    assert all(torch.allclose(answer, answers[0], atol=1e-4) for answer in answers)
    assert answers[0].std() > 1e-3, "something was learnt"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "al"])
def test_what_bridges_are_told_changes_no_other_method(method: str) -> None:
    """Symptom: ``model.ahead.same_start``, told to be without effect, changed the first weights of ``greedy``."""

    def made(more: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(0)
        return [one for layer in make_layers(method, NETWORKS["vgg"](more)) for one in tensors(layer)]  # type: ignore[arg-type]

    assert alike(made({"bridges": "lookahead", "ahead": SAME}), made({}))


def test_copies_begin_with_starting_weights(tmp_path: Path) -> None:
    torch.manual_seed(3)
    network = NETWORKS["charlm"]({})
    save_file(network.whole().state_dict(), tmp_path / "begun.safetensors")
    begun = with_weights(network, str(tmp_path / "begun.safetensors"))
    layers: list[Any] = list(make_layers("auglocal", begun, depth=ALL, pyramid=0.0, same_start=True))
    with pytest.raises(ConfigError, match="begins with weights that it is given"):
        list(make_layers("bp", begun, same_start=True))
    for number, layer in enumerate(layers[:-1]):
        above = [one for later in layers[number + 1 :] for one in tensors(later.f)]
        assert alike(copies_of(layer, above), above)


def test_a_converted_network_is_copied_with_the_weights_that_it_has() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))

    how: dict[str, Any] = {
        "split": ["1", "2"],
        "method": "auglocal",
        "outputs": 3,
        "method_options": {"depth": ALL, "pyramid": 0.0, "same_start": True},
    }
    x = torch.randn(5, 6)
    package: Any = ALPackage.from_bp(build(), x, **how)
    above = [*tensors(package[1].f), *tensors(package[2].f)]
    assert alike(copies_of(package[0], above), above)
    with torch.device("meta"):
        bare = build()
    with pytest.raises(ConfigError, match="begins with its weights, and it has none yet, on the meta device; convert"):
        ALPackage.from_bp(bare, x, **how)


class Scaled(nn.Module):
    """A block with what nothing draws, what does not learn, and what is in no ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.map.weight.requires_grad_(False)
        self.register_buffer("shift", torch.randn(8), persistent=False)

    def reset_parameters(self) -> None:
        self.shift.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return (self.map(x) * self.scale + self.shift).tanh()


def test_a_copy_of_a_converted_block_is_all_that_the_block_is() -> None:
    """Symptom: below a frozen block, parts learnt other weights than by backpropagation; a block whose weights nothing
    draws, as one of GPT-2, was refused. Cause: a copy was drawn as a fresh one is, and only then given the weights."""
    network = nn.Sequential(nn.Linear(6, 8), Scaled(), Scaled())
    batches = [(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(5)]
    package: Any = ALPackage.from_bp(
        network, batches[0][0], 3, split=["1", "2"], method="auglocal", lr=0.1, optimizer=sgd,
        method_options={"depth": ALL, "same_start": True},
    )  # fmt: skip
    whole = deepcopy(nn.Sequential(*(layer.f for layer in package), package[-1].head))
    learns = sgd([weight for weight in whole.parameters() if weight.requires_grad], 0.1)
    with Pipeline(package, "cpu", threads=1) as pipe:
        pipe.run(batches)
    for x, y in batches:
        learns.zero_grad()
        nn.functional.cross_entropy(whole(x), y).backward()
        learns.step()
    ours = nn.Sequential(*(layer.f for layer in package), package[-1].head)
    assert alike(tensors(ours), tensors(whole))


def test_what_one_start_is_not() -> None:
    with pytest.raises(
        ConfigError, match=r"copies of same_start are 0.5 times as wide; .* expected width=1, not shared"
    ):
        Ahead(width=0.5, same_start=True)
    with pytest.raises(ConfigError, match="copies of same_start are shared"):
        replace(SAME, shared=True)
