"""Conversion: any network, any task, any block; and nothing left behind but the package."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models import resnet18
from torchvision.models.resnet import BasicBlock

from pipeal import AE, AL, BP, ENC, ALPackage, ConfigError, DataError, Pipeline, PlacementError
from pipeal.core.draws import may_draw
from pipeal.core.errors import a_type
from pipeal.core.protocols import Path
from pipeal.core.tree import Tree
from pipeal.methods.cutting.inplace import OnACopy
from pipeal.methods.pooling import CellMeans


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 5),
    )  # fmt: skip


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


IMAGES = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(0))
VECTORS = IMAGES.flatten(1)[:, :6]


def train(package: ALPackage, batches: list[tuple[Tree, Tensor]], stages: int = 1, epochs: int = 1) -> list[Tensor]:
    with Pipeline(package, ["cpu"] * stages, threads=1) as pipe:
        return pipe.run(batches * epochs).losses


def test_blocks_fit_the_shapes_that_were_found() -> None:
    package = ALPackage.from_bp(cnn(), IMAGES, 5, split=["3", "6"], code=12, hidden=7)
    assert [type(layer.enc.b[0]) for layer in package] == [CellMeans, CellMeans, nn.Linear]
    assert [row.cells()[1:3] for row in package.summary().layers] == [
        ("(B, 6, 10, 10)", "(B, 12)"),
        ("(B, 8, 4, 4)", "(B, 12)"),
        ("(B, 5)", "(B, 12)"),
    ]
    assert package.infer(IMAGES).shape == (4, 5)


@pytest.mark.parametrize("method", ["al", "bp"])
def test_gradients_of_a_training_before_go_into_no_update(method: str) -> None:
    """Symptom: a network that was trained before went another way than the same weights without its last gradients.
    Cause: a layer clears gradients after its update, not before its first backward."""

    def trained(*, begun: bool) -> dict[str, Tensor]:
        network = cnn()
        if begun:
            network.eval()(IMAGES).sum().backward()
        split = ["3", "6"] if method == "al" else None
        package = ALPackage.from_bp(network.train(), IMAGES, 5, split=split, method=method)
        train(package, [(IMAGES, torch.arange(4))])
        return network.state_dict()

    torch.manual_seed(0)
    wanted = trained(begun=False)
    torch.manual_seed(0)
    found = trained(begun=True)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_cuts_and_devices_are_separate_choices() -> None:
    """Several blocks share an AL layer; several AL layers share a device."""
    package = ALPackage.from_bp(cnn(), IMAGES, 5, split=["3", "6", "9"], code=8)
    batches = [(IMAGES, torch.tensor([0, 1, 2, 3]))]
    with Pipeline(package, ["cpu"] * 2, sizes=[3, 1], threads=1) as pipe:
        losses = pipe.run(batches).losses
    assert (len(package), len(pipe.stages), len(losses)) == (4, 2, 4)


def test_a_conversion_leaves_no_trace() -> None:
    """Buffers, modes, gradients, random numbers, the sample, even what a module counts in evaluation mode."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + 0 * torch.rand_like(x)

    whole = nn.Sequential(nn.ReLU(inplace=True), *cnn(), Counter())
    whole[2].eval()
    state, modes = copy.deepcopy(whole.state_dict()), [part.training for part in whole.modules()]
    sample = IMAGES.clone()
    given = {number: {"b": nn.Linear(1, 1)} for number in range(3)}
    with pytest.raises(ConfigError, match="b of layer 0"):
        ALPackage.from_bp(whole, sample, 5, split=["4", "7"], code=12, blocks=given)
    assert [part.inplace for part in whole.modules() if isinstance(part, nn.ReLU)] == [True] * 3
    torch.manual_seed(3)
    package = ALPackage.from_bp(whole, sample, 5, split=["4", "7"], code=12)
    new = torch.get_rng_state()
    package.summary(sample)
    assert torch.equal(torch.get_rng_state(), new)
    assert all(torch.equal(value, state[name]) for name, value in whole.state_dict().items())
    assert [part.training for part in whole.modules()] == modes
    assert all(parameter.grad is None for parameter in whole.parameters())
    assert all(not part._forward_pre_hooks for part in whole.modules())
    assert torch.equal(sample, IMAGES)
    # What new blocks draw is the caller's seed alone, not what running the sample draws.
    torch.manual_seed(3)
    again = ALPackage.from_bp(cnn_without(whole), sample, 5, split=["4", "7"], code=12)
    assert torch.equal(torch.get_rng_state(), new)
    for layer, other in zip(package, again, strict=True):
        assert all(map(torch.equal, layer.ae.parameters(), other.ae.parameters()))


