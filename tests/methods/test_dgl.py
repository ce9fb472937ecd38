"""The heads of decoupled greedy learning, worked by hand; the rest is every method's (``test_greedy.py``)."""

from __future__ import annotations

from itertools import product
from math import exp, log, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import ALPackage, Pipeline
from pipeal.methods.greedy import Greedy
from pipeal.models import TextDims, build_text
from tests.methods.test_greedy import batches, built

pytestmark = pytest.mark.usefixtures("one_thread")

Rows = list[list[float]]


def normed(rows: Rows, norm: Any) -> Rows:
    """Of ``(N, C)``, by the statistics of the N; then ReLU."""
    columns = []
    for place, column in enumerate(zip(*rows, strict=True)):
        mean = sum(column) / len(column)
        variance = sum((value - mean) ** 2 for value in column) / len(column)
        weight, bias = norm.weight[place].item(), norm.bias[place].item()
        columns.append([max(0.0, (value - mean) / sqrt(variance + 1e-5) * weight + bias) for value in column])
    return [list(row) for row in zip(*columns, strict=True)]


def mapped(rows: Rows, weight: Tensor, bias: Tensor | None) -> Rows:
    matrix = weight.flatten(1).tolist()
    return [
        [
            sum(w * value for w, value in zip(line, row, strict=True)) + (0.0 if bias is None else bias[out].item())
            for out, line in enumerate(matrix)
        ]
        for row in rows
    ]


def cell_means(images: Any, cells: int) -> Any:
    """``(B, C, S, S)`` lists to ``(B, C, cells, cells)``."""
    side = len(images[0][0]) // cells
    return [
        [
            [
                [
                    sum(plane[row * side + i][column * side + j] for i, j in product(range(side), repeat=2)) / side**2
                    for column in range(cells)
                ]
                for row in range(cells)
            ]
            for plane in image
        ]
        for image in images
    ]


def cross_entropy(answers: Rows, y: Tensor) -> float:
    losses = [log(sum(map(exp, row))) - row[int(wanted)] for row, wanted in zip(answers, y, strict=True)]
    return sum(losses) / len(losses)


def test_the_loss_of_an_image_is_that_of_its_head_by_hand() -> None:
    """Features of 8 × 8 go to 2 × 2, through three 1 × 1 convolutions, and flat through four linear maps."""
    layer: Any = built("vgg", "dgl").double()[0]
    x, y = batches("vgg", 1)[0]
    x = x.double()
    layer.train()
    layer(x, y)
    (found,) = layer.loss()
    features = layer.f(x)  # batch norm there counts the same batch twice, which changes nothing in training
    batch, channels, side, _ = features.shape
    assert side == 8
    _, *steps, _, _, l1, n1, _, l2, n2, _, l3, n3, _, answer = layer.head
    pixels = cell_means(features.tolist(), 2)
    rows = [[pixels[b][c][i][j] for c in range(channels)] for b in range(batch) for i in (0, 1) for j in (0, 1)]
    assert len(steps) == 9
    for convolution, norm, _ in zip(steps[::3], steps[1::3], steps[2::3], strict=True):
        assert convolution.kernel_size == (1, 1)
        rows = normed(mapped(rows, convolution.weight, None), norm)
    flat = [[rows[b * 4 + place][c] for c in range(channels) for place in range(4)] for b in range(batch)]
    for linear, norm in ((l1, n1), (l2, n2), (l3, n3)):
        flat = normed(mapped(flat, linear.weight, linear.bias), norm)
    wanted = cross_entropy(mapped(flat, answer.weight, answer.bias), y)
    assert float(found) == pytest.approx(wanted, abs=1e-5)


