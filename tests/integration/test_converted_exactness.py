"""Law 1 for converted networks: cutting changes nothing, and no schedule does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models import VisionTransformer, mobilenet_v3_small
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.vgg import VGG, make_layers

from pipeal import ALPackage, Pipeline
from pipeal.engine import SCHEDULES
from pipeal.methods.cutting.cut import cut
from tests.engine.cases import Outcome, cosine, cuts, outcome, predictions_by_hand, train_by_hand
from tests.integration.law import STAGES

CLASSES = 5


def small_vgg() -> nn.Module:
    """torchvision's VGG with narrow features and a narrow head: the code is theirs, the numbers are not."""
    with torch.device("meta"):
        whole = VGG(nn.Identity(), init_weights=False)  # its own head holds 120 million weights
    whole.features = make_layers([8, "M", 12, "M", 16, 16, "M", 24, "M"], batch_norm=True)
    whole.avgpool = nn.AdaptiveAvgPool2d((2, 2))
    whole.classifier = nn.Sequential(nn.Linear(96, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, CLASSES))
    return whole


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    split: list[str]


NETWORKS = {
    "resnet10": Network(lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES), ["layer2", "layer3", "layer4"]),
    "vgg_bn": Network(small_vgg, ["features.3", "features.6", "classifier"]),
    "mobilenet_v3_small": Network(
        lambda: mobilenet_v3_small(num_classes=CLASSES, width_mult=0.25), ["features.3", "features.7", "classifier.1"]
    ),
    "vit": Network(
        lambda: VisionTransformer(32, 16, 3, 2, 32, 48, dropout=0.1, attention_dropout=0.1, num_classes=CLASSES),
        ["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1", "encoder.layers.encoder_layer_2"],
    ),
}
EVERY = pytest.mark.parametrize("name", NETWORKS)


def images(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def batches() -> list[tuple[Tensor, Tensor]]:
    """The last is smaller."""
    return [(images(rows, rows), torch.arange(rows) % CLASSES) for rows in (5, 4, 2)]


def converted(name: str) -> ALPackage:
    torch.manual_seed(0)
    network = NETWORKS[name]
    return ALPackage.from_bp(network.build(), images(2), CLASSES, split=network.split, code=12, hidden=10, lr=1e-2)


@STAGES
@pytest.mark.parametrize(
    "name",
    ["vgg_bn", "vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet10", "mobilenet_v3_small"))],
)
def test_every_schedule_leaves_what_training_layer_by_layer_leaves(name: str, stages: tuple[int, ...]) -> None:
    package = converted(name)
    assert len(package) == 4
    by_hand = copy.deepcopy(package)
    losses = train_by_hand(by_hand, batches(), seed=3)
    wanted = outcome(by_hand, losses, predictions_by_hand(by_hand, images(2)))
    assert all(value.isfinite().all() for value in wanted.tensors.values())
    assert "weights/0.enc.f.bn1.running_mean" in wanted.tensors or name != "resnet10"
    for schedule in SCHEDULES:
        for count in stages:
            found = trained(copy.deepcopy(package), schedule, next(cuts(4, count)))
            assert found.differences(wanted) == [], (schedule, count)


def trained(package: ALPackage, schedule: str, sizes: list[int]) -> Outcome:
    package.train()
    torch.set_num_threads(2)  # the caller's own choice is not the pipeline's
    with Pipeline(package, ["cpu"] * len(sizes), schedule, sizes=sizes, seed=3, threads=1) as pipe:
        report = pipe.run(batches(), lr_scale=cosine)
        predictions = [pipe.predict(images(2), depth) for depth in range(1, len(package) + 1)]
        (exits,) = pipe.predict_exits([images(2)])
        last = list(pipe.predict_each([images(2), images(2)]))
    torch.set_num_threads(1)
    assert all(map(torch.equal, exits, predictions))
    assert all(torch.equal(found, predictions[-1]) for found in last)
    return outcome(package, report.losses, predictions)


@pytest.mark.parametrize("training", [True, False])
@EVERY
def test_the_parts_of_a_network_are_the_network(name: str, training: bool) -> None:
    """Bit for bit, gradients and batch norm's statistics too."""
    torch.manual_seed(0)
    whole = NETWORKS[name].build().train(training)
    parts = cut(copy.deepcopy(whole), NETWORKS[name].split)
    assert len(parts) == 4
    assert chained([part.module for part in parts], images(3)) == chained([whole], images(3))
    named = dict(whole.named_buffers())
    for part in parts:
        for name_, buffer in part.module.named_buffers():
            assert torch.equal(buffer, named[name_])


