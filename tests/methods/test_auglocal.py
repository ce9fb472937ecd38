"""Heads that look ahead: their loss by hand, and what they are made of; the rest is every method's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import ConfigError, Pipeline
from pipeal.methods.auglocal import fewer_above
from pipeal.models import CharDims, TextDims, VisionDims, build_language, build_text, build_vision
from tests.methods.test_greedy import NAMES, batches, built

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGES: Any = {"classes": 5, "dims": VisionDims(size=16, width=0.25)}


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_cross_entropy_of_the_answer_through_the_copies(name: str) -> None:
    package: Any = built(name, "auglocal").eval()  # without dropout
    ((x, y),) = batches(name, 1)
    for number, layer in enumerate(package):
        features = layer.f(x)
        *copies, pool, answer = layer.head
        assert len(copies) == len(package) - 1 - number  # of the first block of every part still to come
        through = features
        for copy in copies:
            through = copy(through)
        logits = answer(pool(through)).double()
        labels = y.reshape(-1)
        rows = [row.log_softmax(0)[wanted] for row, wanted in zip(logits.flatten(0, -2), labels, strict=True)]
        out, after = layer(x, y)
        assert after is y
        (loss,) = layer.loss()
        torch.testing.assert_close(loss.double(), -torch.stack(rows).mean(), atol=1e-5, rtol=0)
        x = out


def without_inputs(weights: Tensor) -> tuple[int, ...]:
    """The shape of weights, but for how many features they read."""
    return (len(weights), *weights.shape[2:])


@pytest.mark.parametrize("name", NAMES)
def test_copies_are_made_like_the_blocks_to_come_with_weights_of_their_own(name: str) -> None:
    package: Any = built(name, "auglocal")
    shapes = [set(map(without_inputs, layer.f.parameters())) for layer in package]
    for number, layer in enumerate(package):
        *copies, _, _ = layer.head
        for above, copy in enumerate(copies, number + 1):
            assert set(map(without_inputs, copy.parameters())) <= shapes[above]
    own = [id(weights) for layer in package for weights in layer.parameters()]
    assert len(own) == len(set(own))
    drawn = [weights for layer in package for weights in layer.parameters() if weights.dim() > 1]
    assert not any(
        one.shape == other.shape and torch.equal(one, other) for i, one in enumerate(drawn) for other in drawn[:i]
    )


def built_with(**options: Any) -> Any:
    torch.manual_seed(0)
    return build_vision("resnet", "auglocal", method_options=options, **IMAGES)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [4, 3, 2, 1, 0]),
        ({"depth": 3, "pyramid": 0.0}, [3, 3, 3, 2, 0]),  # the stem is a part; two blocks are in each of the others
        ({"depth": 3, "pyramid": 0.9}, [3, 2, 2, 1, 0]),
        ({"depth": 3}, [3, 3, 2, 2, 0]),
        ({"depth": 1}, [1, 1, 1, 1, 0]),
    ],
)
def test_heads_have_as_many_copies_as_they_are_told(options: dict[str, Any], wanted: list[int]) -> None:
    package = built_with(**options)
    assert [len(layer.head) - 2 for layer in package] == wanted


def test_copies_are_as_wide_as_they_are_told() -> None:
    whole, half = built_with(), built_with(width=0.5)
    for one, other in zip(whole, half, strict=True):
        *copies, _, thin = other.head
        assert thin.in_features == one.head[-1].in_features // (2 if copies else 1)
        assert [weights.shape for weights in other.f.parameters()] == [weights.shape for weights in one.f.parameters()]


def small(name: str, **options: Any) -> Any:
    if name in ("vgg", "resnet"):
        return build_vision(name, "auglocal", method_options=options, **IMAGES)
    if name == "charlm":
        dims = CharDims(block=6, width=8, heads=2, layers=3)
        return build_language(name, "auglocal", characters=20, dims=dims, method_options=options)
    words = TextDims(embedding=8, hidden=8, code=4, heads=2)
    return build_text(name, "auglocal", vocab_size=50, classes=4, dims=words, method_options=options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{"width": 0.5}, {"width": 0.1, "depth": 2}, {"width": 1.5, "depth": 1}], ids=str)
def test_every_model_is_looked_ahead_of_by_copies_of_any_width(name: str, options: dict[str, Any]) -> None:
    whole, other = small(name), small(name, **options)

    def sizes(package: Any) -> list[int]:
        return [sum(weights.numel() for weights in layer.head.parameters()) for layer in package]

    if options["width"] < 1:
        assert all(one < two for one, two in zip(sizes(other)[:-1], sizes(whole)[:-1], strict=True))
    with Pipeline(other, "cpu", "sequential", threads=1) as pipe:
        report = pipe.run(batches(name))
    assert all(losses.isfinite().all() for losses in report.losses)


@pytest.mark.parametrize("name", ["vgg", "resnet"])
@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_heads_end_at_the_networks_resolution_whatever_they_leave_out(name: str, depth: int) -> None:
    """Symptom: with ``depth`` 1, ResNet in four parts took 7.7 times the operations of backpropagation. Cause: a copy
    of its last block, of the most channels, read images of full size, since it shrinks none itself."""
    for parts in (2, 3, 4):
        dims = VisionDims(size=32, width=0.05, parts=parts)
        package: Any = build_vision(name, "auglocal", classes=5, dims=dims, method_options={"depth": depth}).eval()
        x, ends = torch.randn(2, 3, 32, 32), []
        for layer in package:
            x = layer.f(x)
            *copies, _, _ = layer.head
            ends.append(nn.Sequential(*copies)(x).shape[-1])
        assert ends == [x.shape[-1]] * parts


def test_fewer_above_as_the_published_code_has_it() -> None:
    """Its ``local_module_num`` counts the last part, which has no such head."""
    for depth, coefficient, modules in ((5, 0.5, 16), (3, 0.2, 10), (4, 1.0, 3), (2, 0.5, 2)):
        wanted = [
            max(1, round(depth * (1 - (i * coefficient) / (modules - 2)) + (i * coefficient) / (modules - 2) * 1))
            if modules > 2
            else depth
            for i in range(modules - 1)
        ]
        assert [fewer_above(depth, coefficient, i, hidden=modules - 1) for i in range(modules - 1)] == wanted


def test_options_that_cannot_be() -> None:
    for options, told in (
        ({"depth": 0}, "depth is 0; expected a whole number, at least 1"),
        ({"width": 0.0}, "width is 0.0; expected a number above 0 and at most 64"),
        ({"pyramid": 1.0}, "pyramid is 1.0; expected 0 <= pyramid < 1"),
    ):
        with pytest.raises(ConfigError, match=told):
            built_with(**options)