def test_the_loss_of_a_text_is_that_of_its_head_by_hand() -> None:
    torch.manual_seed(0)
    dims = TextDims(embedding=4, hidden=3, code=2, heads=2, blocks=1, dropout=0.0)
    layer: Any = build_text("transformer", "dgl", vocab_size=9, classes=3, dims=dims).double()[0]
    x, y = torch.tensor([[2, 3, 4], [5, 0, 0]]), torch.tensor([2, 1])
    layer(x, y)
    (found,) = layer.loss()
    features, _ = layer.f(x)
    each, _, *maps = layer.head

    def through(steps: Any, row: list[float]) -> list[float]:
        for linear, norm, _ in zip(steps[::3], steps[1::3], steps[2::3], strict=True):
            (row,) = mapped([row], linear.weight, linear.bias)
            mean = sum(row) / len(row)
            spread = sqrt(sum((value - mean) ** 2 for value in row) / len(row) + norm.eps)
            row = [
                max(0.0, (value - mean) / spread * norm.weight[place].item() + norm.bias[place].item())
                for place, value in enumerate(row)
            ]
        return row

    answers: Rows = []
    for text, words in ((0, 3), (1, 1)):
        rows = [through(list(each.maps), row) for row in features[text, :words].tolist()]
        pooled = [sum(column) / words for column in zip(*rows, strict=True)]
        answers += mapped([through(maps[:-1], pooled)], maps[-1].weight, maps[-1].bias)
    assert float(found) == pytest.approx(cross_entropy(answers, y), abs=1e-5)


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_padding_changes_no_loss(name: str) -> None:
    torch.manual_seed(0)
    dims = TextDims(embedding=4, hidden=3, code=2, heads=2, blocks=2, dropout=0.0)
    package = build_text(name, "dgl", vocab_size=9, classes=3, dims=dims)
    x, y = torch.tensor([[2, 3, 4], [5, 0, 0]]), torch.tensor([2, 1])
    losses = []
    for padded in (x, torch.cat([x, torch.zeros(2, 4, dtype=torch.long)], 1)):
        package(padded, y)
        losses.append(package.losses())
    torch.testing.assert_close(*losses)


def test_nothing_later_in_a_text_changes_an_answer() -> None:
    package = built("charlm", "dgl").train()
    for layer in package.modules():
        layer.p = 0.0 if hasattr(layer, "p") else None  # without dropout
    x = torch.arange(6).view(1, 6)
    other = x.clone()
    other[0, 4:] = 11
    for exit_at in (1, 2):
        found, changed = package.infer(x, exit_at), package.infer(other, exit_at)
        assert torch.equal(found[:, :4], changed[:, :4])
        assert not torch.equal(found[:, 4:], changed[:, 4:])


def test_pixels_are_told_by_every_layer() -> None:
    """Symptom: ``targets are (2, 8, 8) int64 and logits (2, 5) float32``. Cause: heads answered for an image."""
    pieces = [nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU()), nn.Conv2d(6, 5, 1)]
    package = ALPackage.from_bp(pieces, torch.randn(2, 3, 8, 8), 5, task="per-place", method="dgl")
    x, y = torch.randn(2, 3, 8, 8), torch.randint(5, (2, 8, 8))
    package(x, y)
    assert all(torch.as_tensor(losses).isfinite().all() for losses in package.losses())
    other = x.clone()
    other[:, :, 6:] += 1
    found, changed = package.infer(x, 1), package.infer(other, 1)
    assert torch.equal(found[:, :5], changed[:, :5])
    assert not torch.equal(found[:, 6:], changed[:, 6:])


def test_the_last_part_has_the_networks_own_linear_classifier() -> None:
    for name in ("vgg", "lstm", "charlm"):
        package: Any = built(name, "dgl")
        assert all(type(layer) is Greedy for layer in package)
        *_, answer = package[-1].head
        assert sum(weights.numel() for weights in package[-1].head[-1].parameters()) == sum(
            weights.numel() for weights in answer.parameters()
        )
        assert len(package[-1].head) == 2
        assert len(package[0].head) > 2


@pytest.mark.parametrize("name", ["vgg", "resnet"])
def test_a_batch_of_one_image_is_learnt_from(name: str) -> None:
    """Symptom: ``Expected more than 1 value per channel``: the last batch of an epoch was one image, or a batch was cut
    for want of memory. Cause: batch norm of flat features."""
    package = built(name, "dgl")
    x, y = batches(name, 1)[0]
    with Pipeline(package, "cpu", "sequential", threads=1) as pipe:
        report = pipe.run([(x, y), (x[:1], y[:1])])
    assert all(losses.isfinite().all() for losses in report.losses)
