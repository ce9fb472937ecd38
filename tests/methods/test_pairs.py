"""What holds for every method whose losses compare samples: small batches, masks, parts, half precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipeal import ALPackage, Pipeline
from pipeal.core.errors import ConfigError, DataError
from pipeal.core.methods import METHODS as TOLD
from pipeal.methods import make_layers
from pipeal.methods.deinforeg import Terms
from pipeal.methods.layer import LocalLayer
from pipeal.methods.pairs import directions
from pipeal.methods.predsim import Similarity
from pipeal.methods.scpl import Contrast
from pipeal.models import Resnet, Transformer
from tests.methods.test_greedy import NAMES, TEXT, VISION, batches, built

METHODS = tuple(name for name, method in TOLD.items() if method.compares_samples)
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "predsim": lambda: Similarity(nn.Identity(), 5),
    "scpl": lambda: Contrast(nn.Identity()),
    "deinforeg": lambda: Terms(5),
}

pytestmark = pytest.mark.usefixtures("one_thread", "cheap_runs")


def told(loss: nn.Module, vectors: Tensor, y: Tensor) -> Tensor:
    """All terms of a loss."""
    return torch.stack(torch.utils._pytree.tree_leaves(loss(vectors, y)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["one sample", "one class", "no features"])
def test_small_and_dead_batches_have_finite_gradients(name: str, method: str, kind: str) -> None:
    package = built(name, method)
    ((x, y),) = batches(name, 1)
    if kind == "one sample":
        x, y = x[:1], y[:1]
    elif kind == "one class":
        y = torch.full_like(y, 2)
    else:
        for layer in package:
            with torch.no_grad():
                for weights in layer.f.parameters():
                    weights.zero_()
    for layer in package:
        assert isinstance(layer, LocalLayer)
        x, y = layer(x, y)
        layer.backward()
        assert all(loss.isfinite() for loss in layer.loss() or ())
        assert all(weights.grad is None or weights.grad.isfinite().all() for weights in layer.parameters())
        assert all(tensor.isfinite().all() for tensor in layer.buffers())


@pytest.mark.parametrize("method", METHODS)
def test_vectors_without_a_direction_get_no_gradient(method: str) -> None:
    vectors = torch.randn(4, 3)
    vectors[1] = 0
    vectors.requires_grad_()
    told(LOSSES[method](), vectors, torch.tensor([0, 1, 1, 0])).sum().backward()
    assert vectors.grad is not None
    assert vectors.grad.isfinite().all()
    assert not vectors.grad[1].any()
    assert vectors.grad[0].any()


def test_what_is_not_finite_stays_so() -> None:
    """A mask in its place would hide it from ``on_non_finite``."""
    assert directions(torch.tensor([[1.0, float("nan")], [float("inf"), 1.0]])).isnan().any(1).all()


@pytest.mark.parametrize("method", METHODS)
def test_it_computes_in_float32_under_autocast(method: str) -> None:
    vectors, y = torch.randn(6, 4).bfloat16(), torch.arange(6) % 3
    loss = LOSSES[method]()
    with torch.autocast("cpu", torch.bfloat16):
        found = told(loss, vectors, y)
    assert found.dtype == torch.float32
    assert torch.equal(found, told(loss, vectors.float(), y))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["vgg", "transformer", "charlm"])
def test_it_trains_in_bf16(name: str, method: str) -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        with Pipeline(built(name, method), "cpu", "sequential", threads=1, precision=precision) as pipe:  # type: ignore[arg-type]
            losses.append(torch.cat([layer[0] for layer in pipe.run(batches(name, 1)).losses]))
    torch.testing.assert_close(losses[0], losses[1], rtol=0.1, atol=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_a_place_without_a_label_is_in_no_pair(method: str) -> None:
    loss, vectors, y = LOSSES[method](), torch.randn(1, 6, 4), torch.tensor([[0, 1, -1, 1, -1, 0]])
    there = y[0] >= 0
    torch.testing.assert_close(told(loss, vectors, y), told(loss, vectors[:, there], y[:, there]))
    nothing = told(loss, vectors.requires_grad_(), torch.full_like(y, -1))
    nothing.sum().backward()
    assert nothing.isfinite().all()
    assert vectors.grad is not None
    assert not vectors.grad.any()


@pytest.mark.parametrize("method", METHODS)
def test_targets_that_are_no_classes_are_refused_in_one_line(method: str) -> None:
    """Symptom: ``The size of tensor a (4) must match the size of tensor b (12)``, in the first batch."""
    pieces, x, label = [nn.Linear(6, 8), nn.Linear(8, 8)], torch.randn(4, 6), TOLD[method].label
    for task in ("regression", "multilabel"):
        with pytest.raises(
            ConfigError, match=f"^{label} compares samples by their classes, but a target .* no single class"
        ):
            ALPackage.from_bp(pieces, x, 3, task=task, method=method)  # type: ignore[arg-type]
    package = ALPackage.from_bp(pieces, x, 3, method=method)
    with pytest.raises(DataError, match=r"targets are \(4, 3\) float32; expected \(4,\) class numbers"):
        package[0](x, torch.rand(4, 3).softmax(1))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("predsim", {"beta": 1.0}, "beta is 1.0; expected 0 <= beta < 1"),
        ("predsim", {"decoder": 0}, "decoder is 0; expected a whole number, at least 1"),
        ("predsim", {"lr": {"enc": 1.0, "ae": 1.0}}, "the PredSim form has no sides: give one learning rate"),
        ("scpl", {"temperature": 0.0}, "temperature is 0.0; expected a number above 0"),
        ("scpl", {"cells": 0}, "cells is 0; expected a whole number, at least 1"),
        ("scpl", {"projector": "mpl"}, "unknown projector 'mpl'"),
        ("scpl", {"lr": {"enc": 1.0, "ae": 1.0}}, "the SCPL form has no sides: give one learning rate"),
        ("deinforeg", {"variance": -1.0}, "weights are .0.001, -1.0, 1.0, 1.0.; expected numbers, at least 0"),
        ("deinforeg", {"width": 0}, "width is 0; expected a whole number, at least 1"),
        ("deinforeg", {"lr": {"enc": 1.0, "ae": 1.0}}, "the DeInfoReg form has no sides: give one learning rate"),
    ],
)
def test_what_it_cannot_use_is_refused(method: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(make_layers(method, Resnet.network(5, dims=VISION), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["predsim", "scpl"])
def test_texts_are_compared_alike_in_parts_and_whole(method: str) -> None:
    loss, vectors, y = LOSSES[method](), torch.randn(4, 5, 3), torch.randint(5, (4, 5))
    parts = [told(loss, vectors[rows], y[rows]) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(0.25 * parts[0] + 0.75 * parts[1], told(loss, vectors, y))


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_no_loss(method: str) -> None:
    """Without dropout, whose masks are of the padded size."""
    network = Transformer.network(50, 4, dims=replace(TEXT, dropout=0.0))
    torch.manual_seed(0)
    layers = list(make_layers(method, network))
    x, y = torch.randint(2, 50, (5, 6)), torch.tensor([0, 1, 1, 3, 0])
    x[0, 3:] = 0
    padded = torch.cat([x, torch.zeros(5, 4, dtype=torch.long)], 1)
    found = []
    for given in (x, padded):
        features: object = given
        for layer in layers:
            features, _ = layer(features, y)
        found.append([loss for layer in layers for loss in layer.loss() or ()])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("method", [*METHODS, "greedy"])
def test_it_learns(method: str) -> None:
    package = built("lstm", method)
    y = torch.arange(16) % 4
    x = (y + 1).unsqueeze(1).expand(16, 5).contiguous()
    with Pipeline(package, "cpu", "sequential", threads=1) as pipe:
        pipe.run([(x, y)] * 60)
        assert all(torch.equal(logits.argmax(-1), y) for logits in next(pipe.predict_exits([x])))