class CountsTwice(nn.Module):
    """Counts in place and by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("anew", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.anew = self.anew + 1
        return x


def test_a_sample_that_does_not_fit_leaves_no_trace_either() -> None:
    """Symptom: statistics moved by a conversion that failed. Cause: buffers were put back on success alone."""
    counts = CountsTwice()
    held = counts.anew
    with pytest.raises(ConfigError, match="the sample does not fit layer 0"):
        ALPackage.from_bp([nn.Sequential(counts, nn.Linear(9, 9))], VECTORS, 3)
    assert (counts.calls, counts.anew) == (0, 0)
    assert counts.anew is held
    ALPackage.from_bp([counts, nn.Linear(6, 6)], VECTORS, 3)
    assert (counts.calls, counts.anew) == (0, 0)


def test_lazy_modules_take_their_sizes_from_the_sample() -> None:
    parts = [nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()), nn.Sequential(nn.Flatten(), nn.LazyLinear(5))]
    package = ALPackage.from_bp(parts, IMAGES, 5, code=8)
    train(package, [(IMAGES, torch.tensor([0, 1, 2, 3]))], stages=2)
    assert package.infer(IMAGES).shape == (4, 5)


def test_lazy_modules_are_divided_by_a_number() -> None:
    """It ended with a ``ValueError`` about parameters that are not initialized."""
    parts = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(8), nn.LazyLinear(8))
    assert len(ALPackage.from_bp(parts, VECTORS, 3, split=3)) == 3


def cnn_without(whole: nn.Sequential) -> nn.Sequential:
    return copy.deepcopy(nn.Sequential(*list(whole)[:-1]))


def test_the_weights_stay_and_train_in_f() -> None:
    whole = cnn()
    package = ALPackage.from_bp(whole, IMAGES, 5, split=["3", "6"], code=12)
    before = copy.deepcopy(whole.state_dict())
    with torch.no_grad():
        x = IMAGES
        for layer in package.eval():
            x = layer.inference(x, "f")
        assert torch.equal(x, whole.eval()(IMAGES))
    train(package.train(), [(IMAGES, torch.tensor([0, 1, 2, 3]))])
    changed = [name for name, value in whole.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == list(before)


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        ("classification", 3, torch.tensor([0, 1, 2, 1] * 8)),
        ("multilabel", 3, torch.tensor([[1.0, 0, 1], [0, 0, 1], [0, 1, 0], [1, 1, 1]] * 8)),
        ("regression", 1, torch.tensor([-1.2, -0.4, 0.4, 1.2] * 8)),
        ("regression", 2, torch.tensor([[-1.2, 0.3], [-0.4, 1.0], [0.4, -1.0], [1.2, -0.3]] * 8)),
    ],
)
@pytest.mark.parametrize("labels", ["inverse", "published"])
def test_every_task_trains(task: Any, outputs: int, targets: Tensor, labels: Any) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    package = ALPackage.from_bp(whole, VECTORS, outputs, task=task, split=["2"], code=32, labels=labels, lr=3e-3)
    x = VECTORS.repeat(8, 1)
    losses = train(package, [(x, targets)], epochs=150)
    assert all(rows[-10:].mean() < rows[:10].mean() for rows in losses)
    answer = package.eval().infer(x)
    assert answer.shape == (32, outputs)
    if labels == "inverse":
        if task == "regression":
            assert (answer - targets.view(answer.shape)).square().mean() < 0.05
        else:
            right = answer.argmax(1) == targets if task == "classification" else (answer > 0) == (targets > 0)
            assert right.float().mean() > 0.95


def test_every_block_is_replaceable() -> None:
    mine = {
        0: {"g": nn.Linear(5, 9), "h": nn.Linear(9, 5)},
        1: {"f": nn.Sequential(nn.Conv2d(6, 4, 1), nn.Flatten()), "b": nn.Linear(400, 12)},
        2: {"f": nn.Linear(400, 3), "b": nn.Linear(3, 7), "g": nn.Linear(12, 7), "h": nn.Linear(7, 12)},
    }
    package = ALPackage.from_bp(cnn(), IMAGES, 5, split=["3", "6"], code=12, blocks=mine)
    for number, blocks in mine.items():
        layer = package[number]
        found = {"f": layer.enc.f, "b": layer.enc.b, "g": layer.ae.g, "h": layer.ae.h}
        assert all(found[letter] is block for letter, block in blocks.items())
    assert [row.cells()[2] for row in package.summary().layers] == ["(B, 9)", "(B, 12)", "(B, 7)"]
    trained = {id(p) for layer in package for o in (layer.enc_opt, layer.ae_opt) for p in o.param_groups[0]["params"]}
    assert trained == {id(parameter) for parameter in package.parameters()}
    train(package, [(IMAGES, torch.tensor([0, 1, 2, 3]))], stages=3)


def test_tuples_are_pooled_by_the_user() -> None:
    texts = torch.randn(4, 7, 6)
    lstms: list[nn.Module] = [nn.LSTM(6, 5, batch_first=True), Onward(), nn.LSTM(5, 5, batch_first=True)]
    package = ALPackage.from_bp(lstms, texts, 3, pool={0: last_state, 2: last_state}, code=8)
    train(package, [(texts, torch.tensor([0, 1, 2, 0]))], stages=3)
    assert package.infer(texts).shape == (4, 3)


@pytest.mark.parametrize("by_layer", [False, True])
def test_every_layer_trains_a_pool_of_its_own(by_layer: bool) -> None:
    """Symptom: schedules gave other weights. Cause: one module as the pool was in all bridges, each training it."""
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Flatten(), nn.LayerNorm(6))
    whole = [nn.Linear(6, 6), nn.Linear(6, 6)]
    package = ALPackage.from_bp(whole, VECTORS, 3, pool=dict.fromkeys((0, 1), mine) if by_layer else mine, code=8)
    norms = [part for part in package.modules() if isinstance(part, nn.LayerNorm)]
    assert len({id(norm.weight) for norm in (*norms, mine[1])}) == 3
    train(package, [(VECTORS, torch.tensor([0, 1, 2, 0]))], stages=2)
    assert not torch.equal(norms[0].bias, norms[1].bias)
    assert not mine[1].bias.any()


FLOATS, EYE = torch.rand(4), torch.eye(4)


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        ("classification", 4, FLOATS),
        ("classification", 4, EYE.long()),
        ("classification", 4, torch.ones(4, 1).long()),
        ("classification", 4, torch.tensor(1)),
        ("classification", 4, EYE[:, :3]),
        ("classification", 4, torch.tensor([1])),
        ("classification", 4, EYE[:1]),
        ("multilabel", 4, torch.tensor([0, 1, 2, 3])),
        ("multilabel", 4, EYE[:1]),
        ("regression", 1, FLOATS[None]),
        ("regression", 1, FLOATS[:1]),
        ("regression", 1, torch.tensor(1.0)),
        ("regression", 3, EYE),
        ("regression", 2, EYE[:2]),
    ],
)
@pytest.mark.parametrize("labels", ["inverse", "published"])
def test_targets_that_do_not_fit_are_told(task: Any, outputs: int, targets: Tensor, labels: Any) -> None:
    """Symptom: wrong targets trained without a word. Cause: they were reshaped, and losses broadcast."""
    package = ALPackage.from_bp(FLAT, VECTORS, outputs, task=task, code=8, labels=labels)
    with pytest.raises(DataError, match=r"expected \(B|expected equal shapes: a target per input") as raised:
        package(VECTORS, targets)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.int64])
def test_class_numbers_of_any_whole_type(kind: torch.dtype) -> None:
    package = ALPackage.from_bp(FLAT, VECTORS, 3, code=8)
    package(VECTORS, torch.tensor([0, 1, 2, 0], dtype=kind))
    found = package.losses()
    package(VECTORS, torch.eye(3)[[0, 1, 2, 0]])
    assert found == [pytest.approx(losses) for losses in package.losses()]


def test_layers_share_no_block_of_the_users() -> None:
    mine = nn.Linear(6, 8)
    with pytest.raises(
        ConfigError, match=r"layers 0 and 1 would share a parameter \('enc.b.weight' and 'enc.b.weight'"
    ):
        ALPackage.from_bp(FLAT, VECTORS, 3, code=8, blocks={0: {"b": mine}, 1: {"b": mine}})


class Onward(nn.Module):
    def forward(self, x: tuple[Tensor, Any]) -> Tensor:
        return x[0]


def last_state(x: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
    return x[1][0][-1]


@given(flags=st.lists(st.booleans(), min_size=1, max_size=4), dropped=st.booleans())
def test_no_layer_writes_into_what_it_receives(flags: list[bool], dropped: bool) -> None:
    """Symptom: the engine refuses a forward in place. Cause: the network is cut before ReLU(inplace=True)."""
    torch.manual_seed(0)
    first = nn.Dropout(0.5, inplace=flags[0]) if dropped else nn.ReLU(inplace=flags[0])
    children = [nn.Identity(), first, *(nn.ReLU(inplace=flag) for flag in flags), nn.Linear(6, 6)]
    package = ALPackage.from_bp([nn.Linear(6, 6), nn.Sequential(*children)], VECTORS, 3, code=8)
    train(package, [(VECTORS, torch.tensor([0, 1, 2, 0]))])
    assert not any(writes_into(layer.enc.f, VECTORS) for layer in package)


def writes_into(block: Any, x: Tensor) -> bool:
    mine = x.clone()
    block.train()(mine)
    return mine._version > 0


def test_only_what_works_on_the_input_itself_is_switched() -> None:
    second = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True))
    ALPackage.from_bp([nn.Linear(6, 6), second], VECTORS, 3, code=8)
    assert (second[1].inplace, second[3].inplace) == (False, True)


class ReadsAgain(nn.Module):
    """What is written in place is read again: out of place it would be another network."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.linear = nn.ReLU(inplace=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.relu(x)) + x


class FunctionInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu_(x))


@pytest.mark.parametrize("block", [ReadsAgain, FunctionInPlace])
def test_a_block_that_needs_to_write_gets_a_copy(block: type[nn.Module]) -> None:
    torch.manual_seed(0)
    own = block()
    wanted = own(VECTORS.clone())
    package = ALPackage.from_bp([nn.Linear(6, 6), own], VECTORS, 3, code=8)
    assert isinstance(package[1].enc.f, OnACopy)
    assert torch.equal(package[1].enc.f(VECTORS), wanted)
    train(package, [(VECTORS, torch.tensor([0, 1, 2, 0]))])


@pytest.mark.parametrize(
    ("network", "depth"),
    [("cnn", 1), ("cnn", 2), ("cnn", None), pytest.param("resnet18", None, marks=pytest.mark.slow)],
)
def test_an_exported_model_answers_as_the_package(network: str, depth: int | None) -> None:
    torch.manual_seed(0)
    whole, split = (cnn(), ["3", "6"]) if network == "cnn" else (resnet18(num_classes=5), ["layer2", "layer4"])
    package = ALPackage.from_bp(whole, IMAGES, 5, split=split, code=12)
    train(package, [(IMAGES, torch.tensor([0, 1, 2, 3]))])
    plain = package.to_bp(depth)
    assert not any(part.training for part in plain.modules())
    assert all(part.training for part in package.modules())
    with torch.no_grad():
        wanted = package.eval().infer(IMAGES, depth)
        torch.testing.assert_close(plain(IMAGES), wanted)
        exported = torch.export.export(plain, (IMAGES,)).module()
        torch.testing.assert_close(exported(IMAGES), wanted)
        saved = io.BytesIO()
        torch.save(plain.state_dict(), saved)
        saved.seek(0)
        train(package.train(), [(IMAGES, torch.tensor([0, 1, 2, 3]))])
        other = package.to_bp(depth)
        assert not torch.equal(other(IMAGES), wanted)  # it is a copy
        other.load_state_dict(torch.load(saved, weights_only=True))
        assert torch.equal(other(IMAGES), plain(IMAGES))
    # Linear maps that follow each other are one.
    assert sum(parameter.numel() for parameter in plain.parameters()) <= package[:depth].effective_parameters()