def chained(modules: list[nn.Module], x: Tensor) -> tuple[list[Any], ...]:
    """The result of a chain and the gradients of its parameters, drawing from one seed."""
    torch.manual_seed(7)
    for module in modules:
        x = module(x)
    x.square().sum().backward()
    grads = [parameter.grad for module in modules for parameter in module.parameters()]
    return x.tolist(), sorted(grad.abs().sum().item() for grad in grads if grad is not None)


@pytest.mark.parametrize("name", ["resnet10", "mobilenet_v3_small", "vit"])
def test_conversion_keeps_the_network_it_was_given(name: str) -> None:
    """Pretrained weights stay in f: the same tensors, and together the same answer."""
    torch.manual_seed(0)
    whole = NETWORKS[name].build().eval()
    with torch.no_grad():
        expected = whole(images(3))
    package = ALPackage.from_bp(whole, images(2), CLASSES, split=NETWORKS[name].split)
    mine = {id(parameter) for layer in package for parameter in layer.enc.f.parameters()}  # type: ignore[union-attr]
    assert mine == {id(parameter) for parameter in whole.parameters()}
    x = images(3)
    with torch.no_grad():
        for layer in package:
            x = layer.inference(x, "f")
    assert torch.equal(x, expected)


def test_vit_b_16_and_vgg11_bn_as_they_are_shipped() -> None:
    from torchvision.models import vgg11_bn, vit_b_16

    with torch.device("meta"):  # the cut needs no weights, and the two hold 215 million
        vit, vgg = vit_b_16(), vgg11_bn()
    parts = cut(vit, ["encoder.layers.encoder_layer_4", "encoder.layers.encoder_layer_8"])
    assert sum(p.numel() for part in parts for p in part.module.parameters()) == sum(
        p.numel() for p in vit.parameters()
    )
    x: Any = torch.empty(2, 3, 224, 224, device="meta")
    shapes = []
    for part in parts:
        x = part.module(x)
        shapes.append(tuple(x.shape))
    assert shapes == [(2, 197, 768), (2, 197, 768), (2, 1000)]
    x = torch.empty(2, 3, 64, 64, device="meta")
    shapes = []
    for part in cut(vgg, ["features.8", "features.15", "features.22", "avgpool"]):
        x = part.module(x)
        shapes.append(tuple(x.shape))
    assert shapes == [(2, 128, 16, 16), (2, 256, 8, 8), (2, 512, 4, 4), (2, 512, 2, 2), (2, 1000)]


# PyTorch itself refuses two in a row that work in place: each kind ends in what does not mind.
LAYERS = {
    "linear": lambda: nn.Linear(6, 6),
    "identity": nn.Identity,
    "norm": lambda: nn.BatchNorm1d(6),
    "relu": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)),
    "dropout": lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.4, inplace=True), nn.Linear(6, 6)),
    "dropout between": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 6)),
}


@settings(max_examples=12)
@given(kinds=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6), data=st.data())
def test_any_sequential_cut_anywhere_trains_alike_under_every_schedule(kinds: list[str], data: st.DataObject) -> None:
    names = data.draw(
        st.lists(st.sampled_from(range(1 + len(kinds))), unique=True, min_size=1, max_size=4).map(sorted),
        label="split",
    )
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), *(LAYERS[kind]() for kind in kinds))
    rows = [torch.randn(count, 6) for count in (4, 4, 3)]
    expected = copy.deepcopy(whole)
    package = ALPackage.from_bp(whole, rows[0], 3, split=[str(name) for name in names], code=4, lr=1e-2)
    assert len(package) == len({0, *names})
    blocks = [layer.enc.f for layer in package]
    assert chained(blocks, rows[0] + 0) == chained([expected], rows[0] + 0)  # type: ignore[arg-type]
    package.zero_grad()
    targets = [(x, torch.arange(len(x)) % 3) for x in rows]
    by_hand = copy.deepcopy(package)
    wanted = outcome(by_hand, train_by_hand(by_hand, targets, seed=3), [])
    for schedule in SCHEDULES:
        stages = data.draw(st.integers(1, len(package)), label=f"{schedule} stages")
        mine = copy.deepcopy(package)
        with Pipeline(mine, ["cpu"] * stages, schedule, seed=3, threads=1) as pipe:
            losses = pipe.run(targets, lr_scale=cosine).losses
        assert outcome(mine, losses, []).differences(wanted) == []