def test_an_exit_that_does_not_exist() -> None:
    with pytest.raises(PlacementError, match="exit 3 does not exist; this package has exits 1 to 2"):
        ALPackage.from_bp(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), VECTORS, 3).to_bp(3)


class Doubled(AL):
    """A layer of the user's, whose way of inference is no chain of blocks."""

    def inference(self, x: Tree, path: Path) -> Tree:
        return 2 * super().inference(x, path)


class Patched(AL):
    def __init__(self, *sides: nn.Module) -> None:
        super().__init__(*sides)
        self.inference = Doubled.inference.__get__(self)  # type: ignore[method-assign]


class Bare(nn.Module):
    def inference(self, x: Tree, path: Path) -> Tree:
        return x


def own_layer(kind: type[AL]) -> AL:
    return kind(ENC(nn.Linear(6, 6), nn.Linear(6, 3)), AE(nn.Identity(), nn.Linear(3, 3)))


@pytest.mark.parametrize(
    "make", [lambda: own_layer(Doubled), lambda: own_layer(Patched), Bare, lambda: nn.Linear(6, 6)]
)
def test_a_plain_module_is_made_of_known_ways_alone(make: Callable[[], nn.Module]) -> None:
    """Symptom: ``to_bp()`` and ``infer()`` gave different answers. Cause: the layer overrides ``inference``."""
    layer = make()
    package = ALPackage([own_layer(AL), layer])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=rf"layer 1 is {a_type(layer)} with its own inference") as raised:
        package.to_bp()
    assert "\n" not in str(raised.value)
    assert package.to_bp(exit_at=1)(VECTORS).shape == (4, 3)


def test_plain_modules_of_bp_and_of_a_subclass_that_keeps_inference() -> None:
    class Mine(AL):
        pass

    for layer in (BP(nn.Linear(6, 3)), own_layer(Mine)):
        package = ALPackage([layer])
        torch.testing.assert_close(package.to_bp()(VECTORS), package.infer(VECTORS))


def test_a_class_that_says_that_it_draws_nothing_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy that ``from_bp`` names."""

    def watched() -> bool:
        package = ALPackage.from_bp(resnet18(num_classes=5), IMAGES, 5, split=["layer2", "layer4"], code=8)
        return any(map(may_draw, package))

    assert watched()
    monkeypatch.setattr(BasicBlock, "draws_from_default", False, raising=False)
    assert not watched()


def test_double_precision_stays() -> None:
    whole = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).double()
    package = ALPackage.from_bp(whole, VECTORS.double(), 3, code=8)
    assert {parameter.dtype for parameter in package.parameters()} == {torch.float64}
    train(package, [(VECTORS.double(), torch.tensor([0, 1, 2, 0]))])


FLAT = nn.Sequential(nn.Linear(6, 6), nn.ReLU())


@pytest.mark.parametrize(
    ("model", "sample", "options", "message"),
    [
        (FLAT, torch.randn(4, 7), {}, r"sample does not fit layer 0 \('0'\): given \(4, 7\) .* raises RuntimeError: "),
        (FLAT, 3, {}, "the sample is no tensor; expected a batch of inputs"),
        ([nn.LSTM(6, 6)], torch.randn(5, 4, 6), {}, r"no bridge for an output of \(5, 4, 6\) float32, .* pass pool=…"),
        ([nn.ReLU(), Transposed()], torch.randn(4, 3, 6), {}, r"layer 1 .* gives \(3, .* for a batch of 4; expected"),
        (FLAT, VECTORS, {"pool": {2: last_state}}, "pool names layer 2; this model has layers 0 to 1"),
        (FLAT, VECTORS, {"pool": last_state}, r"layer 0 \('0'\): pool, given \(4, 6\) float32, raises IndexError"),
        (FLAT, VECTORS, {"blocks": {2: {}}}, "blocks names layer 2; this model has layers 0 to 1"),
        (FLAT, VECTORS, {"blocks": {0: {"bridge": FLAT}}}, "layer 0: 'bridge' is a Sequential; expected 'f', 'b'"),
        (FLAT, VECTORS, {"blocks": {0: {"b": len}}}, "layer 0: 'b' is a builtin_function_or_method"),
        (FLAT, VECTORS, {"blocks": {1: {"b": nn.Linear(6, 5)}}}, r"b of layer 1, .* expected floats \(4, 128\)"),
        (FLAT, VECTORS, {"blocks": {0: {"g": nn.Linear(4, 5)}}}, r"g of layer 0, given \(2, 3\) .* raises RuntimeE"),
        (FLAT, VECTORS, {"blocks": {1: {"h": nn.Linear(128, 5)}}}, r"h of layer 1, .* expected floats \(2, 128\)"),
        (FLAT, VECTORS, {"split": ["2"]}, "unknown submodule '2'"),
        (FLAT, VECTORS, {"task": "ranking"}, "unknown task 'ranking'"),
        (FLAT, VECTORS, {"code": 0}, "code is 0; expected a whole number, at least 1"),
        (FLAT, VECTORS, {"code": "3"}, "code is '3'; expected a whole number, at least 1"),
        (FLAT, VECTORS, {"code": 8.0}, "code is 8.0; expected a whole number, at least 1"),
        (FLAT, VECTORS, {"hidden": True}, "hidden is True; expected a whole number, at least 1, or None"),
        (FLAT, VECTORS, {"hidden": -2, "bridges": "flat"}, "hidden is -2; expected a whole number"),
        (FLAT, VECTORS, {"outputs": 1}, "outputs is 1; expected two classes or more"),
        (FLAT, VECTORS, {"lr": -1}, "lr is -1; expected a number, at least 0"),
        (FLAT, VECTORS, {"lr": float("nan")}, "lr is nan; expected"),
        (FLAT, VECTORS, {"lr": {"enc": 1e-3, "ae": "a"}}, "lr is 'a'; expected"),
        (FLAT, VECTORS, {"optimizer": "adam"}, "optimizer is 'adam'; expected what makes one"),
        (FLAT, VECTORS, {"blocks": {0: nn.ReLU()}}, "blocks of layer 0 is a ReLU; expected a mapping"),
        (FLAT, VECTORS, {"blocks": [nn.ReLU()]}, "blocks is a list; expected a mapping by the number"),
        (FLAT, VECTORS, {"pool": {0: lambda x: x[:2]}}, r"b, after the pool, of layer 0, .* floats \(4, 128\)"),
        ([nn.Embedding(9, 3, sparse=True)], torch.ones(4, 2).long(), {}, "layer 0 .* an embedding with sparse gradien"),
        ([nn.ReLU(), nn.Bilinear(6, 6, 6)], VECTORS, {}, "a layer takes one argument .* wrap a module that takes more"),
        ([nn.Bilinear(6, 6, 6)], VECTORS, {}, r"takes input1, input2, and the sample is a Tensor, \(4, 6\) float32"),
        ([nn.Sequential(nn.LSTM(6, 6), nn.Linear(6, 6))], VECTORS, {}, "returns a tuple, as nn.LSTM does, wrap it in"),
        (FLAT, VECTORS, {"outputs": -1}, "outputs is -1; expected a whole number, at least 1"),
        (FLAT, VECTORS, {"outputs": "3"}, "outputs is '3'; expected a whole number, at least 1"),
        (FLAT, VECTORS, {"outputs": None}, "outputs is None; expected a whole number, at least 1"),
        (FLAT, VECTORS, {"lr": {"enc": 1}}, "lr has the keys"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(model: Any, sample: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        ALPackage.from_bp(model, sample, **{"outputs": 3, **options})
    assert "\n" not in str(raised.value)


class Four(nn.Module):
    """Linear maps, put together by subclasses between the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.d = nn.Linear(6, 3)


class PlacesFirst(Four):
    """Hands on ``(T, B, D)``, as many recurrent networks do."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.relu(self.b(self.a(x).transpose(0, 1))))


def over_places(x: Tensor) -> Tensor:
    return x.mean(0)


def test_what_has_its_batch_second_crosses_whole() -> None:
    """Symptom: all layers but the first trained on place 0 alone. Cause: for fewer samples there are as many places, so
    that what crossed was taken to be one for all samples, of which one is fetched."""
    net, x = PlacesFirst(), torch.randn(5, 4, 6)
    package = ALPackage.from_bp(net, x, 3, split=["b"], pool=over_places)
    first, second = package
    assert torch.equal(second.inference(first.inference(x, "f"), "f"), net(x))
    with pytest.raises(ConfigError, match=r"layer 0 .* gives \(4, 5, 6\) float32 for a batch of 5; expected the batch"):
        ALPackage.from_bp(net, x, 3, split=["b"])


class WritesIntoAView(Four):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).sigmoid()
        half = x[:, :3]
        y = self.b(x)
        half.mul_(3)
        return self.d(self.c(x + y))


class WritesIntoAConstant(Four):
    def forward(self, x: Tensor) -> Tensor:
        shift = torch.arange(6.0)
        x = self.b(self.a(x) + shift)
        shift.mul_(2)
        return self.d(self.c(x + shift))


@pytest.mark.parametrize(("network", "split"), [(WritesIntoAView, ["b"]), (WritesIntoAConstant, ["d"])])
def test_a_cut_that_changes_the_network_is_refused(network: type[nn.Module], split: list[str]) -> None:
    """Symptom: the package computes other numbers than the network. Cause: one part writes, another has a copy."""
    with pytest.raises(ConfigError, match=f"{network.__name__}, cut so, gives other numbers .*: .* in place"):
        ALPackage.from_bp(network(), VECTORS, 3, split=split)


class Shaken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Draws(Four):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = Shaken(), Shaken()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


def test_a_network_that_draws_in_evaluation_is_not_held_against_itself() -> None:
    assert len(ALPackage.from_bp(Draws(), VECTORS, 3, split=["c"])) == 2


def test_a_last_map_to_classes_is_told_where_a_bridge_sees_no_more(said: list[str]) -> None:
    """Of three networks of 150 steps, the last exit was right in 64 % of samples with the map, in 84 % without."""

    def told(outputs: int, **options: Any) -> bool:
        said.clear()
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7))
        ALPackage.from_bp(net, torch.randn(4, 6), outputs, split=["2"], **options)
        return any("gives 7 numbers, as many as there are classes" in line for line in said)

    assert told(7)
    assert not told(3)
    assert not told(7, code=5)
    assert not told(7, method="greedy")
    assert not told(7, task="regression")


def test_what_is_warned_of_is_seen_without_a_log() -> None:
    """Symptom: the lines that the documentation promises of a conversion were printed by the commands alone."""
    lines = [
        "from torch import nn, randn",
        "from pipeal import ALPackage",
        "net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7))",
        "ALPackage.from_bp(net, randn(4, 6), 7, split=['2'])",
    ]
    script = [sys.executable, "-c", "\n".join(lines)]
    ended = subprocess.run(script, check=True, capture_output=True, text=True)
    assert "gives 7 numbers, as many as there are classes" in ended.stderr
